"""The Jacobian norm against exact rational arithmetic, eigvalsh and hand-computed answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import TheoryError
from headwise.theory import saturation
from headwise.theory.saturation import (
    NORM_CEILING,
    attention_error_bound,
    jacobian_norm,
    saturation_bound,
    total_variation_bound,
    truncated_score_error,
)

HALF_ULP = Fraction(1, 2**53)
RELATIVE_BOUND = 16  # in half units of the last place: about 2e-15


def through_numpy(p: np.ndarray) -> np.ndarray:
    norm = jacobian_norm(p)
    assert isinstance(norm, np.ndarray | np.floating)
    return np.asarray(norm)


def through_torch(p: np.ndarray) -> np.ndarray:
    norm = jacobian_norm(torch.tensor(p))
    assert isinstance(norm, torch.Tensor)
    return norm.numpy()


@pytest.fixture(params=[through_numpy, through_torch], ids=["numpy", "torch"])
def norm(request: pytest.FixtureRequest) -> Callable[[np.ndarray], np.ndarray]:
    return request.param


def softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def dense_norm(p: np.ndarray) -> np.ndarray:
    eye = np.eye(p.shape[-1])
    return np.linalg.eigvalsh(p[..., None] * eye - p[..., :, None] * p[..., None, :])[..., -1]


def is_within(p: np.ndarray, measured: float, half_ulps: int) -> bool:
    """Exactly: does the norm of the distribution p/Σp lie within half_ulps of what was measured?

    In rationals, so there is nothing to round: Σ p_i/(p_i − λ) rises through 0 at the norm.
    """
    exact = [Fraction(float(x)) for x in p if x > 0]
    total = sum(exact)
    first, second = sorted(exact)[-1], sorted(exact)[-2]

    def is_above(value: Fraction) -> bool:
        """Whether the value is at or above the norm."""
        if value >= first or value <= second:
            return value >= first
        return sum(x / (x - value) for x in exact) >= 0

    value = Fraction(measured) * total
    low, high = (value * (1 + sign * half_ulps * HALF_ULP) for sign in (-1, 1))
    return is_above(high) and (low <= second or not is_above(low))


def rows_of_all_kinds() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    rows = []
    for length in (2, 3, 5, 7, 13, 31):
        ramp = np.arange(length)
        for temperature in (0.01, 1.0, 3.0, 30.0, 300.0):
            rows.append(softmax(temperature * rng.normal(size=length)))
            rows.append(softmax(-temperature * ramp))
        for gap in (1e-15, 1e-12, 1e-8, 1e-4, 1.0, 30.0, 600.0):
            spike = np.zeros(length)
            spike[0] = gap
            rows.append(softmax(spike))  # near ties first, near one-hot last
            near = np.full(length, -5.0)
            near[:2] = 0.0, -gap
            rows.append(softmax(near))
            rows.append(softmax(spike - 1e-6 * rng.uniform(size=length)))
    return [row for row in rows if np.sort(row)[-1] > np.sort(row)[-2] > 0]


def test_every_kind_of_row_is_right_to_the_last_digits(norm) -> None:
    rows = rows_of_all_kinds()
    assert len(rows) > 100
    for row in rows:
        assert is_within(row, float(norm(row)), RELATIVE_BOUND), row


def test_the_exact_check_notices_an_error_in_the_last_digits() -> None:
    checked = 0
    for row in rows_of_all_kinds()[::7]:
        measured = float(jacobian_norm(row))
        for nudged in (measured * (1 + 1e-14), measured * (1 - 1e-14)):
            # Beyond these two bounds the exact check is not defined.
            if np.sort(row)[-2] <= nudged <= min(row.max(), 1):
                assert not is_within(row, nudged, RELATIVE_BOUND)
                checked += 1
    assert checked > 20


def test_it_agrees_with_eigvalsh(norm) -> None:
    rng = np.random.default_rng(3)
    p = softmax(rng.normal(size=(5, 3, 61)) * np.array([0.1, 3.0, 20.0])[:, None])
    measured = norm(p)
    assert measured.shape == (5, 3)
    assert measured.dtype == np.float64
    np.testing.assert_allclose(measured, dense_norm(p), rtol=0, atol=1e-13)


def test_leaving_out_the_rank_one_part_would_be_seen() -> None:
    p = softmax(np.random.default_rng(3).normal(size=(11, 61)))
    assert np.abs(p.max(-1) - dense_norm(p)).min() > 1e-5


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0], 0.0),
        ([0.3, 0.7], 0.42),
        ([0.5, 0.5], 0.5),
        ([0.0, 1.0, 0.0], 0.0),
        ([0.2] * 5, 0.2),
        ([0.4, 0.4, 0.2], 0.4),
        ([0.4, 0.4, 0.0, 0.2], 0.4),
        ([0.5, 0.25, 0.25], 0.375),
        ([0.3, 0.7, 0.0, 0.0, 0.0], 0.42),
        ([1.0, 1e-300], 2e-300),
        ([1.0, 5e-324], 1e-323),
        ([1.0, 1e-300, 1e-300], 3e-300),
        ([1.0, 1e-12, 1e-300], 2e-12 / (1 + 1e-12) ** 2),
    ],
)
def test_known_answers(norm, row: list[float], expected: float) -> None:
    np.testing.assert_allclose(float(norm(np.array(row))), expected, rtol=1e-14, atol=0)


def test_ties_have_the_multiplicity_theory_says(norm) -> None:
    p = np.array([3, 3, 3, 2, 2, 1, 0]) / 14
    eigenvalues = np.linalg.eigvalsh(np.diag(p) - np.outer(p, p))
    assert np.sum(np.abs(eigenvalues - 3 / 14) < 1e-12) == 2  # three tied: two copies
    assert float(norm(p)) == pytest.approx(3 / 14, rel=1e-15)


def test_rows_of_every_kind_in_one_batch_equal_rows_alone(norm) -> None:
    batch = np.array(
        [
            [0.2, 0.2, 0.2, 0.2, 0.2],
            [0.0, 0.0, 1.0, 0.0, 0.0],
            [0.4, 0.4, 0.1, 0.1, 0.0],
            [0.6, 0.1, 0.1, 0.1, 0.1],
            [1.0, 1e-300, 5e-324, 0.0, 0.0],
        ]
    )
    np.testing.assert_allclose(norm(batch), [float(norm(row)) for row in batch], rtol=1e-15)
    assert norm(batch[:0]).shape == (0,)


@given(
    st.lists(st.floats(-700, 0), min_size=2, max_size=23),
    st.floats(1e-3, 1.0),
)
def test_it_stays_between_its_two_poles(scores: list[float], temperature: float) -> None:
    p = softmax(temperature * np.array(scores))
    value = float(jacobian_norm(p))
    largest, second = np.sort(p)[-1], np.sort(p)[-2]
    assert second * (1 - 1e-14) <= value <= min(largest, NORM_CEILING) * (1 + 1e-14)
    assert value >= 2 * largest * second / (largest + second) * (1 - 1e-14) - 1e-322
    assert value == pytest.approx(float(dense_norm(p)), abs=1e-13)


def test_few_steps_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(11)
    p = softmax(rng.normal(size=(37, 1021)) * np.logspace(-3, 2, 37)[:, None])
    settled = jacobian_norm(p)
    monkeypatch.setattr(saturation, "_MAX_STEPS", 8)
    np.testing.assert_array_equal(jacobian_norm(p), settled)
    monkeypatch.setattr(saturation, "_MAX_STEPS", 1)
    assert np.abs(jacobian_norm(p) / settled - 1).max() > 1e-6  # the steps do the work


def test_float32_and_gradients_are_taken_off_at_the_door() -> None:
    scores = torch.randn(3, 101, generator=torch.Generator().manual_seed(5), requires_grad=True)
    p = torch.softmax(scores, -1)
    value = jacobian_norm(p)
    assert value.dtype == torch.float64
    assert not value.requires_grad
    np.testing.assert_allclose(value.numpy(), dense_norm(p.detach().double().numpy()), atol=1e-7)
    single = jacobian_norm(p.detach().numpy())
    np.testing.assert_allclose(value.numpy(), single, rtol=1e-14)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (np.array([[0.5, 0.5], [0.5, 0.4998]]), "sum to 1"),
        (np.array([0.0, 0.0]), "fully masked"),
        (np.array([1.5, -0.5]), "negative or NaN"),
        (np.array([0.5, np.nan]), "negative or NaN"),
        (np.array([np.inf, 0.0]), "sum to 1"),
        (np.zeros((3, 0)), "at least one probability"),
    ],
)
@pytest.mark.parametrize("wrap", [np.asarray, torch.tensor], ids=["numpy", "torch"])
def test_what_is_no_distribution_is_refused(rows: np.ndarray, words: str, wrap: Any) -> None:
    with pytest.raises(TheoryError, match=words):
        jacobian_norm(wrap(rows))


def test_a_float32_sum_is_accepted_and_normalised() -> None:
    p = np.array([0.3, 0.7])
    assert float(jacobian_norm(p * (1 + 9e-5))) == pytest.approx(0.42, rel=1e-14)


@pytest.mark.parametrize("length", [7, 101, 1009])
def test_bounded_scores_saturate(length: int) -> None:
    rng = np.random.default_rng(length)
    for bound in (0.0, 0.5, 2.0):
        values = jacobian_norm(softmax(rng.uniform(-bound, bound, size=(53, length))))
        extreme = np.full(length, -bound)
        extreme[0] = bound
        assert values.max() <= saturation_bound(bound, length) * (1 + 1e-12)
        assert jacobian_norm(softmax(extreme)) <= saturation_bound(bound, length) * (1 + 1e-12)


def test_scores_that_grow_with_length_break_a_fixed_bound() -> None:
    values = []
    for length in (11, 101, 1009):
        scores = np.zeros(length)
        scores[0] = math.log(length - 1)  # the first token always keeps half
        values.append(float(jacobian_norm(softmax(scores))))
    assert values[-1] > 50 * saturation_bound(0.5, 1009)
    assert min(values) > 0.2


def test_the_bound_by_hand_and_its_limits() -> None:
    assert saturation_bound(0, 7) == pytest.approx(1 / 7)
    assert saturation_bound(1.0, 1024) == pytest.approx(math.e**2 / 1024)
    assert saturation_bound(1e6, 3) == math.inf
    for bound, length in ((-1.0, 5), (math.nan, 5), (math.inf, 5), (1.0, 0)):
        with pytest.raises(TheoryError, match="at least"):
            saturation_bound(bound, length)


# --- what a narrower head does to the attention (Corollary 2) -----------------------------------


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=29),
)
def test_the_attention_moves_no_further_than_the_bounds(pairs: list[tuple[float, float]]) -> None:
    before, after = np.array(pairs).T
    moved = softmax(after) - softmax(before)
    error = float(np.linalg.norm(after - before))
    reach = float(np.abs(pairs).max())
    rounding = 1e-12
    for limits in ({}, {"score_bound": reach}):
        assert (
            np.linalg.norm(moved) <= attention_error_bound(error, len(pairs), **limits) + rounding
        )
    width = float(np.ptp(after - before))
    assert np.abs(moved).sum() / 2 <= total_variation_bound(width) + rounding


def test_the_jacobian_at_one_end_alone_is_no_bound() -> None:
    """Away from a nearly one-hot row the Jacobian grows, which a bound must see."""
    before, after = np.array([6.0, 0.0, 0.0]), np.array([0.0, 6.0, 0.0])
    moved = float(np.linalg.norm(softmax(after) - softmax(before)))
    error = float(np.linalg.norm(after - before))
    assert moved > 20 * error * float(jacobian_norm(softmax(before)))
    assert moved <= attention_error_bound(error, 3, score_bound=6.0)


def test_no_smaller_constants_would_do() -> None:
    # Two tokens reach the misplaced attention, and a small step at a tie reaches the 2-norm.
    for width in (0.01, 1.0, 7.0):
        p = softmax(np.array([-width / 4, width / 4]))
        q = softmax(np.array([width / 4, -width / 4]))
        assert np.abs(p - q).sum() / 2 == pytest.approx(total_variation_bound(width), rel=1e-12)
    step = np.array([1e-4, -1e-4])
    moved = np.linalg.norm(softmax(step) - softmax(-step))
    bound = attention_error_bound(float(np.linalg.norm(2 * step)), 2)
    assert moved == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize("length", [5, 101])
def test_a_truncated_head_errs_by_at_most_the_next_singular_value(length: int) -> None:
    rng = np.random.default_rng(length)
    W_Q, W_K, tokens = (rng.normal(size=size) for size in ((13, 7), (13, 7), (length, 13)))
    left, sigma, right = np.linalg.svd(W_Q @ W_K.T)
    longest = float(np.linalg.norm(tokens, axis=1).max())

    def error(width: int) -> float:
        cut = W_Q @ W_K.T - (left[:, :width] * sigma[:width]) @ right[:width]
        return float(np.linalg.norm(tokens @ cut.T @ tokens.T, axis=0).max())

    for width in range(8):
        bound = truncated_score_error(sigma, width, token_norm=longest, length=length)
        assert error(width) <= bound + 1e-9
    # Tokens along the first singular directions reach it, and break the bound of another width.
    x, keys = longest * left[:, 0], np.tile(longest * right[0], (length, 1))
    worst = float(np.linalg.norm(x @ W_Q @ W_K.T @ keys.T))
    bound = truncated_score_error(sigma, 0, token_norm=longest, length=length)
    assert worst == pytest.approx(bound, rel=1e-12)
    assert worst > truncated_score_error(sigma, 1, token_norm=longest, length=length)
    assert truncated_score_error(sigma[:7], 7, token_norm=longest, length=length) == 0


def test_with_equal_score_errors_only_the_row_itself_shrinks() -> None:
    """Weights err as 1/L and the 2-norm as 1/√L, as uniform rows do; the misplaced share stays."""
    found = []
    for length in (16, 1024):
        off = np.where(np.arange(length) % 2, 0.3, -0.3)
        moved = softmax(off) - 1 / length
        sizes = (np.abs(moved).max() * length, np.linalg.norm(moved) * length**0.5)
        found.append((*sizes, np.abs(moved).sum() / 2))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)
    assert found[0][2] > 0.1


@pytest.mark.parametrize(
    "call",
    [
        lambda: attention_error_bound(-1.0, 5),
        lambda: attention_error_bound(math.nan, 5),
        lambda: attention_error_bound(1.0, 0, score_bound=1.0),
        lambda: total_variation_bound(math.inf),
        lambda: truncated_score_error([1.0], -1, token_norm=1.0, length=5),
        lambda: truncated_score_error([-1.0], 1, token_norm=1.0, length=5),
        lambda: truncated_score_error([1.0], 0, token_norm=-1.0, length=5),
    ],
)
def test_sizes_that_are_none_are_refused(call: Callable[[], float]) -> None:
    with pytest.raises(TheoryError, match="at least"):
        call()
