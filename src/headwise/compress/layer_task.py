"""One layer to be cut: the text as it arrives there, and how near a candidate comes to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.nn.backbones_headwise import Weights
from headwise.nn.layer_stream import LayerStream
from headwise.plan import LayerPlan


@dataclass(frozen=True, slots=True)
class Batches:
    """Of every batch: what enters the cut and the dense layer, what left the dense one."""

    inputs: list[Tensor]
    dense_inputs: list[Tensor]
    attended: list[Tensor]  # by its attention
    outputs: list[Tensor]  # by the whole layer: the aim
    aside: tuple[int, ...]  # the numbers of those on which every choice is judged; none of few


@dataclass(frozen=True, slots=True)
class LayerTask:
    """A place in the model, the plan of its layer, and the text as it arrives there."""

    stream: LayerStream
    place: int
    plan: LayerPlan
    batches: Batches

    @property
    def aside(self) -> tuple[int, ...]:
        """The batches on which every choice is judged; none of few."""
        return self.batches.aside

    def layer(self, weights: Weights) -> nn.Module:
        """The cut layer with these projections, which it does not share."""
        own = tuple({side: t.clone() for side, t in part.items()} for part in weights)
        return self.stream.planned(self.place, self.plan, (own[0], own[1]))

    def run(self, layer: nn.Module, batch: int) -> Tensor:
        """The output of a layer in this place."""
        return self.stream.run(layer, self.place, self.batches.inputs[batch], batch)

    def error(self, weights: Weights) -> float:
        """What these projections miss on the batches kept aside."""
        return self.layer_error(self.layer(weights), self.aside)

    @torch.no_grad()
    def layer_error(self, layer: nn.Module, batches: Sequence[int]) -> float:
        """The mean over the tokens of these batches."""
        parts = [missed(self.run(layer, b), self.batches.outputs[b]).flatten() for b in batches]
        return float(torch.cat(parts).mean())


def missed(found: Tensor, target: Tensor) -> Tensor:
    """The log of 1 + each token's squared error as a share of its own square.

    A share, since norms divide by it, and a few tokens are a thousand times as long as the rest.
    The log leaves small shares as they are, but a token of usual length that a cut makes into a
    long one, or the reverse, would outweigh all others without it.
    """
    shares = (found.float() - target.float()).square().sum(-1) / size(target)
    return shares.log1p()


def size(states: Tensor) -> Tensor:
    """Each token's square; one that is all but zero counts as a ten-thousandth of a usual one."""
    squares = states.float().square().sum(-1)
    return squares.clamp_min((1e-4 * squares.median()).clamp_min(1e-30))
