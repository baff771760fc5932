"""The bound term by term, against hand-computed numbers and the paper's figure."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import TheoryError
from headwise.theory.allocation import (
    MAX_LAGS,
    MAX_POINTS,
    HeadGroup,
    bound_curve,
    error_bound,
    kernel_weights,
)
from headwise.theory.estimators import Spectrum

E_128 = {1: 1.326, 8: 0.166, 9: 0.481, 80: 0.965}


def test_the_figure_of_the_paper():
    curve = bound_curve(128, 16, range(1, 81))
    assert curve.heads == tuple(range(1, 81))
    for heads, expected in E_128.items():
        assert round(curve.bound[heads - 1], 3) == expected
    assert curve.best.heads == 8
    assert curve.best.bound == curve.bound[7]
    assert curve.zero_error == 1.0


def test_the_figure_needs_real_head_widths():
    """Negative control: with widths rounded down the number at 9 heads would be another."""
    rounded = error_bound([HeadGroup(1, 9, 128 // 9)], [1], 16).total
    assert abs(rounded - E_128[9]) > 0.01


def test_every_term_by_hand():
    groups = [HeadGroup(1, 2, 3), HeadGroup(2, 5, 4), HeadGroup(3, 7, 11)]
    bound = error_bound(groups, [2, 3, 5, 0.5, 0.25], 4, eps=0.1)
    assert [t.group for t in bound.terms] == groups
    # One direction of four is lost; then none; a head wider than the token loses none either.
    assert [t.projection for t in bound.terms] == pytest.approx([2 * 1.1 * 0.5, 0, 0], abs=1e-15)
    assert [t.head_count for t in bound.terms] == pytest.approx(
        [2 * 1.3 * math.exp(0.02) / 2, 3 * 1.3 * math.exp(0.04) / 5, 5 * 1.3 * math.exp(0.06) / 7]
    )
    assert bound.missing == (0.5, 0.25)
    assert bound.zero_error == 10.75
    assert bound.projection == pytest.approx(1.1)
    assert bound.total == pytest.approx(bound.projection + bound.head_count + 0.75)
    assert not bound.vacuous


def test_no_groups_predict_zero_and_promise_nothing():
    bound = error_bound([], [0.1, 0.2, 0.3], 5)
    assert bound.total == bound.zero_error
    assert bound.vacuous


def test_vacuous_is_being_no_better_than_zero():
    assert error_bound([HeadGroup(1, 1, 5)], [1], 5).vacuous  # 1.326
    assert not error_bound([HeadGroup(1, 2, 5)], [1], 5).vacuous  # 0.663


def test_a_measured_spectrum_replaces_the_isotropic_tail():
    steep = Spectrum((9.0, 4.0, 2.0, 1.0))
    groups = [HeadGroup(1, 3, 2)]
    measured, white = error_bound(groups, [1], steep), error_bound(groups, [1], 4)
    assert measured.projection == pytest.approx(math.sqrt(3 / 16))
    assert white.projection == pytest.approx(math.sqrt(1 / 2))
    assert measured.head_count == white.head_count


@given(
    st.integers(1, 40), st.integers(1, 5), st.integers(1, 60), st.integers(0, 2), st.floats(0, 1)
)
def test_the_curve_is_the_bound_of_even_groups(token_dim, lags, heads, more_lags, eps):
    kernel = [1 / (1 + lag) for lag in range(lags + more_lags)]
    curve = bound_curve(97, token_dim, [heads], lags=lags, kernel=kernel, eps=eps)
    width = 97 / (lags * heads)
    tail = (1 + eps) * math.sqrt(max(0.0, 1 - width / token_dim))
    expected = sum(
        kernel[m - 1] * (tail + 1.3 * math.exp(0.02 * m) / heads) for m in range(1, lags + 1)
    )
    # Right at the cusp the square root turns a rounding of 1e-16 in the width into 1e-8.
    assert curve.bound[0] == pytest.approx(expected + sum(kernel[lags:]), abs=1e-7)
    assert curve.head_dim == (width,)


def test_of_equal_points_the_fewest_heads_are_best():
    assert bound_curve(128, 16, [9, 8, 8, 10]).best.heads == 8


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bound_curve(0, 16, [1]), "width must be a whole number from 1"),
        (lambda: bound_curve(10**12, 16, [1]), "width must be a whole number from 1"),
        (lambda: bound_curve(128, 0, [1]), "token width"),
        (lambda: bound_curve(128, 10**9, [1]), "token width"),
        (lambda: bound_curve(128, 16, [3, 0]), "number of heads"),
        (lambda: bound_curve(128, 16, []), "got none"),
        (lambda: bound_curve(128, 16, range(1, MAX_POINTS + 2)), "got more"),
        (lambda: bound_curve(128, 16, [1], lags=0), "number of lags"),
        (lambda: bound_curve(128, 16, [1], lags=3, kernel=[1, 1]), "3 groups and 2 weights"),
        (lambda: bound_curve(128, 16, [1], eps=-0.1), "eps"),
        (lambda: bound_curve(128, 16, [1], eps=math.nan), "eps"),
        (lambda: error_bound([HeadGroup(1, 0, 4)], [1], 4), "number of heads"),
        (lambda: error_bound([HeadGroup(1, 2, 0)], [1], 4), "wider than 0"),
        (lambda: error_bound([HeadGroup(1, 2, math.nan)], [1], 4), "wider than 0"),
        (lambda: error_bound([HeadGroup(2, 2, 4)], [1, 1], 4), "lags 1, 2, 3"),
        (lambda: kernel_weights([]), "got 0 numbers"),
        (lambda: kernel_weights([1.0] * (MAX_LAGS + 1)), f"got {MAX_LAGS + 1} numbers"),
        (lambda: kernel_weights([1, -0.5]), "got -0.5"),
        (lambda: kernel_weights([1, math.nan]), "got nan"),
        (lambda: kernel_weights([math.inf]), "got inf"),
        (lambda: kernel_weights([0, 0.0]), "only zeros"),
        (lambda: kernel_weights(np.ones((2, 3))), "one weight per lag"),
        (lambda: kernel_weights(np.array(["one"])), "one weight per lag"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, words):
    with pytest.raises(TheoryError, match=words):
        call()


def test_the_limits_do_not_overflow():
    kernel = [1e100] * MAX_LAGS
    groups = [HeadGroup(lag, 1, 0.5) for lag in range(1, MAX_LAGS + 1)]
    assert math.isfinite(error_bound(groups, kernel, 65536, eps=1e100).total)
