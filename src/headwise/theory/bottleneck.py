"""The low-rank bottleneck: which attention patterns a head of a given width can make at all.

    softmax( X·W_Q · W_Kᵀ·Xᵀ / √d_h )  =  P          X: n tokens × d, of full row rank n ≤ d
             └──── rank ≤ d_h ────┘

Bhojanapalli et al. (2020) state that every positive P is reachable iff d_h ≥ n. Softmax forgets a
constant added to a row of scores, which gives one rank away, so the exact threshold is n − 1:

- The scores of a pattern are log P + c·1ᵀ for some row offsets c, and every such matrix is
  X·M·Xᵀ for some M, because X has full row rank. So P is reachable iff some c makes
  rank(log P + c·1ᵀ) ≤ d_h.
- With Π = I − 1·1ᵀ/n, rank(log P + c·1ᵀ) ≥ rank(log P·Π), as 1ᵀΠ = 0; and the offsets
  c = −log P·1/n reach equality. The rank a pattern needs is therefore exactly rank(log P·Π).
- That rank is at most n − 1, and n − 1 for almost every P. Hence d_h ≥ n − 1 reaches everything,
  and every d_h ≤ n − 2 misses almost everything, by a distance that singular values give.

All n tokens are visible to each other here; a causal mask leaves some scores free
and needs at most as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from headwise.errors import TheoryError

_REACH_TOLERANCE = 1e-10  # what "reached" means, in probability
_RANK_TOLERANCE = 1e-12  # singular values below this share of the largest are rounding


@dataclass(frozen=True, slots=True)
class BottleneckFloor:
    """Head widths from which every positive pattern over n independent tokens is reachable."""

    published: int
    exact: int


@dataclass(frozen=True, slots=True, eq=False)
class ReachingWeights:
    """Weights whose attention over the given tokens is the given pattern, and how closely."""

    W_Q: Float[np.ndarray, "d h"]
    W_K: Float[np.ndarray, "d h"]
    error: float


@dataclass(frozen=True, slots=True, eq=False)
class Distance:
    """The minimum error of every head of this width on a pattern, whatever its weights.

    score_gap: ‖log Q − log P‖₂ ≥ this for every reachable Q: the singular value of log P·Π after
    the first d_h (Eckart–Young). log_gap: some entry has |log Q − log P| ≥ this.
    probability_gap: some entry has |Q − P| ≥ this. All are 0 for a reachable pattern.
    """

    score_gap: float
    log_gap: float
    probability_gap: float


@dataclass(frozen=True, slots=True, eq=False)
class Witness:
    """Independent tokens X and a positive pattern P that no head of this width can make."""

    X: Float[np.ndarray, "n n"]
    P: Float[np.ndarray, "n n"]
    head_dim: int
    distance: Distance


def bottleneck_floor(n_tokens: int) -> BottleneckFloor:
    """The published threshold n, and the exact one n − 1 (softmax forgets a row's offset)."""
    _check_positive(n_tokens, "number of tokens")
    return BottleneckFloor(published=n_tokens, exact=max(1, n_tokens - 1))


def attention_pattern(
    X: Float[np.ndarray, "n d"], W_Q: Float[np.ndarray, "d h"], W_K: Float[np.ndarray, "d h"]
) -> Float[np.ndarray, "n n"]:
    """softmax(X·W_Q·W_Kᵀ·Xᵀ/√h), each row over all n tokens."""
    scores = (X @ W_Q) @ (X @ W_K).T / math.sqrt(W_Q.shape[1])
    return _row_softmax(scores)


def pattern_distance(P: Float[np.ndarray, "n n"], head_dim: int) -> Distance:
    """A proof, in numbers, of how far P stays from every head of this width."""
    _check_positive(head_dim, "head width")
    tail = np.linalg.svd(_centred_log(P), compute_uv=False)
    tail = np.where(tail > _RANK_TOLERANCE * tail[0], tail, 0.0)[head_dim:]
    if not tail.any():
        return Distance(0.0, 0.0, 0.0)
    # The Frobenius norm of log Q − log P is at least the tail's; its largest entry, a 1/n of it.
    log_gap = float(np.linalg.norm(tail)) / len(P)
    return Distance(float(tail[0]), log_gap, float(P.min()) * -math.expm1(-log_gap))


def reaching_weights(
    X: Float[np.ndarray, "n d"], P: Float[np.ndarray, "n n"], head_dim: int
) -> ReachingWeights:
    """W_Q, W_K of width head_dim whose attention over X is P to 1e-10.

    log P·Π = U·Σ·Vᵀ is split evenly, and X's right inverse carries both halves back to the weights.
    """
    rank = int(np.linalg.matrix_rank(X))
    if not rank == len(X) == len(P):
        raise TheoryError(
            f"Expected one linearly independent token for each of the pattern's {len(P)} rows, got "
            f"{len(X)} of rank {rank}; pass no more tokens than X is wide, and no copies."
        )
    if (distance := pattern_distance(P, head_dim)).score_gap > 0:
        raise TheoryError(
            f"Expected a head wide enough for the pattern, got {head_dim}, which stays at least "
            f"{distance.log_gap:.3g} away in log probability; use {bottleneck_floor(rank).exact}, "
            "which reaches every pattern over these tokens."
        )
    left, values, right = np.linalg.svd(_centred_log(P))
    kept = min(head_dim, len(P))
    half = np.zeros((len(P), head_dim))
    np.fill_diagonal(half, np.sqrt(values[:kept] * math.sqrt(head_dim)))
    inverse = np.linalg.pinv(X)
    W_Q, W_K = inverse @ left @ half, inverse @ right.T @ half
    error = float(np.abs(attention_pattern(X, W_Q, W_K) - P).max())
    if error > _REACH_TOLERANCE:
        raise TheoryError(
            f"Expected tokens well enough apart to reach the pattern to {_REACH_TOLERANCE:g}, got "
            f"an error of {error:.2g}; pass tokens that are further from linear dependence."
        )
    return ReachingWeights(W_Q, W_K, error)


def bottleneck_witness(n_tokens: int, head_dim: int, sharpness: float | int = 1.0) -> Witness:
    """Tokens and a pattern out of reach for a head of at most n − 2: each token prefers itself.

    P ∝ exp(sharpness·I), so log P·Π = sharpness·Π has n − 1 equal singular values.
    """
    floor = bottleneck_floor(n_tokens)
    _check_positive(head_dim, "head width")
    if head_dim >= floor.exact:
        raise TheoryError(
            f"Expected a head narrower than {floor.exact} for {n_tokens} tokens, got {head_dim}, "
            "which reaches every positive pattern over independent tokens (softmax forgets a "
            "row's offset, so one less than the published number is enough); use reaching_weights."
        )
    if not (math.isfinite(sharpness) and sharpness > 0):
        raise TheoryError(f"Expected a finite sharpness above 0, got {sharpness}; try 1.")
    P = _row_softmax(sharpness * np.eye(n_tokens))
    return Witness(np.eye(n_tokens), P, head_dim, pattern_distance(P, head_dim))


def _centred_log(P: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """log P·Π: the scores of a pattern with the offsets that need the least rank."""
    if not (np.all(P > 0) and np.allclose(P.sum(-1), 1.0, rtol=0, atol=1e-9)):
        raise TheoryError(
            "Expected positive rows that sum to 1, got a zero, negative or unnormalised pattern; "
            "softmax never gives an exact zero, so pass a strictly positive P."
        )
    scores = np.log(P)
    return np.asarray(scores - scores.mean(-1, keepdims=True))


def _row_softmax(scores: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    grown = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(grown / grown.sum(-1, keepdims=True))


def _check_positive(number: int, what: str) -> None:
    if number < 1:
        raise TheoryError(f"Expected a {what} of at least 1, got {number}; pass a whole number.")
