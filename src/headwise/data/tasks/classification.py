"""Sequence classification with a known best accuracy.

`marks` positions, chosen at random, hold a fair bit (token 0 or 1); all others hold a filler
token (2 … V − 1). The label is a function of the bits in their order, flipped with probability
`noise`, so that the best accuracy is 1 − noise however long the sequence is:

    7 1 4 4 0 6 1 9    bits 1 0 1:   first → 1   majority → 1   parity → 0

    rule       what it takes
    first      order: counting the bits is not enough (`order_blind`)
    majority   counting: an average over the marks, no order
    parity     every single bit: whoever misses one is at chance
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from headwise.data.tasks.base import Batch, Task, TaskError, at_least, distinct_tokens, generator_of
from headwise.errors import did_you_mean

RULES = ("first", "majority", "parity")


@dataclass(frozen=True, slots=True)
class SequenceClassification(Task):
    """A noisy bit of the whole sequence, asked for at the last position."""

    length: int
    vocab_size: int
    marks: int
    rule: str = "first"
    noise: float = 0.0

    def __post_init__(self) -> None:
        at_least("marks", self.marks, 1)
        at_least("a length (the marks)", self.length, self.marks)
        at_least("a vocabulary (two bits and a filler)", self.vocab_size, 3)
        if self.rule not in RULES:
            raise TaskError(
                f"Expected a known rule, got {self.rule!r}. {did_you_mean(self.rule, RULES)}"
            )
        if self.rule == "majority" and self.marks % 2 == 0:
            raise TaskError(
                f"Expected an odd number of marks for a majority, got {self.marks}; add one."
            )
        if not 0 <= self.noise < 0.5:
            raise TaskError(
                f"Expected noise from 0 to below 0.5, got {self.noise}; it is the share of labels "
                "that are flipped."
            )

    @property
    def n_inputs(self) -> int:
        """Different tokens."""
        return self.vocab_size

    @property
    def n_outputs(self) -> int:
        """Two labels."""
        return 2

    def sample(self, n: int, seed: int | torch.Generator = 0) -> Batch:
        """`n` sequences with fresh label noise; only the last position is scored."""
        generator = generator_of(seed)
        places = distinct_tokens(n, self.length, self.marks, generator).sort(dim=-1).values
        bits = torch.randint(2, (n, self.marks), generator=generator)
        fillers = torch.randint(2, self.vocab_size, (n, self.length), generator=generator)
        flips = (torch.rand(n, generator=generator, dtype=torch.float64) < self.noise).long()
        targets = torch.zeros(n, self.length, dtype=torch.int64)
        targets[:, -1] = self._clean(bits) ^ flips
        scored = torch.zeros(n, self.length, dtype=torch.bool)
        scored[:, -1] = True
        return Batch(fillers.scatter(1, places, bits), targets, scored)

    @property
    def optimum(self) -> float:
        """1 − noise: the rule itself (the Bayes accuracy)."""
        return 1 - self.noise

    @property
    def chance(self) -> float:
        """1/2: both labels are equally likely under every rule."""
        return 0.5

    @property
    def optimum_loss(self) -> float:
        """The entropy of the noise."""
        p = self.noise
        return -(p * math.log(p) + (1 - p) * math.log1p(-p)) if p else 0.0

    @property
    def chance_loss(self) -> float:
        """ln 2."""
        return math.log(2)

    @property
    def order_blind(self) -> float:
        """Accuracy of the best predictor that only counts how often each token occurs.

        For `first` with c ones among m bits, the first is a one with probability c/m; the other
        rules do not depend on the order.
        """
        if self.rule != "first":
            return self.optimum
        m = self.marks
        right = sum(math.comb(m, c) * max(c, m - c) for c in range(m + 1))
        return self.noise + (1 - 2 * self.noise) * right / (m << m)

    def _clean(self, bits: Int[Tensor, "batch marks"]) -> Int[Tensor, " batch"]:
        if self.rule == "first":
            return bits[:, 0]
        ones = bits.sum(dim=-1)
        return ones % 2 if self.rule == "parity" else (2 * ones > self.marks).long()
