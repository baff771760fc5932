"""What every task has: batches with marked positions, one loss, one metric, two reference scores.

A batch has one target per position, and `scored` marks the positions that count:

    n-gram, 3 lags      · · x x x x x     the first positions lack their past
    induction head      · · · · x x x     only the repetition can be known
    classification      · · · · · · x     the last position has seen everything
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

from headwise.errors import HeadwiseError


class TaskError(HeadwiseError):
    """A task cannot have the sizes asked for, or has no such reference score."""


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """Sequences, a target for every position, and which positions are scored."""

    inputs: Shaped[Tensor, "batch length *width"]
    targets: Shaped[Tensor, "batch length *outputs"]
    scored: Bool[Tensor, "batch length"]

    def to(self, device: torch.device | str) -> TaskBatch:
        """The same batch on another device."""
        return TaskBatch(self.inputs.to(device), self.targets.to(device), self.scored.to(device))


class SyntheticTask(ABC):
    """Sequences to sample, and the scores that perfect and blind predictors reach on them.

    Regression is scored by the mean squared error per coordinate (lower is better), everything
    else by accuracy, both over scored positions. `optimum` and `chance` are in units of
    `metric`, `optimum_loss` and `chance_loss` in units of `loss`; all four are exact. Those given
    here are of a task with one right answer among equally likely ones.
    """

    __slots__ = ()

    regression: ClassVar[bool] = False  # targets are vectors rather than classes
    continuous: ClassVar[bool] = False  # inputs are vectors rather than token ids
    length: int

    @property
    @abstractmethod
    def n_inputs(self) -> int:
        """Width of the input vectors, or the size of the vocabulary."""

    @property
    @abstractmethod
    def n_outputs(self) -> int:
        """Width of the target vectors, or the number of classes."""

    @abstractmethod
    def sample(self, n: int, seed: int | torch.Generator = 0) -> TaskBatch:
        """`n` sequences; the same seed gives the same sequences."""

    def scored_sample(self, n: int, seed: int | torch.Generator = 0) -> TaskBatch:
        """`n` sequences to score on; the labels of a noisy task are without their noise."""
        return self.sample(n, seed)

    @property
    def optimum(self) -> float:
        """The metric of the best predictor there is."""
        return 1.0

    @property
    def chance(self) -> float:
        """The metric of the best predictor that never looks at its input."""
        return 1 / self.n_outputs

    @property
    def optimum_loss(self) -> float:
        """The loss of the best predictor there is."""
        return 0.0

    @property
    def chance_loss(self) -> float:
        """The loss of the best predictor that never looks at its input."""
        return math.log(self.n_outputs)

    def loss(
        self, outputs: Float[Tensor, "batch length outputs"], batch: TaskBatch
    ) -> Float[Tensor, ""]:
        """Mean squared error per coordinate, or mean cross-entropy, over scored positions."""
        kept, wanted = outputs[batch.scored], batch.targets[batch.scored]
        if self.regression:
            return functional.mse_loss(kept, wanted)
        return functional.cross_entropy(kept, wanted)

    def expected_loss(
        self, outputs: Float[Tensor, "batch length outputs"], batch: TaskBatch
    ) -> Float[Tensor, ""]:
        """The loss on a scored sample, in expectation over the noise of its labels."""
        return self.loss(outputs, batch)

    def expected_metric(
        self, outputs: Float[Tensor, "batch length outputs"], batch: TaskBatch
    ) -> float:
        """The metric on a scored sample, in expectation likewise."""
        return self.metric(outputs, batch)

    def metric(self, outputs: Float[Tensor, "batch length outputs"], batch: TaskBatch) -> float:
        """Mean squared error per coordinate, or accuracy, over scored positions."""
        outputs = outputs.detach()
        if self.regression:
            return float(self.loss(outputs, batch))
        kept, wanted = outputs[batch.scored], batch.targets[batch.scored]
        return float((kept.argmax(-1) == wanted).double().mean())


def generator_of(seed: int | torch.Generator) -> torch.Generator:
    """A CPU generator seeded with `seed`, or the given generator, which then moves on."""
    if isinstance(seed, torch.Generator):
        return seed
    return torch.Generator().manual_seed(seed)


def at_least(name: str, value: int, low: int) -> None:
    """Refuse a count below `low`."""
    if value < low:
        raise TaskError(f"Expected {name} of at least {low}, got {value}; pass a larger number.")


def distinct_tokens(
    n: int, vocab_size: int, count: int, generator: torch.Generator
) -> Int[Tensor, "batch count"]:
    """`count` different tokens for each of `n` sequences, every order equally likely."""
    noise = torch.rand(n, vocab_size, generator=generator)
    return noise.argsort(dim=-1)[:, :count]


def last_scored(inputs: Tensor, labels: Int[Tensor, " batch"]) -> TaskBatch:
    """Sequences with one label each, asked for at the last position."""
    targets = torch.zeros(inputs.shape[:2], dtype=torch.int64)
    targets[:, -1] = labels
    scored = torch.zeros(inputs.shape[:2], dtype=torch.bool)
    scored[:, -1] = True
    return TaskBatch(inputs, targets, scored)
