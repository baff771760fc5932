"""Compute at equal quality: two curves of loss against FLOPs, cut at the same loss.

    loss │ ╲╲
      L* ┤──╲─╲──        L* is the worse of the two final losses, so that both curves reach it
         │   ╲  ╲        saving = 1 − a/b
         └────a──b──── FLOPs (log)

Runs with a constant learning rate, so that each point of a curve is the end of a shorter run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TAIL = 3  # evaluations that the final loss averages, since a constant rate leaves it noisy


@dataclass(frozen=True, slots=True)
class Spent:
    """A run: FLOPs of one step, and its held-out losses by step."""

    flops_per_step: float
    steps: tuple[int, ...]
    losses: tuple[float, ...]

    @classmethod
    def of(cls, values: dict[str, Any]) -> Spent:
        """The run in the values of a trial."""
        return cls(float(values["flops_per_step"]), tuple(values["steps"]), tuple(values["losses"]))

    @property
    def final(self) -> float:
        """The loss at the end."""
        return final_loss(self.losses)

    def flops_to(self, loss: float) -> float:
        """FLOPs until the loss is first reached, between evaluations on a logarithmic scale."""
        if self.losses[0] <= loss:
            return self.flops_per_step * self.steps[0]
        for i in range(1, len(self.losses)):
            before, after = self.losses[i - 1], self.losses[i]
            if after <= loss:
                part = (before - loss) / (before - after)
                first, last = math.log(self.steps[i - 1]), math.log(self.steps[i])
                return self.flops_per_step * math.exp(first + part * (last - first))
        return self.flops_per_step * self.steps[-1]  # the mean of the tail, never reached by one

    def loss_at(self, flops: float) -> float | None:
        """The loss after so many FLOPs, between evaluations as above; None outside of them."""
        x = [math.log(self.flops_per_step * step) for step in self.steps]
        at = math.log(flops)
        if not x[0] - 1e-9 <= at <= x[-1] + 1e-9:
            return None
        return float(np.interp(at, x, self.losses))


def final_loss(losses: Sequence[float]) -> float:
    """The mean of the last evaluations."""
    tail = losses[-TAIL:]
    return sum(tail) / len(tail)


def saving(mine: Spent, reference: Spent) -> float:
    """The share of the reference's compute that I do not need for the same loss."""
    target = max(mine.final, reference.final)
    return 1 - mine.flops_to(target) / reference.flops_to(target)
