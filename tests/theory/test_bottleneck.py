"""The threshold is n − 1: built above it, proved and searched for in vain below it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import hilbert
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

from headwise.errors import TheoryError
from headwise.theory.bottleneck import (
    attention_pattern,
    bottleneck_floor,
    bottleneck_witness,
    pattern_distance,
    reaching_weights,
)


def random_pattern(n: int, seed: int, spread: float = 2.0) -> np.ndarray:
    return softmax(spread * np.random.default_rng(seed).normal(size=(n, n)), axis=-1)


def closest(P: np.ndarray, head_dim: int, starts: int = 5) -> np.ndarray:
    """The nearest pattern (in log) a head of this width finds by descent; X = I, no loss."""
    n, target = len(P), np.log(P)

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        Q, K = flat.reshape(2, n, head_dim)
        log_p = log_softmax(Q @ K.T, axis=-1)
        error = log_p - target
        slope = 2 * (error - np.exp(log_p) * error.sum(-1, keepdims=True))
        return float((error**2).sum()), np.stack([slope @ K, slope.T @ Q]).ravel()

    rng = np.random.default_rng(23)
    options = {"maxiter": 5000, "ftol": 1e-16, "gtol": 1e-12}
    runs = [
        minimize(
            loss, rng.normal(size=2 * n * head_dim), jac=True, method="L-BFGS-B", options=options
        )
        for _ in range(starts)
    ]
    Q, K = min(runs, key=lambda run: run.fun).x.reshape(2, n, head_dim)
    return softmax(Q @ K.T, axis=-1)


@pytest.mark.parametrize(("n", "d"), [(1, 3), (2, 2), (5, 7), (11, 11), (13, 29)])
@pytest.mark.parametrize("extra", [-1, 0, 6])
def test_from_n_minus_1_on_weights_reach_any_pattern(n: int, d: int, extra: int) -> None:
    X, P = np.random.default_rng(n).normal(size=(n, d)), random_pattern(n, n + d)
    head_dim = max(1, n + extra)
    weights = reaching_weights(X, P, head_dim)
    assert weights.W_Q.shape == weights.W_K.shape == (d, head_dim)
    assert weights.error < 1e-10
    assert np.abs(attention_pattern(X, weights.W_Q, weights.W_K) - P).max() < 1e-10
    nudged = attention_pattern(X, weights.W_Q + 1e-6, weights.W_K)
    assert n == 1 or np.abs(nudged - P).max() > 1e-10


def test_two_tokens_need_one_dimension_by_hand() -> None:
    """The smallest case of n − 1: scores q_i·k_j with k = (1, 0) give each row its own logit."""
    P = np.array([[0.9, 0.1], [0.2, 0.8]])
    q = np.log(P[:, :1] / P[:, 1:])
    np.testing.assert_allclose(softmax(q @ np.array([[1.0, 0.0]]), axis=-1), P)
    assert bottleneck_floor(2).exact == 1
    assert bottleneck_floor(2).published == 2
    assert reaching_weights(np.eye(2), P, 1).error < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("n", "head_dim"), [(3, 1), (5, 1), (5, 3), (7, 5)])
def test_no_search_comes_closer_than_the_proof_allows(n: int, head_dim: int) -> None:
    witness = bottleneck_witness(n, head_dim)
    assert np.linalg.matrix_rank(witness.X) == n
    found = closest(witness.P, head_dim)
    error = np.log(found) - np.log(witness.P)
    distance = witness.distance
    assert distance.score_gap == pytest.approx(1.0)  # all singular values are the sharpness
    assert np.linalg.norm(error, 2) >= distance.score_gap * (1 - 1e-9)
    assert np.abs(error).max() >= distance.log_gap > 0.1 / n
    assert np.abs(found - witness.P).max() >= distance.probability_gap > 1e-3


@pytest.mark.parametrize("n", [3, 5, 7])
def test_the_same_search_succeeds_one_dimension_wider(n: int) -> None:
    P = bottleneck_witness(n, n - 2).P
    assert np.abs(closest(P, n - 1) - P).max() < 1e-5


def test_a_random_pattern_below_the_threshold_is_proved_and_searched_alike() -> None:
    P = random_pattern(7, 3)
    distance = pattern_distance(P, 5)
    error = np.log(closest(P, 5)) - np.log(P)
    assert np.linalg.norm(error, 2) >= distance.score_gap * (1 - 1e-9) > 0.01
    with pytest.raises(TheoryError, match="use 6"):
        reaching_weights(np.eye(7), P, 5)


def test_a_simple_pattern_is_reached_by_a_narrow_head() -> None:
    rng = np.random.default_rng(29)
    scores = rng.normal(size=(11, 2)) @ rng.normal(size=(2, 11))
    P = softmax(scores + rng.normal(size=(11, 1)), axis=-1)
    assert pattern_distance(P, 2).score_gap == 0.0
    assert pattern_distance(P, 1).score_gap > 0.1
    assert reaching_weights(rng.normal(size=(11, 13)), P, 2).error < 1e-10


def test_two_dimensions_let_every_token_prefer_itself() -> None:
    """What the bottleneck does not say: the largest entries of a pattern need no width."""
    angles = 2 * np.pi * np.arange(31) / 31
    circle = 40 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert softmax(circle @ circle.T, axis=-1).diagonal().min() > 0.99


def test_misuse_is_refused() -> None:
    P = random_pattern(5, 1)
    for head_dim in (4, 5, 6):
        with pytest.raises(TheoryError, match="narrower than 4 for 5 tokens"):
            bottleneck_witness(5, head_dim)
    twin = np.eye(5)[[0, 1, 2, 3, 3]]
    with pytest.raises(TheoryError, match="5 of rank 4"):
        reaching_weights(twin, P, 5)
    with pytest.raises(TheoryError, match="strictly positive"):
        reaching_weights(np.eye(5), np.eye(5), 5)
    with pytest.raises(TheoryError, match="further from linear dependence"):
        reaching_weights(hilbert(9), random_pattern(9, 1), 9)
    with pytest.raises(TheoryError, match="number of tokens of at least 1"):
        bottleneck_floor(0)
    with pytest.raises(TheoryError, match="head width of at least 1"):
        bottleneck_witness(5, 0)
    with pytest.raises(TheoryError, match="sharpness above 0"):
        bottleneck_witness(5, 2, 0.0)
