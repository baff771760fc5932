"""Neurons that fire together: one of them stays, and does the work of the others.

    x_j ≈ a · x_k  on every token         W_down[:, k]  ←  W_down[:, k] + a · W_down[:, j]

Sensitivities look at one neuron at a time, so of two that always fire together both may be kept,
or both dropped. Here neurons are taken in the order of their sensitivity, and one whose twin is
already kept gives its place to the next. Twins are told by the cosine of their activations over the
text. How alike they must be is tried: what serves the batches held aside best is taken, which may
be no merging at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.planning.fit import ranking

COSINES = (0.99, 0.95, 0.9)  # from here on two neurons are twins; the first where nothing is tried


@dataclass(frozen=True, slots=True)
class Merging:
    """Which neurons an MLP keeps, and which dropped ones the kept stand for."""

    kept: tuple[int, ...]  # ascending
    merged: tuple[int, ...] = ()  # ascending
    into: tuple[int, ...] = ()  # for each merged neuron its twin, as a place in `kept`
    factor: tuple[float, ...] = ()  # merged ≈ factor · its twin


class NeuronMoment:
    """The second moment of all neurons of an MLP, a batch at a time."""

    def __init__(self) -> None:
        self.sum: Tensor | None = None

    def add(self, x: Tensor) -> None:
        """Take in some tokens, as they enter W_down."""
        rows = x.detach().flatten(0, -2).float()
        if self.sum is None:
            self.sum = rows.mT @ rows
        else:
            self.sum.addmm_(rows.mT, rows)

    def mergings(
        self,
        sensitivity: Float[np.ndarray, " n"],
        width: int,
        cosines: Sequence[float] = COSINES,
    ) -> list[Merging]:
        """The mergings to `width` neurons that differ, by how alike twins must be."""
        assert self.sum is not None
        found: list[Merging] = []
        for cosine in cosines:
            made = merging(self.sum, sensitivity, width, cosine)
            if made.merged and made not in found:
                found.append(made)
        return found


@contextmanager
def neuron_moment(down: nn.Module | None) -> Iterator[NeuronMoment]:
    """While open, what enters a down-projection is taken in; None: nothing."""
    moment = NeuronMoment()
    if down is None:
        yield moment
        return

    def listen(module: Any, args: tuple[Tensor, ...]) -> None:
        moment.add(args[0])

    hook = down.register_forward_pre_hook(listen)
    try:
        yield moment
    finally:
        hook.remove()


def merging(
    moment: Float[Tensor, "n n"], sensitivity: Float[np.ndarray, " n"], width: int, cosine: float
) -> Merging:
    """The `width` most sensitive neurons, no two of them twins while others are left."""
    energy = moment.diagonal()
    scale = energy.clamp_min(1e-30).rsqrt()
    is_twin = (moment * scale).mul_(scale[:, None]).abs_() >= cosine
    is_twin &= (energy > 0)[:, None] & (energy > 0)
    kept: list[int] = []
    waiting: list[int] = []
    has_twin = torch.zeros(len(energy), dtype=torch.bool)
    for j in ranking(sensitivity):
        if len(kept) == width:
            break
        if has_twin[j]:
            waiting.append(j)
            continue
        kept.append(j)
        has_twin |= is_twin[j]
    kept = sorted([*kept, *waiting[: width - len(kept)]])
    chosen = torch.tensor(kept)
    gone = torch.ones(len(energy), dtype=torch.bool)
    gone[chosen] = False
    merged = (gone & is_twin[:, chosen].any(1)).nonzero().flatten()
    # The nearest of several twins.
    near = (moment[merged][:, chosen] * scale[chosen]).abs() * is_twin[merged][:, chosen]
    into = near.argmax(1) if len(merged) else merged
    partner = chosen[into]
    factor = moment[merged, partner] / energy[partner]
    return Merging(
        tuple(kept), tuple(merged.tolist()), tuple(into.tolist()), tuple(factor.tolist())
    )
