"""One layer to be cut: the text as it arrives there, and how near a candidate comes to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.nn.backbones_headwise import Weights
from headwise.nn.layer_stream import LayerStream
from headwise.plan import LayerPlan

LEAST_BATCHES = 8  # of fewer, none is kept aside
CHECK_EVERY = 12  # one batch of so many is kept aside


@dataclass(frozen=True, slots=True)
class Batches:
    """Of every batch: what enters the cut and the dense layer, what left the dense one."""

    inputs: list[Tensor]
    dense_inputs: list[Tensor]
    attended: list[Tensor]  # by its attention
    outputs: list[Tensor]  # by the whole layer: the aim


@dataclass(frozen=True, slots=True)
class LayerTask:
    """A place in the model, the plan of its layer, and the text as it arrives there."""

    stream: LayerStream
    place: int
    plan: LayerPlan
    batches: Batches

    @property
    def aside(self) -> range:
        """The batches on which every choice is judged; none of few."""
        return kept_aside(len(self.batches.inputs))

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


def kept_aside(batches: int) -> range:
    """The numbers of the batches kept aside, of so many."""
    return range(CHECK_EVERY // 2, batches if batches >= LEAST_BATCHES else 0, CHECK_EVERY)


def missed(found: Tensor, target: Tensor) -> Tensor:
    """Each token's squared error as a share of its own square.

    Norms divide by it, and a few tokens are a thousand times as long as the rest.
    """
    return (found.float() - target.float()).square().sum(-1) / size(target)


def size(states: Tensor) -> Tensor:
    """Each token's square; one that is all but zero counts as a ten-thousandth of a usual one."""
    squares = states.float().square().sum(-1)
    return squares.clamp_min((1e-4 * squares.median()).clamp_min(1e-30))
