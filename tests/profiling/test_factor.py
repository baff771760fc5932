"""Whitened truncation: the identity at full rank, and nothing of the same rank does better."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.errors import HeadwiseError
from headwise.profiling.reduction import RIDGE, score_basis, value_basis
from tests import lanes

DIM, OUT, TOKENS = 7, 11, 97


def correlated(rng, dim=DIM, rank=None):
    rank = rank or dim
    return rng.standard_normal((TOKENS, rank)) @ (
        rng.standard_normal((rank, dim)) * np.geomspace(1, 0.01, rank)[:, None]
    )


def moment(z):
    return z.T @ z / len(z)


def output_error(z, P, W_O):
    return np.mean(np.sum((z @ W_O - z @ P @ W_O) ** 2, axis=1))


@settings(max_examples=lanes.examples(50), deadline=None)
@given(st.integers(0, 10_000), st.integers(1, DIM - 1))
def test_no_random_map_of_the_same_rank_has_less_output_error(seed, rank):
    rng = np.random.default_rng(seed)
    z, W_O = correlated(rng), rng.standard_normal((DIM, OUT))
    basis = value_basis(moment(z), W_O)
    ours = output_error(z, basis.encode[:, :rank] @ basis.decode[:rank], W_O)
    # Directions of almost no variance count a little more than they have.
    ridge = RIDGE * np.trace(moment(z)) * np.linalg.norm(W_O) ** 2
    assert ours == pytest.approx(basis.energy[rank:].sum(), rel=1e-6, abs=ridge)
    for _ in range(20):
        P = rng.standard_normal((DIM, rank)) @ rng.standard_normal((rank, DIM)) / DIM
        assert ours <= output_error(z, P, W_O) + ridge
    # The fair rival: the best plain SVD of the weights, which ignores C.
    U, _, _ = np.linalg.svd(W_O, full_matrices=False)
    plain = U[:, :rank] @ U[:, :rank].T
    assert ours <= output_error(z, plain, W_O) + ridge


def test_whitening_matters():
    """The control: on correlated heads the plain SVD of the weights is clearly worse."""
    rng = np.random.default_rng(0)
    z, W_O = correlated(rng), rng.standard_normal((DIM, OUT))
    basis = value_basis(moment(z), W_O)
    ours = output_error(z, basis.encode[:, :3] @ basis.decode[:3], W_O)
    U, _, _ = np.linalg.svd(W_O, full_matrices=False)
    assert output_error(z, U[:, :3] @ U[:, :3].T, W_O) > 10 * ours


@pytest.mark.parametrize("rank", [DIM, 3, 0])
def test_all_directions_are_the_identity_even_of_a_rank_deficient_moment(rank):
    rng = np.random.default_rng(3)
    z = correlated(rng, rank=rank) if rank else np.zeros((TOKENS, DIM))
    W_O = rng.standard_normal((DIM, OUT))
    basis = value_basis(moment(z), W_O)
    assert np.abs(basis.encode @ basis.decode - np.eye(DIM)).max() < 1e-8
    score = score_basis(moment(z), moment(correlated(rng)))
    assert np.abs(score.encode_q @ score.encode_k.T - np.eye(DIM)).max() < 1e-8


def test_coordinates_are_white():
    rng = np.random.default_rng(5)
    z = correlated(rng)
    basis = value_basis(moment(z), rng.standard_normal((DIM, OUT)))
    assert np.abs(moment(z @ basis.encode) - np.eye(DIM)).max() < 1e-8


@settings(max_examples=lanes.examples(50), deadline=None)
@given(st.integers(0, 10_000), st.integers(1, DIM - 1))
def test_no_random_map_of_the_same_rank_has_less_score_error(seed, rank):
    rng = np.random.default_rng(seed)
    q, k = correlated(rng), correlated(rng)

    def error(M):  # mean over all pairs of one query and one key
        return np.mean((q @ (np.eye(DIM) - M) @ k.T) ** 2)

    basis = score_basis(moment(q), moment(k))
    ours = error(basis.encode_q[:, :rank] @ basis.encode_k[:, :rank].T)
    ridge = RIDGE * np.trace(moment(q)) * np.trace(moment(k))
    assert ours == pytest.approx(basis.energy[rank:].sum(), rel=1e-6, abs=ridge)
    for _ in range(20):
        M = rng.standard_normal((DIM, rank)) @ rng.standard_normal((rank, DIM)) / DIM
        assert ours <= error(M) + ridge


def test_grouped_heads_share_one_basis():
    """Two query heads that use one value head: the sum of their errors is what is minimised."""
    rng = np.random.default_rng(7)
    z = [correlated(rng), 3 * correlated(rng)]
    W_O = [rng.standard_normal((DIM, OUT)) for _ in z]
    # For a fixed map the joint error bounds E‖z_i·(I−P)·W_i‖² summed over both.
    joint = value_basis(sum(map(moment, z)), np.hstack(W_O))
    alone = value_basis(moment(z[0]), W_O[0])

    def total(basis, rank):
        P = basis.encode[:, :rank] @ basis.decode[:rank]
        return sum(output_error(a, P, b) for a, b in zip(z, W_O, strict=True))

    assert total(joint, 4) < total(alone, 4)


def test_broken_moments_are_refused():
    with pytest.raises(HeadwiseError, match="must be finite, got NaN"):
        value_basis(np.full((2, 2), np.nan), np.eye(2))
