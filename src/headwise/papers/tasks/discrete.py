"""Tasks whose answers are tokens, labels or bits: copying, classification, memorization.

The induction head and its first step:

    full task   a b c d e | c a d      after "c" came "d", after "a" came "b": answers d b e
    first step  a b c d e  →  · a b c d      every position learns which token preceded it

Without MLPs the full task takes two layers: one copies the previous token to each position, the
next looks for the position whose previous token is the current one. The first step takes one layer
and is a task of its own, `PreviousToken` (on vectors: `NGram.copying`).

No prefix holds a token twice, so the answer is never ambiguous. The prefix is not repeated in its
own order, because that has a shortcut: in "a b c d a b" the next token is always the one that has
not been seen for longest, and a single layer that weighs tokens by age finds it without ever
matching one. Asked for in random order, the tokens themselves must be found.

`ContextInduction` asks with several tokens at once. A prefix of independent tokens is followed by
questions, each a window of the prefix that occurs there once; the answer is what followed it:

    prefix 0 2 2 1 0 2 3 1 2 …   asked 0 2 3 → 1     0 2 alone was followed by a 2 as well

What knowing only some of the last tokens is worth is exact for any batch (`partial_accuracy`).

Sequence classification has a known best accuracy. `marks` positions, chosen at random, hold a fair
bit (token 0 or 1); all others hold a filler token (2 … V − 1). The label is a function of the bits
in their order, flipped with probability `noise`, so that the best accuracy is 1 − noise however
long the sequence is:

    7 1 4 4 0 6 1 9    bits 1 0 1:   first → 1   majority → 1   parity → 0

    rule       what it takes
    first      order: counting the bits is not enough (`order_blind`)
    majority   counting: an average over the marks, no order
    parity     every single bit: missing one leaves chance

Random sequences with random labels can only be memorized. Nothing about one example helps with
another, so the number of examples that a network gets right is its capacity. Mahdavi et al. (2024)
put it at the order of H·min(n, d_h) for one attention layer,
`headwise.theory.floors.memorization(heads, head_dim, n_tokens=task.length)`.

    example      x_1 x_2 … x_n  →  one of K labels        (the last token is also the query)
    own context  every example draws all its tokens
    shared       all examples share x_1 … x_{n−1}; only the query tells them apart
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.errors import did_you_mean
from headwise.papers.tasks.task import (
    SyntheticTask,
    TaskBatch,
    TaskError,
    at_least,
    distinct_tokens,
    generator_of,
    last_scored,
)

RULES = ("first", "majority", "parity")


class _Copying(SyntheticTask):
    """Uniform tokens; the answer is one of those already seen."""

    __slots__ = ()
    vocab_size: int

    @property
    def n_inputs(self) -> int:
        """The size of the vocabulary."""
        return self.vocab_size

    @property
    def n_outputs(self) -> int:
        """The size of the vocabulary."""
        return self.vocab_size


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

    def sample(self, n: int, seed: int | torch.Generator = 0) -> TaskBatch:
        """`n` sequences; the first `back` positions are not scored."""
        tokens = torch.randint(
            self.vocab_size, (n, self.length), generator=generator_of(seed), dtype=torch.int64
        )
        scored = (torch.arange(self.length) >= self.back).expand(n, -1)
        return TaskBatch(tokens, tokens.roll(self.back, dims=1), scored)


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

    def sample(self, n: int, seed: int | torch.Generator = 0) -> TaskBatch:
        """`n` sequences with their answers."""
        generator = generator_of(seed)
        prefix = distinct_tokens(n, self.vocab_size, self.prefix, generator)
        repeated = self.length - self.prefix
        places = distinct_tokens(n, self.prefix - 1, repeated, generator)
        targets = torch.zeros(n, self.length, dtype=torch.int64)
        targets[:, self.prefix :] = prefix.gather(1, places + 1)
        scored = (torch.arange(self.length) >= self.prefix).expand(n, -1)
        return TaskBatch(torch.cat([prefix, prefix.gather(1, places)], dim=1), targets, scored)

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


@dataclass(frozen=True, slots=True)
class ContextInduction(_Copying):
    """Uniform tokens, then windows of `back` of them again; the target is what followed the window.

    Windows are asked for independently, among those that occur once, and scored at their last
    token. The prefix must be short enough that some window surely occurs once in nearly all.
    """

    length: int
    vocab_size: int
    prefix: int
    back: int = 3

    def __post_init__(self) -> None:
        at_least("back", self.back, 1)
        at_least("a vocabulary", self.vocab_size, 2)
        at_least("a prefix (a window and what follows)", self.prefix, self.back + 1)
        at_least("a length (the prefix and one question)", self.length, self.prefix + self.back)
        if (self.length - self.prefix) % self.back:
            raise TaskError(
                f"Expected questions of {self.back} tokens after the prefix of {self.prefix}, got "
                f"a length of {self.length}; add {-(self.length - self.prefix) % self.back}."
            )

    @property
    def windows(self) -> int:
        """Windows of the prefix that something follows."""
        return self.prefix - self.back

    def sample(self, n: int, seed: int | torch.Generator = 0) -> TaskBatch:
        """`n` sequences with their answers."""
        generator = generator_of(seed)
        prefix = torch.randint(self.vocab_size, (n, self.prefix), generator=generator)
        questions = (self.length - self.prefix) // self.back
        alone = self._candidates(prefix, range(self.back)).sum(dim=-1) == 1
        # Where no window is alone, which is next to never, any is asked for.
        chances = torch.where(alone.any(dim=1, keepdim=True), alone, True).double()
        asked = torch.multinomial(chances, questions, replacement=True, generator=generator)
        window = (asked[..., None] + torch.arange(self.back)).flatten(1)
        scored = torch.zeros(n, self.length, dtype=torch.bool)
        scored[:, self.prefix + self.back - 1 :: self.back] = True
        targets = torch.zeros(n, self.length, dtype=torch.int64)
        targets[scored] = prefix.gather(1, asked + self.back).flatten()
        return TaskBatch(torch.cat([prefix, prefix.gather(1, window)], dim=1), targets, scored)

    def partial_accuracy(self, batch: TaskBatch, lags: Collection[int]) -> float:
        """The accuracy on a batch of the best predictor that knows the window's tokens at `lags`.

        Lag 0 is the current token. Every window that is alone and agrees there is as likely to be
        the one asked for, so the best answer is the one that most of them have.
        """
        prefix, n = batch.inputs[:, : self.prefix], len(batch.inputs)
        asked = batch.inputs[:, self.prefix :].reshape(n, -1, self.back)
        alone = self._candidates(prefix, range(self.back)).sum(dim=-1) == 1
        known = [self.back - 1 - lag for lag in lags]
        there = prefix.unfold(1, self.back, 1)[:, : self.windows]
        agree = (asked[:, :, None, known] == there[:, None, :, known]).all(dim=-1)
        votes = torch.zeros(n, asked.shape[1], self.vocab_size)
        follows = prefix[:, None, self.back :].expand(-1, asked.shape[1], -1)
        votes.scatter_add_(2, follows, (agree & alone[:, None]).float())
        best = votes.max(dim=-1).values / votes.sum(dim=-1).clamp(min=1)
        return float(best.mean())

    def _candidates(
        self, prefix: Int[Tensor, "batch prefix"], places: Sequence[int]
    ) -> Bool[Tensor, "batch windows windows"]:
        """For every pair of windows, whether they agree at these of their places."""
        some = prefix.unfold(1, self.back, 1)[:, : self.windows, list(places)]
        return (some[:, :, None] == some[:, None]).all(dim=-1)


@dataclass(frozen=True, slots=True)
class SequenceClassification(SyntheticTask):
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
        """The size of the vocabulary."""
        return self.vocab_size

    @property
    def n_outputs(self) -> int:
        """Two labels, equally likely under every rule."""
        return 2

    def sample(self, n: int, seed: int | torch.Generator = 0) -> TaskBatch:
        """`n` sequences with fresh label noise; only the last position is scored."""
        generator = generator_of(seed)
        inputs, clean = self._sequences(n, generator)
        flips = torch.rand(n, generator=generator, dtype=torch.float64) < self.noise
        return last_scored(inputs, clean ^ flips.long())

    def scored_sample(self, n: int, seed: int | torch.Generator = 0) -> TaskBatch:
        """`n` sequences with the labels of the rule itself.

        A finite sample of noisy labels has more or fewer flips than it should, and every predictor
        that knows the rule scores that excess; the loss could even fall below the optimum.
        """
        return last_scored(*self._sequences(n, generator_of(seed)))

    def expected_loss(
        self, outputs: Float[Tensor, "batch length outputs"], batch: TaskBatch
    ) -> Float[Tensor, ""]:
        """The cross-entropy in expectation over the flips; never below `optimum_loss`."""
        flipped = dataclasses.replace(batch, targets=1 - batch.targets)
        right, wrong = self.loss(outputs, batch), self.loss(outputs, flipped)
        return (1 - self.noise) * right + self.noise * wrong

    def expected_metric(
        self, outputs: Float[Tensor, "batch length outputs"], batch: TaskBatch
    ) -> float:
        """The accuracy in expectation over the flips; never above `optimum`."""
        right = self.metric(outputs, batch)
        return (1 - self.noise) * right + self.noise * (1 - right)

    def _sequences(
        self, n: int, generator: torch.Generator
    ) -> tuple[Int[Tensor, "batch length"], Int[Tensor, " batch"]]:
        places = distinct_tokens(n, self.length, self.marks, generator).sort(dim=-1).values
        bits = torch.randint(2, (n, self.marks), generator=generator)
        fillers = torch.randint(2, self.vocab_size, (n, self.length), generator=generator)
        return fillers.scatter(1, places, bits), self._clean(bits)

    @property
    def optimum(self) -> float:
        """1 − noise: the rule itself (the Bayes accuracy)."""
        return 1 - self.noise

    @property
    def optimum_loss(self) -> float:
        """The entropy of the noise."""
        p = self.noise
        return -(p * math.log(p) + (1 - p) * math.log1p(-p)) if p else 0.0

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


@dataclass(frozen=True, slots=True)
class RandomLabels(SyntheticTask):
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
        """The number of labels; 1/K is expected of every answer not fitted to these labels."""
        return self.labels

    def everything(self) -> TaskBatch:
        """All examples, in order."""
        inputs, labels = _drawn(self, torch.get_default_dtype())
        return last_scored(inputs.clone(), labels)

    def sample(self, n: int, seed: int | torch.Generator = 0) -> TaskBatch:
        """`n` different examples in random order."""
        if n > self.examples:
            raise TaskError(
                f"Expected at most the {self.examples} examples there are, got {n}; ask for fewer."
            )
        inputs, labels = _drawn(self, torch.get_default_dtype())
        rows = torch.randperm(self.examples, generator=generator_of(seed))[:n]
        return last_scored(inputs[rows], labels[rows])

    def relabelled(self, label_seed: int) -> RandomLabels:
        """The same sequences with other labels: a network that learned the first is at chance."""
        return dataclasses.replace(self, label_seed=label_seed)

    @property
    def constant_accuracy(self) -> float:
        """What the best single answer gets on the labels as drawn; at least 1/K, by luck."""
        _, labels = _drawn(self, torch.get_default_dtype())
        return int(labels.bincount().max()) / self.examples


@functools.lru_cache(maxsize=4)
def _drawn(task: RandomLabels, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The whole data set, kept because every batch of a training needs it."""
    size = (task.examples, task.length, task.width)
    inputs = torch.randn(size, generator=generator_of(task.seed), dtype=dtype)
    if task.shared:
        inputs[:, :-1] = inputs[0, :-1].clone()
    # Scattered over the 32 bits that seed the generator, so that equal small seeds do not make
    # labels and tokens from the same random bits.
    generator = generator_of((2654435761 * task.label_seed + 40503) % 2**32)
    return inputs, torch.randint(task.labels, (task.examples,), generator=generator)
