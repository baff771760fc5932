"""How many examples an attention layer can memorize, in order of magnitude.

Mahdavi et al. (2024): one layer of H heads of width d_h over n tokens memorizes at least of the
order of H·min(n, d_h) examples. Each head brings as many new directions as its attention has
rank, and that is limited by both the number of tokens and the width of the head.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwise.errors import TheoryError

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
