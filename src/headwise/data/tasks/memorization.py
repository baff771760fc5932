"""Memorization: random sequences with random labels, of which a layer can only learn by heart.

Nothing about one example helps with another, so the number of examples that a network gets right
is its capacity. Mahdavi et al. (2024) put it at the order of H·min(n, d_h) for one attention
layer, `headwise.theory.capacity.memorization(heads, head_dim, n_tokens=task.length)`.

    example      x_1 x_2 … x_n  →  one of K labels        (the last token is also the query)
    own context  every example draws all its tokens
    shared       all examples share x_1 … x_{n−1}; only the query tells them apart
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headwise.data.tasks.base import Batch, Task, TaskError, at_least, generator_of


@dataclass(frozen=True, slots=True)
class Memorization(Task):
    """`examples` fixed sequences of white-noise tokens with uniform labels.

    `seed` fixes the sequences and `label_seed` the labels: the data set is part of the task, and
    what `sample` draws are rows of it.
    """

    length: int
    width: int
    examples: int
    labels: int
    shared: bool = False
    seed: int = 0
    label_seed: int = 0

    continuous: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least("a length", self.length, 1)
        at_least("a width", self.width, 1)
        at_least("examples", self.examples, 1)
        at_least("labels", self.labels, 2)

    @property
    def n_inputs(self) -> int:
        """Width of a token."""
        return self.width

    @property
    def n_outputs(self) -> int:
        """Different labels."""
        return self.labels

    def everything(self) -> Batch:
        """All examples, in order."""
        inputs, labels = _drawn(self, torch.get_default_dtype())
        return self._batch(inputs.clone(), labels)

    def sample(self, n: int, seed: int | torch.Generator = 0) -> Batch:
        """`n` different examples in random order."""
        if n > self.examples:
            raise TaskError(
                f"Expected at most the {self.examples} examples there are, got {n}; ask for fewer."
            )
        inputs, labels = _drawn(self, torch.get_default_dtype())
        rows = torch.randperm(self.examples, generator=generator_of(seed))[:n]
        return self._batch(inputs[rows], labels[rows])

    def _batch(self, inputs: Tensor, labels: Tensor) -> Batch:
        targets = torch.zeros(inputs.shape[:2], dtype=torch.int64)
        targets[:, -1] = labels
        scored = torch.zeros(inputs.shape[:2], dtype=torch.bool)
        scored[:, -1] = True
        return Batch(inputs, targets, scored)

    def relabelled(self, label_seed: int) -> Memorization:
        """The same sequences with other labels: whoever learned the first set is at chance."""
        return dataclasses.replace(self, label_seed=label_seed)

    @property
    def optimum(self) -> float:
        """1: no two examples are equal."""
        return 1.0

    @property
    def chance(self) -> float:
        """1/K: expected for every answer that was not fitted to these labels."""
        return 1 / self.labels

    @property
    def constant_accuracy(self) -> float:
        """What the best single answer gets on the labels as drawn; at least 1/K, by luck."""
        _, labels = _drawn(self, torch.get_default_dtype())
        return int(labels.bincount().max()) / self.examples

    @property
    def optimum_loss(self) -> float:
        """0."""
        return 0.0

    @property
    def chance_loss(self) -> float:
        """ln K."""
        return math.log(self.labels)


@functools.lru_cache(maxsize=4)
def _drawn(task: Memorization, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The whole data set, kept because every batch of a training needs it."""
    size = (task.examples, task.length, task.width)
    inputs = torch.randn(size, generator=generator_of(task.seed), dtype=dtype)
    if task.shared:
        inputs[:, :-1] = inputs[0, :-1].clone()
    # Scattered over the 32 bits that seed the generator, so that equal small seeds do not make
    # labels and tokens from the same random bits.
    generator = generator_of((2654435761 * task.label_seed + 40503) % 2**32)
    return inputs, torch.randint(task.labels, (task.examples,), generator=generator)
