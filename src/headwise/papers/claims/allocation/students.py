"""One head of a trained model, and narrow students that imitate it.

    hidden (from the dense layers before) ─┬─► teacher: the head's own projections ─► its part of
                                           └─► student: narrower ones                 the output

The rest of the model stays dense, so the student's error is all the error there is. A student
starts from the whitened truncation of the teacher's values and its strongest rotary planes, or from
random numbers of the teacher's size, and is fitted to the teacher's output by the library's
training loop.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.models.attention_headwise import HeadwiseAttention, Surroundings
from headwise.models.backbones_headwise import Projection, Projections, projections_of
from headwise.models.build import load_projections, plan_of, spread_planes
from headwise.models.configuration_headwise import Head, Layer
from headwise.papers.harness.claim import Trial, Values
from headwise.papers.tasks.cuts import head_projections
from headwise.papers.tasks.pretrained import (
    batches,
    documents,
    loss_from,
    pretrained_model,
    trial_windows,
)
from headwise.papers.tasks.training import stays_finite
from headwise.plan import HeadSpec
from headwise.planning.fit import most_valuable
from headwise.profiling.reduction import value_basis
from headwise.training.loop import TrainingJob
from headwise.training.settings import TrainSettings

ASIDE = 4  # one window in so many is set aside to choose the rate
Rotations = tuple[Tensor, Tensor]  # cosines and sines of the positions


class _LayerReached(Exception):  # noqa: N818 (not an error: ends a forward pass at the layer)
    pass


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What the layer's attention reads on some windows."""

    hidden: Tensor  # windows × length × d_model
    rotations: Rotations


@dataclass(frozen=True, slots=True)
class HeadStart:
    """The shape and the weights that a student begins with."""

    spec: HeadSpec
    projections: Projections


@dataclass(frozen=True, slots=True)
class StudentFit:
    """How a student is fitted: steps, windows per step, rates to choose from, and the seed."""

    steps: int
    batch: int
    rates: tuple[float, ...]
    seed: int


def measure_students(trial: Trial, methods: Sequence[str]) -> Values:
    """Students of every width: errors on new text, and rises of the model's loss.

    `methods` are the names of three: a truncated SVD, the same fitted, and a random start fitted.
    """
    p, model = trial.parameters, pretrained_model().model
    layer = p["layer"]
    calibration, scored = trial_windows(p, trial.seed)
    heads, attention = plan_of(model).layers[layer], model.attentions()[layer]
    # Head groups in turn, then the next query head of each.
    query, group = divmod(trial.seed, len(heads.heads))
    query %= heads.heads[group].queries
    inputs, new = (attention_inputs(model, layer, ids) for ids in (calibration, scored))
    n = max(1, len(calibration) // ASIDE)
    fit_inputs = AttentionInputs(inputs.hidden[n:], inputs.rotations)
    aside = AttentionInputs(inputs.hidden[:n], inputs.rotations)
    own = HeadStart(
        heads.heads[group].model_copy(update={"queries": 1}),
        head_projections(heads, group, query, projections_of(attention)),
    )
    teacher = StandaloneHead(own, attention, inputs.rotations)
    fit = StudentFit(p["steps"], p["batch"], tuple(p["rates"]), trial.seed)
    whole_loss, loss_now = loss_from(model, layer, scored)
    with replaced_head(attention, teacher, None):
        removed = loss_now() - whole_loss
    rows = []
    for width in p["widths"]:
        svd = svd_start(teacher, fit_inputs, width)
        chance = random_start(teacher, width, trial.seed)
        made = (
            (StandaloneHead(svd, attention, inputs.rotations), 0.0),
            fit_student(svd, teacher, (fit_inputs, aside), fit),
            fit_student(chance, teacher, (fit_inputs, aside), fit),
        )
        for method, (student, rate) in zip(methods, made, strict=True):
            with replaced_head(attention, teacher, student):
                rise = loss_now() - whole_loss
            error = relative_error(student, teacher, new)
            found = {"error": error, "rise": rise, "rate": rate}
            rows.append({"width": width, "method": method, **found})
    return {
        "loss": whole_loss,
        "removed": removed,
        "group": group,
        "query": query,
        "students": rows,
        "text_sha256": documents(p["text"]).sha256,
    }


# --- a head on its own, and in its model -------------------------------------------------------


def attention_inputs(model: Any, layer: int, ids: np.ndarray) -> AttentionInputs:
    """The inputs of one layer's attention; layers after it are not run."""
    hidden: list[Tensor] = []
    rotations: list[Rotations] = []

    def stop(module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        hidden.append(_hidden_of(args, kwargs))
        cos, sin = kwargs["position_embeddings"]
        rotations.append((cos[:1], sin[:1]))
        raise _LayerReached

    hook = model.attentions()[layer].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            for rows in batches(ids):
                with suppress(_LayerReached):
                    model(input_ids=rows, use_cache=False)
    finally:
        hook.remove()
    return AttentionInputs(torch.cat(hidden), rotations[0])


@contextmanager
def replaced_head(attention: Any, old: nn.Module, new: nn.Module | None) -> Iterator[None]:
    """While open, a layer outputs `new` in place of `old`; None puts nothing there."""

    def change(module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        hidden = _hidden_of(args, kwargs)
        rest = output[0] - old(hidden)
        return (rest if new is None else rest + new(hidden), *output[1:])

    hook = attention.register_forward_hook(change, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _hidden_of(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    found: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return found


class StandaloneHead(nn.Module):
    """Heads on their own: from what their layer reads to their part of the layer's output."""

    def __init__(self, start: HeadStart, like: HeadwiseAttention, rotations: Rotations) -> None:
        super().__init__()
        self.spec, self.rotations = start.spec, rotations
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
            rotary_planes=rotations[0].shape[-1] // 2,
        )
        self.attention = HeadwiseAttention(Layer((head,), frozenset(), frozenset()), around)
        load_projections(self.attention, start.projections)

    def forward(self, hidden: Tensor) -> Tensor:
        """Windows × length × d_model."""
        rotations = tuple(t[:, : hidden.shape[1]] for t in self.rotations)
        output: Tensor = self.attention(hidden, position_embeddings=rotations)[0]
        return output

    def projections(self) -> Projections:
        """The four projections; the tensors are the head's own."""
        return projections_of(self.attention)


def relative_error(
    student: StandaloneHead, teacher: StandaloneHead, inputs: AttentionInputs
) -> float:
    """Squared error of the student's output, as a share of the teacher's squared output."""
    error = power = 0.0
    with torch.no_grad():
        for rows in inputs.hidden.split(4):
            target = teacher(rows)
            error += float((student(rows) - target).double().square().sum())
            power += float(target.double().square().sum())
    return error / power if power else 0.0


# --- starts ------------------------------------------------------------------------------------


def svd_start(teacher: StandaloneHead, inputs: AttentionInputs, width: int) -> HeadStart:
    """The strongest planes and the whitened value directions of the teacher, `width` of each."""
    spec = teacher.spec
    seen = _activations(teacher, inputs)
    half, g, vo = spec.qk_dim // 2, spec.queries, spec.vo_dim
    power = {
        name: seen[name].double().square().reshape(-1, 2, half).sum((0, 1)) for name in ("q", "k")
    }
    places = most_valuable((power["q"] * power["k"]).numpy(), width // 2)
    columns = [*places, *(half + p for p in places)]
    z = seen["z"].double().reshape(-1, vo)
    matrices = {side: p.weight.double() for side, p in teacher.projections().items()}
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
    own = Projections.of(w.float() for w in made.values())
    return HeadStart(_narrowed(spec, width, places), own)


def random_start(teacher: StandaloneHead, width: int, seed: int) -> HeadStart:
    """Random projections as large as the teacher's, on planes spread over all frequencies."""
    generator = torch.Generator().manual_seed(seed)
    spec, made = teacher.spec, {}
    for side, projection in teacher.projections().items():
        matrix, axis = projection.weight, 1 if side == "output" else 0
        full = spec.vo_dim if side in ("value", "output") else spec.qk_dim
        shape = list(matrix.shape)
        shape[axis] = shape[axis] * width // full
        drawn = torch.randn(shape, generator=generator) * matrix.square().mean().sqrt()
        made[side] = Projection(drawn)
    places = list(spread_planes(width // 2, spec.qk_dim // 2))
    return HeadStart(_narrowed(spec, width, places), Projections(made))


def _activations(teacher: StandaloneHead, inputs: AttentionInputs) -> dict[str, Tensor]:
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
            for rows in inputs.hidden.split(4):
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


# --- fitting -----------------------------------------------------------------------------------


def fit_student(
    start: HeadStart,
    teacher: StandaloneHead,
    inputs: tuple[AttentionInputs, AttentionInputs],
    fit: StudentFit,
) -> tuple[StandaloneHead, float]:
    """The student fitted on the first inputs, and the rate that is best on the second.

    A student that gets worse there than it began is discarded for its start, at rate 0.
    """
    used, aside = inputs
    best = StandaloneHead(start, teacher.attention, used.rotations)
    least, chosen = relative_error(best, teacher, aside), 0.0
    with torch.no_grad():
        targets = torch.cat([teacher(rows) for rows in torch.split(used.hidden, 4)])
    for rate in fit.rates:
        student = StandaloneHead(start, teacher.attention, used.rotations)
        if not _fit_at(rate, student, used, targets, fit):
            continue
        error = relative_error(student, teacher, aside)
        if math.isfinite(error) and error < least:
            best, least, chosen = student, error, rate
    return best, chosen


def _fit_at(
    rate: float, student: StandaloneHead, used: AttentionInputs, targets: Tensor, fit: StudentFit
) -> bool:
    """Fit in place at one learning rate; whether the loss stayed finite."""

    def batch_of(step: int) -> dict[str, Tensor]:
        order = np.random.default_rng([fit.seed, step]).permutation(len(targets))
        rows = torch.from_numpy(order[: fit.batch])
        return {"hidden": used.hidden[rows], "target": targets[rows]}

    settings = TrainSettings(
        steps=fit.steps,
        batch_size=min(fit.batch, len(targets)),
        lr=rate,
        min_lr=rate / 50,
        lr_relative=True,
        weight_decay=0.0,
        eval_every=fit.steps,
        save_every=fit.steps,
        seed=fit.seed,
    ).resolved(context=used.hidden.shape[1], device="cpu", dtype="fp32")
    return stays_finite(TrainingJob(student, _relative_loss, batch_of, settings))


def _relative_loss(model: nn.Module, batch: Any, /) -> tuple[Tensor, Mapping[str, Tensor]]:
    target = batch["target"]
    error = model(batch["hidden"]) - target
    return error.square().sum() / target.square().sum().clamp_min(1e-30), {}
