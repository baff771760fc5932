"""The induction head, and its first step.

    full task   a b c d e | c a d      after "c" came "d", after "a" came "b": answers d b e
    first step  a b c d e  →  · a b c d      every position learns which token preceded it

Without MLPs the full task takes two layers: one copies the previous token to each position, the
next looks for the position whose previous token is the current one. The first step is a layer's
worth of work and its own task, `PreviousToken` (on vectors: `NGram.copying`).

No prefix holds a token twice, so the answer is never ambiguous. The prefix is not repeated in its
own order, because that has a shortcut: in "a b c d a b" the next token is always the one that has
not been seen for longest, and a single layer that weighs tokens by age finds it without ever
matching one. Asked for in random order, the tokens themselves must be found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headwise.data.tasks.base import Batch, Task, TaskError, at_least, distinct_tokens, generator_of


class _Copying(Task):
    """Uniform tokens of which one that was seen is the answer."""

    __slots__ = ()
    vocab_size: int

    @property
    def n_inputs(self) -> int:
        """Different tokens."""
        return self.vocab_size

    @property
    def n_outputs(self) -> int:
        """Different tokens."""
        return self.vocab_size

    @property
    def optimum(self) -> float:
        """1: the answer has been seen."""
        return 1.0

    @property
    def chance(self) -> float:
        """1/V: without the place that matters every token is equally likely."""
        return 1 / self.vocab_size

    @property
    def optimum_loss(self) -> float:
        """0."""
        return 0.0

    @property
    def chance_loss(self) -> float:
        """ln V."""
        return math.log(self.vocab_size)


@dataclass(frozen=True, slots=True)
class PreviousToken(_Copying):
    """Independent uniform tokens; the target is the token `back` places back."""

    length: int
    vocab_size: int
    back: int = 1

    def __post_init__(self) -> None:
        at_least("back", self.back, 1)
        at_least("a length (one scored position)", self.length, self.back + 1)
        at_least("a vocabulary", self.vocab_size, 2)

    def sample(self, n: int, seed: int | torch.Generator = 0) -> Batch:
        """`n` sequences; the first `back` positions are not scored."""
        tokens = torch.randint(
            self.vocab_size, (n, self.length), generator=generator_of(seed), dtype=torch.int64
        )
        scored = (torch.arange(self.length) >= self.back).expand(n, -1)
        return Batch(tokens, tokens.roll(self.back, dims=1), scored)


@dataclass(frozen=True, slots=True)
class InductionHead(_Copying):
    """Distinct random tokens, then some of them again; the target is what followed the first time.

    The first `prefix` tokens are distinct and uniform. The other `length − prefix` tokens, all
    scored, are different ones of them in random order, never the prefix's last, which nothing
    follows.
    """

    length: int
    vocab_size: int
    prefix: int

    def __post_init__(self) -> None:
        at_least("a prefix", self.prefix, 3)
        at_least("a vocabulary (the prefix)", self.vocab_size, self.prefix)
        at_least("a length (the prefix and one repeated token)", self.length, self.prefix + 1)
        if self.length >= 2 * self.prefix:
            raise TaskError(
                f"Expected a length of at most {2 * self.prefix - 1}, a prefix of {self.prefix} "
                f"and each token but its last again, got {self.length}; make the prefix longer."
            )

    def sample(self, n: int, seed: int | torch.Generator = 0) -> Batch:
        """`n` sequences with their answers."""
        generator = generator_of(seed)
        prefix = distinct_tokens(n, self.vocab_size, self.prefix, generator)
        repeated = self.length - self.prefix
        places = distinct_tokens(n, self.prefix - 1, repeated, generator)
        targets = torch.zeros(n, self.length, dtype=torch.int64)
        targets[:, self.prefix :] = prefix.gather(1, places + 1)
        scored = (torch.arange(self.length) >= self.prefix).expand(n, -1)
        return Batch(torch.cat([prefix, prefix.gather(1, places)], dim=1), targets, scored)

    @property
    def order_blind(self) -> float:
        """Accuracy of the best predictor that knows this token and *which* tokens came before.

        The other tokens of the prefix are then equally likely. Copying from any fixed distance
        does no better.
        """
        return 1 / (self.prefix - 1)

    @property
    def order_blind_loss(self) -> float:
        """The cross-entropy of that predictor."""
        return math.log(self.prefix - 1)
