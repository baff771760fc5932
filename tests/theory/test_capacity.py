"""Memorization order: linear in heads, flat once heads are wider than the tokens are many."""

from __future__ import annotations

import pytest

from headwise.errors import TheoryError
from headwise.theory.floors import ASSUMPTION, memorization


def test_by_hand() -> None:
    result = memorization(heads=32, head_dim=128, n_tokens=8192)
    assert result.order == 4096
    assert result.width_helps
    assert result.assumption == ASSUMPTION


def test_linear_in_heads_and_flat_above_the_number_of_tokens() -> None:
    orders = [memorization(heads, 11, 31).order for heads in (1, 2, 3, 5)]
    assert orders == [11, 22, 33, 55]
    widths = [memorization(3, width, 31) for width in (29, 31, 37)]
    assert [w.order for w in widths] == [87, 93, 93]
    assert [w.width_helps for w in widths] == [True, False, False]


@pytest.mark.parametrize("arguments", [(0, 7, 5), (3, 0, 5), (3, 7, 0)])
def test_nothing_below_one(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(TheoryError, match="at least 1"):
        memorization(*arguments)
