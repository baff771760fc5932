"""The minimiser against every possible allocation of small widths."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.errors import TheoryError
from headwise.theory.allocation import MAX_WIDTH, HeadGroup, allocate, error_bound
from headwise.theory.estimators import Spectrum
from tests import lanes


def pairs(allocation):
    return [(group.heads, group.head_dim) for group in allocation.groups]


def all_bounds(width, eigenvalues, kernel, eps=0.0):
    """(bound, spent, lags) of every M >= 1 and every H_m, d_m >= 1 that fit, wide heads too."""
    total = sum(eigenvalues)
    descending = sorted(eigenvalues, reverse=True)

    def error(lag, heads, dim):
        tail = math.sqrt(sum(descending[dim:]) / total)
        return kernel[lag] * ((1 + eps) * tail + 1.3 * math.exp(0.02 * (lag + 1)) / heads)

    def extend(lag, spent, so_far):
        if lag:
            yield so_far + sum(kernel[lag:]), spent, lag
        if lag < len(kernel):
            left = width - spent
            for heads in range(1, left + 1):
                for dim in range(1, left // heads + 1):
                    step = error(lag, heads, dim)
                    yield from extend(lag + 1, spent + heads * dim, so_far + step)

    return extend(0, 0, 0.0)


def test_four_equal_lags_of_the_paper():
    result = allocate(256, 8, (1, 1, 1, 1))
    assert result.lags == 4
    assert pairs(result) == [(8, 8)] * 4
    assert [group.lag for group in result.groups] == [1, 2, 3, 4]
    assert result.slack == 0
    assert result.on_corner
    assert not result.vacuous
    assert result.zero_error == 4.0
    assert result.bound == pytest.approx(sum(1.3 * math.exp(0.02 * m) / 8 for m in range(1, 5)))


def test_the_paper_case_is_equal_to_brute_force():
    """Every split of at most 256 over one to four lags, every (heads, width) for each share."""
    width, lags = 256, 4
    table = np.full((lags + 1, width + 1), np.inf)  # [lag, share]
    for heads in range(1, width + 1):
        for dim in range(1, width // heads + 1):
            tail = math.sqrt(max(0.0, 1 - dim / 8))
            for lag in range(1, lags + 1):
                error = tail + 1.3 * math.exp(0.02 * lag) / heads
                share = table[lag, heads * dim :]
                np.minimum(share, error, out=share)
    shares = np.arange(width + 1)
    least = table[1].min() + 3
    for first in shares:
        second = shares[: width + 1 - first]
        two = table[1, first] + table[2, second]
        least = min(least, two.min() + 2)
        left = width - first - second[:, None] - shares[None, :]  # what the fourth lag may take
        three = np.where(left >= 0, two[:, None] + table[3], np.inf)
        least = min(least, three.min() + 1, (three + table[4, np.maximum(left, 0)]).min())
    assert allocate(width, 8, (1, 1, 1, 1)).bound == pytest.approx(least, rel=1e-12)


weights = st.sampled_from([0.0, 0.1, 1.0, 1.0, 3.0, 7.0]) | st.floats(0, 10)
energies = st.sampled_from([0.0, 0.01, 1.0, 1.0, 5.0]) | st.floats(0, 10)
spectra = st.lists(energies, max_size=6).map(lambda values: [*values, 2.0])


def kernels(most):
    return st.lists(weights, min_size=1, max_size=most).map(lambda w: w if any(w) else [1.0])


@settings(deadline=None, max_examples=lanes.examples(400))
@given(
    st.integers(1, 13),
    spectra,
    kernels(3),
    st.sampled_from([0.0, 0.25]),
)
def test_equal_to_brute_force(width, eigenvalues, kernel, eps):
    spectrum = Spectrum(tuple(eigenvalues))
    result = allocate(width, spectrum, kernel, eps=eps)
    least = min(all_bounds(width, eigenvalues, kernel, eps))[0]
    assert result.bound == pytest.approx(least, rel=1e-12, abs=1e-12)
    # What is reported is what the groups really give and really spend.
    assert result.bound == error_bound(result.groups, kernel, spectrum, eps=eps).total
    assert sum(h * d for h, d in pairs(result)) + result.slack == width
    assert result.slack >= 0


@settings(deadline=None, max_examples=lanes.examples(60))
@given(st.integers(1, 29), st.integers(1, 11), kernels(2))
def test_white_tokens_equal_to_brute_force(width, token_dim, kernel):
    result = allocate(width, token_dim, kernel)
    bound, _, _ = min(all_bounds(width, [1.0] * token_dim, kernel))
    assert result.bound == pytest.approx(bound, rel=1e-12, abs=1e-12)


def test_brute_force_can_tell_a_worse_allocation():
    """Negative control: one unit of width, or one lag, is visible to the comparison."""
    result = allocate(13, 3, (3, 1))
    assert result.bound < min(all_bounds(11, [1.0] * 3, (3, 1)))[0] - 1e-3
    assert result.bound < min(b for b in all_bounds(13, [1.0] * 3, (3, 1)) if b[2] == 2)[0] - 1e-3


@settings(deadline=None, max_examples=lanes.examples(50))
@given(st.integers(1, 120), st.integers(1, 23), kernels(5))
def test_more_width_never_raises_the_bound(width, token_dim, kernel):
    less, more = allocate(width, token_dim, kernel), allocate(width + 1, token_dim, kernel)
    assert more.bound <= less.bound * (1 + 1e-12)


def test_uneven_kernels_get_uneven_heads():
    result = allocate(64, 4, (9, 1))
    assert pairs(result) == [(12, 4), (4, 4)]  # heads as the root of the weight: 3 to 1


def test_slack_is_left_when_nothing_can_be_bought():
    result = allocate(7, 3, (1,))
    assert pairs(result) == [(2, 3)]
    assert result.slack == 1


def test_equal_bounds_prefer_slack_and_few_lags():
    result = allocate(7, 3, (1, 0, 0))
    assert result.lags == 1
    assert result.slack == 1
    # A lag of no weight before a heavy one must be passed, at the least price.
    passed = allocate(7, 3, (0, 1))
    assert pairs(passed) == [(1, 1), (2, 3)]
    assert passed.on_corner  # the corner is a matter of the lags that count


def test_whole_numbers_can_leave_the_corner():
    """Two heads of width 1024 do not fit into 2046; two of 1023 do, and lose little."""
    result = allocate(2046, 1024, (1,))
    assert pairs(result) == [(2, 1023)]
    assert not result.on_corner
    assert not result.vacuous


def test_the_usual_model_is_vacuous():
    """d_model = D = 768: the bound flees to the other end and is worse than predicting zero."""
    result = allocate(768, 768, (1, 1, 1, 1))
    assert pairs(result) == [(768, 1)]
    assert result.vacuous
    assert not result.on_corner
    assert result.bound > result.zero_error


@pytest.mark.parametrize("token_dim", [2, 3, 5, 7, 11, 13])
def test_twice_the_token_width_is_enough_to_say_something(token_dim):
    assert not allocate(2 * token_dim, token_dim, (1,)).vacuous


def test_the_corner_of_a_measured_spectrum_is_its_rank():
    low_rank = Spectrum((5.0, 3.0, 1.0, 0.0, 0.0, 0.0, 0.0))
    result = allocate(21, low_rank, (1,))
    assert pairs(result) == [(7, 3)]
    assert result.on_corner
    assert result.bound < allocate(21, 7, (1,)).bound


def test_a_decaying_spectrum_has_an_optimum_between_the_ends():
    result = allocate(64, Spectrum(tuple(0.25**i for i in range(16))), (1,))
    assert 1 < result.groups[0].head_dim < 16
    assert not result.on_corner
    assert not result.vacuous


def test_large_problems_are_solved():
    result = allocate(4096, 64, [0.9**lag for lag in range(16)])
    assert result.on_corner
    assert sum(h * d for h, d in pairs(result)) == 4096


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 8, (1,)), "width must be"),
        ((MAX_WIDTH + 1, 8, (1,)), f"up to {MAX_WIDTH}"),
        ((8, 0, (1,)), "token width"),
        ((8, 8, ()), "one weight per lag"),
        ((8, 8, (1, -1)), "got -1"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(arguments, words):
    with pytest.raises(TheoryError, match=words):
        allocate(*arguments)


def test_the_corner_beats_zero_from_twice_the_token_width_on_if_the_first_lag_counts():
    for width in (16, 17, 40):
        assert not allocate(width, 8, (1.0,)).vacuous
    assert allocate(15, 8, (1.0,)).bound > allocate(16, 8, (1.0,)).bound
    # A lag of weight 0 before it takes a head of width 1, so one more is needed.
    assert allocate(16, 8, (0.0, 1.0)).vacuous
    assert not allocate(17, 8, (0.0, 1.0)).vacuous
    assert allocate(17, 8, (0.0, 0.0, 1.0)).vacuous
    assert not allocate(18, 8, (0.0, 0.0, 1.0)).vacuous


def test_multiples_restrict_the_candidates_and_nothing_else():
    kernel = (1.0, 0.5, 0.25)
    free = allocate(64, 8, kernel)
    assert allocate(64, 8, kernel, heads_multiple=1, dims_multiple=1) == free
    for heads, dims in ((2, 1), (1, 4), (4, 2)):
        found = allocate(64, 8, kernel, heads_multiple=heads, dims_multiple=dims)
        assert all(g.heads % heads == 0 and g.head_dim % dims == 0 for g in found.groups)
        assert found.bound >= free.bound
    pairs_allowed = [(h, d) for d in (2, 4, 6, 8) for h in range(4, 32 // d + 1, 4)]
    best = min(
        error_bound([HeadGroup(m + 1, *pair) for m, pair in enumerate(groups)], kernel, 8).total
        for n in (1, 2, 3)
        for groups in itertools.product(pairs_allowed, repeat=n)
        if sum(h * d for h, d in groups) <= 32
    )
    assert allocate(32, 8, kernel, heads_multiple=4, dims_multiple=2).bound == pytest.approx(best)
    with pytest.raises(TheoryError, match="at least 32 is needed for 4 heads of width 8"):
        allocate(31, 8, kernel, heads_multiple=4, dims_multiple=8)
