"""Width floors from geometry, and how many examples a layer of heads can memorize.

Both floors answer "how wide must a head be to keep apart the tokens it sees", and both grow only
with the logarithm of their number. The third floor, the low-rank bottleneck, is in `bottleneck`.

Johnson–Lindenstrauss: a random linear map of m points to a width above 8·ln m/ε² keeps, with
positive probability, every distance within a factor 1 ± ε. The lemma is for 0 < ε < 1 only. The
often quoted "8·ln 8192 ≈ 72" takes ε = 1, at which two points may fall onto each other;
at ε = 0.5 the same formula asks for more than 288.

Entropy: let tokens be directions on the sphere of radius √d (coordinates of unit size), and let
a pair of them meet with probability ∝ exp(their inner product). Against independent uniform
tokens the entropy of a pair falls by d·E cos θ − ln E e^{d·cos θ} → d·½·ln φ = 0.24·d, φ the golden
ratio (at the maximum of cos θ + ln sin θ). The 2·ln L nats of a pair out of L² are used up at
d = 2·ln L/0.24 = 8.33·ln L.

Memorization (Mahdavi et al. 2024): one layer of H heads of width d_h over n tokens memorizes at
least of the order of H·min(n, d_h) examples. Each head brings as many new directions as its
attention has rank, and that is limited by both the number of tokens and the width of the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headwise.errors import TheoryError

ENTROPY_COEFFICIENT = 8.33
"""2/0.24; without the rounding of 0.24 it would be 4/ln φ = 8.312."""


@dataclass(frozen=True, slots=True)
class Floor:
    """A head must be wider than `threshold`; `width` is the smallest integer that is."""

    threshold: float

    @property
    def width(self) -> int:
        """The smallest width that meets the floor; at least 1."""
        return math.floor(self.threshold) + 1

    def is_met(self, head_dim: int) -> bool:
        """Whether a head of this width lies above the floor."""
        return head_dim > self.threshold


def jl_floor(points: int, eps: float | int) -> Floor:
    """Width above which a random projection keeps all distances of m points to 1 ± ε.

    A sufficient width for a random map; a learned one, fitted to its points, may do with less.
    """
    if not 0 < eps < 1:
        raise TheoryError(
            f"Expected a distortion eps strictly between 0 and 1, got {eps}: from 1 on, distances "
            "may vanish and the lemma says nothing (the popular 72 for 8192 points silently takes "
            "eps = 1); pass for example 0.5, which gives 289."
        )
    if eps < 1e-6:
        raise TheoryError(
            f"A distortion eps below 1e-6 is below what any model needs, got {eps}; pass for "
            "example 0.5."
        )
    return Floor(8.0 * math.log(_count(points, "points")) / eps**2)


def entropy_floor(context: int) -> Floor:
    """8.33·ln L: an estimate, not a theorem, of the width whose inner products can single out one.

    It takes unscaled inner products of coordinates of unit size; trained queries and keys may be
    larger or smaller, and their scores are divided by √width.
    """
    return Floor(ENTROPY_COEFFICIENT * math.log(_count(context, "tokens")))


def _count(number: int, what: str) -> int:
    if number < 1:
        raise TheoryError(f"Expected at least 1 of {what}, got {number}; pass how many there are.")
    return number


ASSUMPTION = (
    "One attention layer over n < d_model tokens; the tokens of each example are linearly "
    "independent, and any n of the query tokens are. A lower bound in order of magnitude: the "
    "constant is not claimed, and more may be memorized."
)


@dataclass(frozen=True, slots=True)
class Memorization:
    """The order H·min(n, d_h), and whether a wider head would still raise it."""

    order: int
    width_helps: bool
    assumption: str = ASSUMPTION


def memorization(heads: int, head_dim: int, n_tokens: int) -> Memorization:
    """The order of the number of examples memorized: linear in heads, flat once d_h ≥ n."""
    for name, number in (("heads", heads), ("head width", head_dim), ("tokens", n_tokens)):
        if number < 1:
            raise TheoryError(f"Expected at least 1 for {name}, got {number}; pass a whole number.")
    return Memorization(heads * min(n_tokens, head_dim), width_helps=head_dim < n_tokens)
