"""One head of a trained model, and narrow students that imitate it.

    hidden (the dense layers before) ─┬─► teacher: the head's own projections ─► its part of the
                                      └─► student: narrower ones                 layer's output

The rest of the model stays dense, so the error of the student is all the error there is. A student
starts from the whitened truncation of the teacher's values and its strongest rotary planes, or from
random numbers of the teacher's size, and is fitted to the teacher's output by the one loop.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.compress.recipes.parts import attention_weights
from headwise.nn.attention_headwise import HeadwiseAttention, Surroundings
from headwise.nn.backbones_headwise import Weights
from headwise.nn.build import load_projections
from headwise.nn.configuration_headwise import Head, Layer
from headwise.nn.resolve import spread_planes
from headwise.plan import HeadSpec
from headwise.planning.worth_curves import most_valuable
from headwise.profile.factor import value_basis
from headwise.reproduce.pretrained import batches

Turns = tuple[Tensor, Tensor]  # cosines and sines of the positions


class _Reached(Exception):  # noqa: N818 (not an error: ends a forward pass at the layer wanted)
    pass


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the layer's attention reads on some windows."""

    hidden: Tensor  # windows × length × d_model
    turns: Turns


@dataclass(frozen=True, slots=True)
class Start:
    """The shape and the weights a student begins with."""

    spec: HeadSpec
    weights: Weights


@dataclass(frozen=True, slots=True)
class Exercise:
    """How a student is fitted: steps, windows per step, rates to choose from, and the seed."""

    steps: int
    batch: int
    rates: tuple[float, ...]
    seed: int


def lesson(model: Any, layer: int, ids: np.ndarray) -> Lesson:
    """The inputs of one layer's attention; layers after it are not run."""
    hidden: list[Tensor] = []
    turns: list[Turns] = []

    def stop(module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        hidden.append(_read(args, kwargs))
        cos, sin = kwargs["position_embeddings"]
        turns.append((cos[:1], sin[:1]))
        raise _Reached

    hook = model.attentions()[layer].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            for rows in batches(ids):
                with suppress(_Reached):
                    model(input_ids=rows, use_cache=False)
    finally:
        hook.remove()
    return Lesson(torch.cat(hidden), turns[0])


@contextmanager
def exchanged(attention: Any, old: nn.Module, new: nn.Module | None) -> Iterator[None]:
    """While open, a layer gives what `new` gives in place of `old`; None: nothing in its place."""

    def change(module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        hidden = _read(args, kwargs)
        rest = output[0] - old(hidden)
        return (rest if new is None else rest + new(hidden), *output[1:])

    hook = attention.register_forward_hook(change, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _read(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    found: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return found


class Imitation(nn.Module):
    """Heads on their own: from what their layer reads to their part of the layer's output."""

    def __init__(self, start: Start, like: HeadwiseAttention, turns: Turns) -> None:
        super().__init__()
        self.spec, self.turns = start.spec, turns
        spec = start.spec
        assert spec.score_scale is not None
        head = Head(
            spec.qk_dim, spec.vo_dim, spec.queries, spec.score_scale, spec.rotary_planes or ()
        )
        around = Surroundings(
            config=like.config,
            d_model=like.o_proj.out_features,
            layer_idx=0,
            is_causal=True,
            rotary_planes=turns[0].shape[-1] // 2,
        )
        self.attention = HeadwiseAttention(Layer((head,), frozenset(), frozenset()), around)
        load_projections(self.attention, start.weights)

    def forward(self, hidden: Tensor) -> Tensor:
        """Windows × length × d_model."""
        turns = tuple(t[:, : hidden.shape[1]] for t in self.turns)
        output: Tensor = self.attention(hidden, position_embeddings=turns)[0]
        return output

    def weights(self) -> Weights:
        """The four projections as they are now."""
        return attention_weights(self.attention)


def truncated(teacher: Imitation, shown: Lesson, width: int) -> Start:
    """The strongest planes and the whitened value directions of the teacher, `width` of each."""
    spec = teacher.spec
    seen = _seen(teacher, shown)
    half, g, vo = spec.qk_dim // 2, spec.queries, spec.vo_dim
    power = {
        name: seen[name].double().square().reshape(-1, 2, half).sum((0, 1)) for name in ("q", "k")
    }
    places = most_valuable((power["q"] * power["k"]).numpy(), width // 2)
    columns = [*places, *(half + p for p in places)]
    z = seen["z"].double().reshape(-1, vo)
    matrices = {side: w.double() for side, w in teacher.weights()[0].items()}
    W_O = matrices["output"].unflatten(1, (g, vo))  # d_model × queries × vo
    basis = value_basis((z.mT @ z / len(z)).numpy(), W_O.permute(2, 1, 0).flatten(1).numpy())
    encode = torch.from_numpy(basis.encode[:, :width].copy())
    decode = torch.from_numpy(basis.decode[:width].copy())
    made = {
        "query": matrices["query"].unflatten(0, (g, spec.qk_dim))[:, columns].flatten(0, 1),
        "key": matrices["key"][columns],
        "value": encode.mT @ matrices["value"],
        "output": (W_O @ decode.mT).flatten(1),
    }
    return Start(_narrowed(spec, width, places), ({s: w.float() for s, w in made.items()}, {}))


def random(teacher: Imitation, width: int, seed: int) -> Start:
    """Random projections as large as the teacher's, on planes spread over all frequencies."""
    generator = torch.Generator().manual_seed(seed)
    spec, made = teacher.spec, {}
    for side, matrix in teacher.weights()[0].items():
        axis = 1 if side == "output" else 0
        shape = list(matrix.shape)
        shape[axis] = shape[axis] * width // (spec.vo_dim if side in _VALUES else spec.qk_dim)
        made[side] = torch.randn(shape, generator=generator) * matrix.square().mean().sqrt()
    places = list(spread_planes(width // 2, spec.qk_dim // 2))
    return Start(_narrowed(spec, width, places), (made, {}))


_VALUES = ("value", "output")


def error(student: Imitation, teacher: Imitation, shown: Lesson) -> float:
    """Squared error of the student's output, as a share of the teacher's square."""
    missed = power = 0.0
    with torch.no_grad():
        for rows in shown.hidden.split(4):
            target = teacher(rows)
            missed += float((student(rows) - target).double().square().sum())
            power += float(target.double().square().sum())
    return missed / power if power else 0.0


def fitted(
    start: Start, teacher: Imitation, shown: tuple[Lesson, Lesson], exercise: Exercise
) -> tuple[Imitation, float]:
    """The student after its exercise, and the rate of several that is best on the second lesson.

    A student that gets worse there than it began is thrown away for its beginning, at rate 0.
    """
    used, aside = shown
    best = Imitation(start, teacher.attention, used.turns)
    least, chosen = error(best, teacher, aside), 0.0
    with torch.no_grad():
        targets = torch.cat([teacher(rows) for rows in used.hidden.split(4)])
    for rate in exercise.rates:
        student = Imitation(start, teacher.attention, used.turns)
        if not _trained(student, used, targets, exercise, rate):
            continue
        missed = error(student, teacher, aside)
        if math.isfinite(missed) and missed < least:
            best, least, chosen = student, missed, rate
    return best, chosen


def _trained(
    student: Imitation, used: Lesson, targets: Tensor, exercise: Exercise, rate: float
) -> bool:
    """Fit in place by the one loop; whether it stayed finite."""
    from headwise.training.engine import DivergenceError, Job
    from headwise.training.loop import run
    from headwise.training.processes import accelerator
    from headwise.training.settings import TrainSettings

    def dealt(step: int) -> dict[str, Tensor]:
        order = np.random.default_rng([exercise.seed, step]).permutation(len(targets))
        rows = torch.from_numpy(order[: exercise.batch])
        return {"hidden": used.hidden[rows], "target": targets[rows]}

    settings = TrainSettings(
        steps=exercise.steps,
        batch_size=min(exercise.batch, len(targets)),
        lr=rate,
        min_lr=rate / 50,
        lr_relative=True,
        weight_decay=0.0,
        eval_every=exercise.steps,
        save_every=exercise.steps,
        seed=exercise.seed,
    ).resolved(context=used.hidden.shape[1], device="cpu", dtype="fp32")
    try:
        outcome = run(Job(student, _loss, dealt, settings), accelerator("cpu"))
    except DivergenceError:
        return False
    if outcome.signal:
        raise KeyboardInterrupt  # half a fit is no result
    return True


def _loss(model: nn.Module, batch: Any, /) -> tuple[Tensor, Mapping[str, Tensor]]:
    target = batch["target"]
    missed = model(batch["hidden"]) - target
    return missed.square().sum() / target.square().sum().clamp_min(1e-30), {}


def _seen(teacher: Imitation, shown: Lesson) -> dict[str, Tensor]:
    """Queries and keys before their rotation, and what enters the output projection."""
    found: dict[str, list[Tensor]] = {"q": [], "k": [], "z": []}
    attention: Any = teacher.attention
    with ExitStack() as undo:
        for name in ("q", "k"):
            module = getattr(attention, f"{name}_proj")
            keep = found[name]
            undo.callback(
                module.register_forward_hook(lambda m, a, out, keep=keep: keep.append(out)).remove
            )
        undo.callback(
            attention.o_proj.register_forward_pre_hook(
                lambda m, args: found["z"].append(args[0])
            ).remove
        )
        with torch.no_grad():
            for rows in shown.hidden.split(4):
                teacher(rows)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _narrowed(spec: HeadSpec, width: int, places: list[int]) -> HeadSpec:
    planes = spec.rotary_planes or ()
    change = {
        "qk_dim": width,
        "vo_dim": width,
        "rotary_planes": tuple(planes[p] for p in places),
    }
    return spec.model_copy(update=change)
