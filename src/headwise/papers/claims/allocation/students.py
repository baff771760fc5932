"""One head of a trained model, and students whose queries and keys are narrower.

    hidden (from the dense layers before) ─┬─► teacher: its own W_Q, W_K ─► rows of attention p
                                           └─► student: narrower ones ────► rows p̃, compared with p

Values and output projection stay whole, so a student of full width has error 0. A student starts
from the truncated SVD of W_Q·W_Kᵀ. With rotary positions there is no such matrix, because each
plane rotates at its own speed: there it starts from the strongest planes. Then the library's
training loop fits it to the teacher's rows.

A causal row at position n attends to n tokens, so one window shows all lengths up to its own. The
*floor* is what is left when the scores of a window may be any matrix whose rank is the student's
width, found for that window alone. No head of that width can be told apart from such a matrix.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.models.attention_headwise import HeadwiseAttention, Surroundings
from headwise.models.backbones_headwise import Projection, Projections, projections_of
from headwise.models.build import load_projections, plan_of
from headwise.models.configuration_headwise import Head, Layer
from headwise.papers.harness.claim import Values
from headwise.papers.tasks.cuts import head_projections
from headwise.papers.tasks.network import EAGER
from headwise.papers.tasks.pretrained import batches, loss_from
from headwise.papers.tasks.training import stays_finite
from headwise.plan import HeadSpec
from headwise.planning.fit import most_valuable
from headwise.theory.saturation import attention_error_bound, total_variation_bound
from headwise.training.loop import TrainingJob
from headwise.training.settings import TrainSettings

ASIDE = 4  # one window in so many is set aside to choose the rate
TOGETHER = 4  # windows whose rows are in memory together
UNDERFLOW = 1e-37  # weights below are as good as 0, and have no logarithm
Rotations = tuple[Tensor, Tensor]  # cosines and sines of the positions
Rows = Float[Tensor, "windows length length"]  # attention weights, 0 after the diagonal


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
    """How students are made: widths, steps, windows per step, rates to choose from, the seed."""

    widths: tuple[int, ...]
    steps: int
    batch: int
    rates: tuple[float, ...]
    seed: int
    floor_steps: int
    floor_windows: int


@dataclass(frozen=True, slots=True)
class Lesson:
    """A model, windows to fit on and windows to score on, and the row lengths to report."""

    model: Any
    calibration: np.ndarray
    scored: np.ndarray
    lengths: tuple[int, ...]


def measure_head(given: Lesson, layer: int, methods: Sequence[str], fit: StudentFit) -> Values:
    """Students of one head of a layer: errors of their rows by length, rises of the model's loss.

    The seed chooses the head. `methods` are the names of two: the start, and the same fitted.
    """
    model = given.model
    heads, attention = plan_of(model).layers[layer], model.attentions()[layer]
    # Head groups in turn, then the next query head of each.
    query, group = divmod(fit.seed, len(heads.heads))
    query %= heads.heads[group].queries
    inputs, new = (attention_inputs(model, layer, x) for x in (given.calibration, given.scored))
    n = max(1, len(given.calibration) // ASIDE)
    used = AttentionInputs(inputs.hidden[n:], inputs.rotations)
    aside = AttentionInputs(inputs.hidden[:n], inputs.rotations)
    own = HeadStart(
        heads.heads[group].model_copy(update={"queries": 1}),
        head_projections(heads, group, query, projections_of(attention)),
    )
    teacher = StandaloneHead(own, attention, inputs.rotations).requires_grad_(False)
    whole_loss, loss_now = loss_from(model, layer, given.scored)
    with replaced_head(attention, teacher, None):
        removed = loss_now() - whole_loss
    rows, narrowest = [], None
    for width in fit.widths:
        start = narrow_start(teacher, used, width)
        begun = StandaloneHead(start, attention, inputs.rotations).requires_grad_(False)
        fitted, rate = fit_student(begun, teacher, (used, aside), fit)
        for method, student in zip(methods, (begun, fitted), strict=True):
            with replaced_head(attention, teacher, student):
                rise = loss_now() - whole_loss
            errors = row_errors(student, teacher, new, given.lengths)
            row = {"width": width, "method": method, "rise": rise, "rate": rate, **errors}
            rows.append(row)
        narrowest = fitted
    assert narrowest is not None
    few = AttentionInputs(new.hidden[: fit.floor_windows], new.rotations)
    return {
        "layer": layer, "group": group, "query": query, "loss": whole_loss, "removed": removed,
        "students": rows,
        "uniform": uniform_errors(teacher, new, given.lengths),
        "floor": floor_errors(narrowest, teacher, few, given.lengths, fit.floor_steps),
    }  # fmt: skip


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
def replaced_head(
    attention: Any, old: StandaloneHead, new: StandaloneHead | None
) -> Iterator[None]:
    """While open, a layer outputs `new` in place of `old`; None puts nothing there."""

    def change(module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        hidden = _hidden_of(args, kwargs)
        rest = output[0] - old.attend(hidden)[0]
        return (rest if new is None else rest + new.attend(hidden)[0], *output[1:])

    hook = attention.register_forward_hook(change, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _hidden_of(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    found: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return found


class StandaloneHead(nn.Module):
    """A head on its own: from what its layer reads to its rows and its part of the output."""

    def __init__(self, start: HeadStart, like: HeadwiseAttention, rotations: Rotations) -> None:
        super().__init__()
        self.start, self.like, self.rotations = start, (like,), rotations
        spec = start.spec
        assert spec.score_scale is not None
        head = Head(
            spec.qk_dim, spec.vo_dim, spec.queries, spec.score_scale, spec.rotary_planes or ()
        )
        around = Surroundings(
            config=EAGER,
            d_model=like.o_proj.out_features,
            layer_idx=0,
            is_causal=True,
            rotary_planes=rotations[0].shape[-1] // 2,
        )
        self.attention = HeadwiseAttention(Layer((head,), frozenset(), frozenset()), around)
        load_projections(self.attention, start.projections)

    def attend(self, hidden: Tensor, *, causal: bool = True) -> tuple[Tensor, Rows]:
        """The head's part of the output, and its rows."""
        length = hidden.shape[1]
        mask = hidden.new_full((length, length), -math.inf).triu(1) if causal else None
        output, weights = self.attention(
            hidden, mask, position_embeddings=tuple(t[:, :length] for t in self.rotations)
        )
        return output, weights[:, 0]

    def forward(self, hidden: Tensor) -> Rows:
        """The rows alone."""
        return self.attend(hidden)[1]

    def again(self) -> StandaloneHead:
        """The head as it began, to be fitted: its queries and keys learn, all else is fixed."""
        made = StandaloneHead(self.start, self.like[0], self.rotations)
        made.requires_grad_(False)
        made.attention.q_proj.requires_grad_(True)
        made.attention.k_proj.requires_grad_(True)
        return made


def narrow_start(teacher: StandaloneHead, inputs: AttentionInputs, width: int) -> HeadStart:
    """Queries and keys of this width: the truncated SVD, or the strongest rotary planes."""
    spec = teacher.start.spec
    given = teacher.start.projections
    W_Q, W_K = (given[side].weight.double() for side in ("query", "key"))  # width × d_model
    planes = spec.rotary_planes or ()
    if planes:
        half = spec.qk_dim // 2
        assert len(planes) == half, "heads that are fully rotary, or not at all"
        seen = inputs.hidden.double().flatten(0, 1)
        power = [(seen @ W.mT).square().sum(0).unflatten(0, (2, half)).sum(0) for W in (W_Q, W_K)]
        kept = most_valuable((power[0] * power[1]).numpy(), width // 2)
        columns = [*kept, *(half + p for p in kept)]
        queries, keys, planes = W_Q[columns], W_K[columns], tuple(planes[p] for p in kept)
    else:
        left, sigma, right = torch.linalg.svd(W_Q.mT @ W_K, full_matrices=False)
        root = sigma[:width].sqrt()
        queries, keys = (left[:, :width] * root).mT, root[:, None] * right[:width]
    change = {"qk_dim": width, "rotary_planes": planes}
    made = given.replaced(query=Projection(queries.float()), key=Projection(keys.float()))
    return HeadStart(spec.model_copy(update=change), made)


# --- errors of rows, by their length -----------------------------------------------------------


def row_errors(
    student: StandaloneHead,
    teacher: StandaloneHead,
    inputs: AttentionInputs,
    lengths: Sequence[int],
) -> dict[str, list[float]]:
    """Means over the rows of every length (from half of it on, so that rows differ)."""
    with torch.no_grad():
        parts = [compared_rows(teacher(x), student(x)) for x in inputs.hidden.split(TOGETHER)]
    return _by_length(parts, lengths)


def uniform_errors(
    teacher: StandaloneHead, inputs: AttentionInputs, lengths: Sequence[int]
) -> list[float]:
    """The misplaced attention of a head without queries and keys."""
    with torch.no_grad():
        parts = []
        for x in inputs.hidden.split(TOGETHER):
            p = teacher(x)
            equal = torch.ones_like(p).tril()
            equal /= equal.sum(-1, keepdim=True)
            parts.append({"misplaced": (p - equal).abs().sum(-1) / 2})
    return _by_length(parts, lengths)["misplaced"]


def floor_errors(
    student: StandaloneHead,
    teacher: StandaloneHead,
    inputs: AttentionInputs,
    lengths: Sequence[int],
    steps: int,
) -> list[float]:
    """The misplaced attention when a window's scores are any matrix of the student's rank.

    They begin as the student's own scores, so the floor is not above what the student reaches on
    these windows, up to what the descent loses.
    """
    with torch.no_grad():
        p = teacher(inputs.hidden)
        scores = _logs(student.attend(inputs.hidden, causal=False)[1])
        scores -= scores.mean(-1, keepdim=True)
        left, sigma, right = torch.linalg.svd(scores, full_matrices=False)
        width = student.start.spec.qk_dim
        root = sigma[:, :width].sqrt()
        sides = [left[..., :width] * root[:, None], right[:, :width].mT * root[:, None]]
    factors = [side.clone().requires_grad_(True) for side in sides]
    optimizer = torch.optim.Adam(factors, 0.02 * float(root.mean()) / p.shape[-1] ** 0.5)
    best = math.inf
    kept = torch.empty(0)
    for _ in range(steps + 1):
        q = _causal_softmax(factors[0] @ factors[1].mT)
        wrong = (p - q).abs().sum(-1) / 2
        if float(wrong.detach().mean()) < best:
            best, kept = float(wrong.detach().mean()), wrong.detach()
        optimizer.zero_grad()
        _divergence(p, q).backward()
        optimizer.step()
    return _by_length([{"misplaced": kept}], lengths)["misplaced"]


def compared_rows(p: Rows, q: Rows) -> dict[str, Float[Tensor, "windows length"]]:
    """How far q is from p, row by row, and how far the theory allows.

    Scores are logarithms of weights, up to a number that all scores of a row share and that
    changes nothing. So C is half the range of a row's scores, and Λ leaves out the mean error.
    """
    seen = torch.ones_like(p, dtype=torch.bool).tril()
    counts = seen.sum(-1)
    before, after = (_logs(x).double() for x in (p, q))
    moved = torch.where(seen, after - before, 0.0)
    mean = moved.sum(-1) / counts
    score_error = torch.where(seen, moved - mean[..., None], 0.0).norm(dim=-1)
    reach = torch.stack([_range(x, seen) for x in (before, after)]).amax(0) / 2
    bounds = [
        attention_error_bound(error, n, score_bound=c)
        for error, n, c in zip(
            score_error.flatten().tolist(), counts.flatten().tolist(), reach.flatten().tolist(),
            strict=True,
        )
    ]  # fmt: skip
    widths = _range(moved, seen).flatten().tolist()
    return {
        "misplaced": (p - q).double().abs().sum(-1) / 2,
        "error": (p - q).double().norm(dim=-1),
        "score_error": score_error,
        "score_bound": reach,
        "bound": torch.tensor(bounds, dtype=torch.float64).view_as(reach),
        "misplaced_bound": torch.tensor([total_variation_bound(w) for w in widths]).view_as(reach),
    }


def _by_length(
    parts: Sequence[Mapping[str, Tensor]], lengths: Sequence[int]
) -> dict[str, list[float]]:
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {
        name: [float(rows[:, length // 2 : length].mean()) for length in lengths]
        for name, rows in whole.items()
    }


def _logs(weights: Tensor) -> Tensor:
    return weights.clamp_min(UNDERFLOW).log()


def _range(rows: Tensor, seen: Tensor) -> Tensor:
    high = rows.masked_fill(~seen, -math.inf).amax(-1)
    return high - rows.masked_fill(~seen, math.inf).amin(-1)


def _causal_softmax(scores: Tensor) -> Rows:
    after = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(after, -math.inf).softmax(-1)


def _divergence(p: Rows, q: Rows) -> Tensor:
    """Mean Kullback–Leibler divergence of the rows."""
    return (torch.xlogy(p, p) - p * _logs(q)).sum(-1).mean()


# --- fitting -----------------------------------------------------------------------------------


def fit_student(
    begun: StandaloneHead,
    teacher: StandaloneHead,
    inputs: tuple[AttentionInputs, AttentionInputs],
    fit: StudentFit,
) -> tuple[StandaloneHead, float]:
    """The student fitted on the first inputs, and the rate that is best on the second.

    A student that gets worse there than it began is discarded for its start, at rate 0.
    """
    used, aside = inputs
    best, chosen = begun, 0.0
    least = row_divergence(begun, teacher, aside)
    with torch.no_grad():
        targets = torch.cat([teacher(x) for x in used.hidden.split(TOGETHER)])
    for rate in fit.rates:
        student = begun.again()
        if not _fit_at(rate, student, used, targets, fit):
            continue
        student.requires_grad_(False)
        error = row_divergence(student, teacher, aside)
        if math.isfinite(error) and error < least:
            best, least, chosen = student, error, rate
    return best, chosen


def row_divergence(
    student: StandaloneHead, teacher: StandaloneHead, inputs: AttentionInputs
) -> float:
    """What a fit makes small, on these inputs."""
    with torch.no_grad():
        found = [
            _divergence(teacher(x), student(x)) * len(x) for x in inputs.hidden.split(TOGETHER)
        ]
    return float(torch.stack(found).sum()) / len(inputs.hidden)


def _fit_at(
    rate: float, student: StandaloneHead, used: AttentionInputs, targets: Rows, fit: StudentFit
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
    return stays_finite(TrainingJob(student, _fit_loss, batch_of, settings))


def _fit_loss(model: nn.Module, batch: Any, /) -> tuple[Tensor, Mapping[str, Tensor]]:
    return _divergence(batch["target"], model(batch["hidden"])), {}
