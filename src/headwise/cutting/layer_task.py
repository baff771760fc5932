"""One layer to be cut: the text as it arrives there, and how near a candidate comes to it.

    cut layers before ───► h ─► the cut layer ───►  ≈ H
    dense layers before ─► h ─► the dense layer ─►  H     the target

Some batches are held aside: whatever has to be chosen is chosen by the error on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.models.attention_headwise import HeadwiseAttention
from headwise.models.backbones_headwise import Projections
from headwise.models.layer_stream import LayerStream
from headwise.plan import LayerPlan


@dataclass(frozen=True, slots=True)
class LayerBatches:
    """For every batch: what enters the cut and the dense layer, and what leaves the dense one."""

    inputs: list[Tensor]
    dense_inputs: list[Tensor]
    attended: list[Tensor]  # the outputs of the dense attention
    outputs: list[Tensor]  # the outputs of the whole dense layer: the targets
    mlp: list[Tensor]  # the outputs of the dense MLP; empty where the MLP is not cut
    held_aside: tuple[int, ...]  # batches used to choose; empty when there are too few


@dataclass(frozen=True, slots=True)
class LayerTask:
    """A place in the model, the plan of its layer, and the text as it arrives there."""

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

    Relative, since norms divide by the length and a few tokens are a thousand times as long as the
    rest. The log leaves small errors as they are; without it, one token of usual length that a cut
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
    """What leaves the attention, the layer and, if asked, the MLP, batch by batch."""
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
    """What enters the output projection; the rest of the layer is not run."""
    found: list[Tensor] = []

    def stop(module: Any, args: Any, output: Any) -> None:
        found.append(args[0])
        raise _Reached

    with _hooked(attention_of(layer).o_proj, stop), suppress(_Reached):
        task.run(layer, batch)
    return found[0]


def down_projection_input(task: LayerTask, layer: nn.Module, batch: int) -> tuple[Tensor, Tensor]:
    """What enters the MLP's down-projection, and what left the attention before it."""
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
