"""A cut layer fitted to the dense model's state after this layer.

The task: the inputs of the layer, and the error of a candidate against the target.

    cut layers before ───► h ─► the cut layer ───►  ≈ H
    dense layers before ─► h ─► the dense layer ─►  H     the target

Some batches are held aside; all choices are made by the error on them.

The fit:

    cut layers before ─► h ─┬─ q, k, v, o of the kept directions ─ + ─ MLP ─ + ─►  ≈ H
    dense layers before ─► the dense layer ────────────────────────────────────►   H

The ridge regression of W_O is exact but can only combine the kept directions to reproduce
the dense attention. Training all four projections also repairs the attention pattern and what the
values read. With the dense model's state after the MLP as the target, it also corrects part of the
error of earlier layers.

Only this layer is run, never later layers. Its attention is trained, and its MLP if that was cut:
both together, as one block. A whole MLP does not change. A fit that does not lower the error on the
batches held aside is discarded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.cutting.settings import CutSettings
from headwise.models.attention_headwise import PROJECTIONS, HeadwiseAttention
from headwise.models.backbones_headwise import Projections, layer_mlp, projections_of
from headwise.models.layer_stream import LayerStream
from headwise.plan import LayerPlan
from headwise.records import Frozen
from headwise.training.optimizer import adamw, set_learning_rate, trained_parameters
from headwise.training.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class LayerBatches:
    """For every batch: the inputs of the cut and the dense layer, and the dense layer's output."""

    inputs: list[Tensor]
    dense_inputs: list[Tensor]
    attended: list[Tensor]  # the outputs of the dense attention
    outputs: list[Tensor]  # the outputs of the whole dense layer: the targets
    mlp: list[Tensor]  # the outputs of the dense MLP; empty where the MLP is not cut
    held_aside: tuple[int, ...]  # batches used to choose; empty when there are too few


@dataclass(frozen=True, slots=True)
class LayerTask:
    """A position in the model, the plan of its layer, and the layer's inputs."""

    stream: LayerStream
    place: int
    plan: LayerPlan
    batches: LayerBatches

    def layer(self, projections: Projections) -> nn.Module:
        """The cut layer with a copy of these projections."""
        return self.stream.planned(self.place, self.plan, projections.map(Tensor.clone))

    def run(self, layer: nn.Module, batch: int) -> Tensor:
        """The output of a layer in this place."""
        return self.stream.run(layer, self.place, self.batches.inputs[batch], batch)

    def error(self, projections: Projections) -> float:
        """The mean error of these projections over the tokens held aside."""
        return self.layer_error(self.layer(projections), self.batches.held_aside)

    @torch.no_grad()
    def layer_error(self, layer: nn.Module, batches: Sequence[int]) -> float:
        """The mean error of a layer over the tokens of these batches."""
        targets = self.batches.outputs
        errors = [log1p_relative_error(self.run(layer, b), targets[b]).flatten() for b in batches]
        return float(torch.cat(errors).mean())


def log1p_relative_error(
    found: Float[Tensor, "*tokens d_model"], target: Float[Tensor, "*tokens d_model"]
) -> Float[Tensor, "*tokens"]:
    """log(1 + ‖found − target‖² / ‖target‖²) of each token.

    Relative, because norms divide by the length and a few tokens are a thousand times as long as
    the rest. The log does not change small errors; without it, one token of usual length that a cut
    makes long, or the reverse, would outweigh all others.
    """
    squared = (found.float() - target.float()).square().sum(-1)
    return (squared / squared_norm(target)).log1p()


def squared_norm(states: Float[Tensor, "*tokens d_model"]) -> Float[Tensor, "*tokens"]:
    """Each token's squared norm, at least a ten-thousandth of the median."""
    squares = states.float().square().sum(-1)
    return squares.clamp_min((1e-4 * squares.median()).clamp_min(1e-30))


def dense_outputs(
    stream: LayerStream, layer: nn.Module, i: int, inputs: list[Tensor], *, mlp: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The outputs of the attention, the layer and, with `mlp`, the MLP, batch by batch."""
    attended: list[Tensor] = []
    neurons: list[Tensor] = []
    with ExitStack() as open_hooks:
        listen = _hooked(attention_of(layer).o_proj, lambda m, args, out: attended.append(out))
        open_hooks.enter_context(listen)
        if mlp:
            down = layer.get_submodule(stream.family.mlp.down)
            listen = _hooked(down, lambda m, args, out: neurons.append(out))
            open_hooks.enter_context(listen)
        found = [stream.run(layer, i, h, b) for b, h in enumerate(inputs)]
    return attended, found, [x.view_as(h) for x, h in zip(neurons, found, strict=False)]


class _Reached(Exception):  # noqa: N818 (not an error: ends a layer's run at its output projection)
    pass


def output_projection_input(task: LayerTask, layer: nn.Module, batch: int) -> Tensor:
    """The input of the output projection; the rest of the layer is not run."""
    found: list[Tensor] = []

    def stop(module: Any, args: Any, output: Any) -> None:
        found.append(args[0])
        raise _Reached

    with _hooked(attention_of(layer).o_proj, stop), suppress(_Reached):
        task.run(layer, batch)
    return found[0]


def down_projection_input(task: LayerTask, layer: nn.Module, batch: int) -> tuple[Tensor, Tensor]:
    """The input of the MLP's down-projection, and the attention's output before it."""
    found: list[Tensor] = []

    def note(module: Any, args: Any, output: Any) -> None:
        found.append(output)

    def stop(module: Any, args: Any, output: Any) -> None:
        found.append(args[0])
        raise _Reached

    down = layer.get_submodule(task.stream.family.mlp.down)
    with _hooked(attention_of(layer).o_proj, note), _hooked(down, stop), suppress(_Reached):
        task.run(layer, batch)
    attended, neurons = found
    return neurons.reshape(*attended.shape[:-1], -1), attended


def attention_of(layer: nn.Module) -> HeadwiseAttention:
    """The planned attention in a layer."""
    return next(m for m in layer.modules() if isinstance(m, HeadwiseAttention))


@contextmanager
def _hooked(module: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


PASSES = 1  # over the calibration text, unless a number of steps is given; more add little
RATE_OF_ERROR = 0.1  # the largest rate worth trying, as a multiple of the root of the error


@dataclass(frozen=True, slots=True)
class FitSchedule:
    """The number of steps of one batch, and the peak learning rate relative to each matrix's size.

    The smaller a layer's error, the less its matrices have to change: steps that are too long only
    add noise, whose error grows with the square of the step.
    """

    steps: int
    rate: float
    seed: int = 0

    def rates(self, error: float) -> tuple[float, float]:
        """The rates to try in turn at this error; the first that lowers it is used."""
        first = min(self.rate, RATE_OF_ERROR * math.sqrt(error))
        return first, first / 4


class UnseenError(Frozen):
    """The error on the batches held aside; no `after` if the fit was discarded."""

    before: float
    after: float | None = None


class FitRecord(Frozen):
    """The result of a layer's fit; no rate if it was discarded."""

    steps: int
    rate: float | None
    unseen_error: UnseenError


def fit_schedule(
    settings: CutSettings, n_batches: int, held_aside: Sequence[int]
) -> FitSchedule | None:
    """The schedule for this number of batches; None if there is nothing to do."""
    steps = settings.fit if settings.fit is not None else PASSES * (n_batches - len(held_aside))
    if not steps or not held_aside:
        return None
    return FitSchedule(steps, settings.fit_rate, settings.seed)


def fit_layer(
    task: LayerTask, start: Projections, schedule: FitSchedule
) -> tuple[Projections | None, FitRecord]:
    """Better projections than `start`, or None; and the record of the fit."""
    before = task.error(start)
    for rate in schedule.rates(before):
        layer = task.layer(start)
        if not _train(task, layer, schedule, rate, mlp="down" in start.by_side):
            continue
        after = task.layer_error(layer, task.batches.held_aside)
        if after < before:
            seen = UnseenError(before=before, after=after)
            made = projections_of(attention_of(layer))
            if "down" in start.by_side:
                made = made.replaced(**layer_mlp(layer, task.stream.config).by_side)
            made = made.map(lambda t: t.detach().clone())
            return made, FitRecord(steps=schedule.steps, rate=rate, unseen_error=seen)
    return None, FitRecord(steps=schedule.steps, rate=None, unseen_error=UnseenError(before=before))


def _train(
    task: LayerTask, layer: nn.Module, schedule: FitSchedule, rate: float, *, mlp: bool
) -> bool:
    """Train the layer's projections in place; False if loss or gradient stopped being finite."""
    settings = TrainSettings(
        steps=schedule.steps, lr=rate, min_lr=rate / 50, lr_relative=True, weight_decay=0.0
    ).resolved(context=1, device="cpu", dtype="fp32")
    for name in PROJECTIONS.values():
        if (projection := getattr(attention_of(layer), name, None)) is not None:
            projection.requires_grad_()
    for path in task.stream.family.mlp.paths if mlp else ():
        layer.get_submodule(path).requires_grad_()
    optimizer = adamw(layer, settings)
    trained = list(trained_parameters(layer).values())
    for step, batch in enumerate(_order(task, schedule)):
        set_learning_rate(optimizer, step, settings)
        with torch.enable_grad():
            error = log1p_relative_error(task.run(layer, batch), task.batches.outputs[batch])
            loss = error.mean()
            loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(trained, settings.clip)
        if not (torch.isfinite(loss) and torch.isfinite(norm)):
            return False
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    layer.requires_grad_(False)
    return True


def _order(task: LayerTask, schedule: FitSchedule) -> Iterator[int]:
    """The batch of every step: each pass goes through all that are not held aside, shuffled."""
    aside = task.batches.held_aside
    used = [b for b in range(len(task.batches.outputs)) if b not in aside]
    for step in range(schedule.steps):
        turn, place = divmod(step, len(used))
        if place == 0:
            rng = np.random.default_rng([schedule.seed, task.place, turn])
            order = rng.permutation(len(used))
        yield used[order[place]]
