"""When can a ReLU MLP swallow the skip around it, at equal width?

Source: arXiv 2510.23912, the boundary of its exact cases: a skip around the MLP that can be
absorbed is no obstacle to folding. Here x is a column, as in the paper: y = W_down·relu(W_up·x).

A neuron may be flipped, w·relu(u) = w·relu(−u) + w·u, which leaves a linear term behind. Flipping
the neurons of a set S leaves W_down[:,S]·W_up[S,:]·x, and with it the skip vanishes if

    W_down[:,S]·W_up[S,:] = −I        (so that |S| ≥ d, by rank).

Conversely, the function has a kink on each hyperplane w_up,i·x = 0. If these are m different
hyperplanes and no neuron is dead, m neurons without a skip must have the same hyperplanes and
the same jumps, which leaves only the flips. So the condition is necessary *unless* a neuron is
redundant (`redundant_neurons`): two neurons on one line, relu(u) and relu(−u), can hold any
linear function of u, and then a skip may be absorbed although no S exists.

Biases and smooth activations (GELU) are out of scope: nothing here is said about them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.linalg
from jaxtyping import Float64

from headwise.errors import TheoryError

# At most 2^20 combinations are tried when the neurons' matrices are linearly dependent.
FREE_LIMIT = 20
# Largest entry of W_down[:,S]·W_up[S,:] + I that counts as zero, against the terms of the sum.
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class AbsorbableExample:
    """An MLP whose skip can be absorbed by flipping the neurons `flipped`."""

    W_up: Float64[np.ndarray, "hidden d"]
    W_down: Float64[np.ndarray, "d hidden"]
    flipped: tuple[int, ...]


def relu_mlp(
    W_up: Float64[np.ndarray, "hidden d"],
    W_down: Float64[np.ndarray, "d hidden"],
    x: Float64[np.ndarray, "*rows d"],
) -> Float64[np.ndarray, "*rows d"]:
    """W_down·relu(W_up·x) for each row of x, without a skip."""
    return np.asarray(np.maximum(x @ W_up.T, 0.0) @ W_down.T)


def absorbable_set(
    W_up: Float64[np.ndarray, "hidden d"], W_down: Float64[np.ndarray, "d hidden"]
) -> tuple[int, ...] | None:
    """A set S with W_down[:,S]·W_up[S,:] = −I, or None if there is none.

    The sum Σ c_i·w_down,i·w_up,iᵀ = −I is linear in c. Where the rank-one matrices are
    independent (generic weights of width up to d²), c is unique and one linear system decides
    whether it consists of zeros and ones. Otherwise the k dependent neurons are tried in all 2^k
    ways, each of which fixes the rest; k above FREE_LIMIT is refused. No d² × hidden matrix is
    made: inner products of rank-one matrices are products of inner products.
    """
    _check(W_up, W_down)
    sizes = np.linalg.norm(W_up, axis=1) * np.linalg.norm(W_down, axis=0)
    # A neuron this small changes nothing within the tolerance and is never flipped.
    alive = np.flatnonzero(sizes > TOLERANCE / (10 * max(1, sizes.size)))
    if not alive.size:
        return None
    up, down, size = W_up[alive], W_down[:, alive], sizes[alive]
    gram = (up @ up.T) * (down.T @ down) / np.outer(size, size)
    target = -np.einsum("ij,ji->i", up, down) / size

    _, R, order = scipy.linalg.qr(gram, pivoting=True, mode="economic")
    diagonal = np.abs(np.diag(R))
    rank = int(np.sum(diagonal > 1e-8 * diagonal[0]))
    fixed, free = order[:rank], order[rank:]
    if free.size > FREE_LIMIT:
        raise TheoryError(
            f"Expected at most {FREE_LIMIT} neurons whose rank-one matrices depend on the others, "
            f"got {free.size} of {alive.size}; use a smaller hidden width (up to d² is best)."
        )
    # Coefficients of the fixed neurons: start − step·(choice of the free ones).
    factor = scipy.linalg.cho_factor(gram[np.ix_(fixed, fixed)])
    start = scipy.linalg.cho_solve(factor, target[fixed]) / size[fixed]
    step = scipy.linalg.cho_solve(factor, gram[np.ix_(fixed, free)] * size[free])
    step = step / size[fixed, None]

    for choices in _binary_chunks(free.size):
        c = start - choices @ step.T
        near = np.all(np.minimum(np.abs(c), np.abs(c - 1.0)) < 0.25, axis=1)
        for row in np.flatnonzero(near):
            flags = np.concatenate([c[row] > 0.5, choices[row] > 0.5])
            found = tuple(sorted(int(i) for i in alive[order[flags]]))
            if _absorbs(W_up, W_down, found):
                return found
    return None


def absorb(
    W_up: Float64[np.ndarray, "hidden d"],
    W_down: Float64[np.ndarray, "d hidden"],
    flipped: tuple[int, ...],
) -> tuple[Float64[np.ndarray, "hidden d"], Float64[np.ndarray, "d hidden"]]:
    """The weights of an MLP without skip that equals the given one with skip, of equal width."""
    _check(W_up, W_down)
    hidden = W_up.shape[0]
    if len(set(flipped)) != len(flipped) or not all(0 <= i < hidden for i in flipped):
        raise TheoryError(
            f"Expected different neurons from 0 to {hidden - 1}, got {flipped}; "
            "take the set from absorbable_set."
        )
    if not _absorbs(W_up, W_down, flipped):
        raise TheoryError(
            "Expected a set S with W_down[:,S]·W_up[S,:] = −I, got one whose flips leave a "
            "linear term; take the set from absorbable_set."
        )
    signs = np.ones((hidden, 1))
    signs[list(flipped)] = -1.0
    return W_up * signs, W_down.copy()


def redundant_neurons(
    W_up: Float64[np.ndarray, "hidden d"], W_down: Float64[np.ndarray, "d hidden"]
) -> tuple[int, ...]:
    """The neurons that are dead, or whose W_up lies on the line of another living neuron.

    If there are none, `absorbable_set` returning None proves that no equal-width MLP without
    skip exists. If there are some, None only says that flips are not enough.
    """
    _check(W_up, W_down)
    lengths = np.linalg.norm(W_up, axis=1)
    dead = (lengths == 0) | (np.linalg.norm(W_down, axis=0) == 0)
    alive = np.flatnonzero(~dead)
    unit = W_up[alive] / lengths[alive, None]
    # 1 − |cos| ≈ angle²/2: lines closer than about a millionth of a radian count as one.
    parallel = 1.0 - np.abs(unit @ unit.T) < 1e-12
    np.fill_diagonal(parallel, val=False)
    dead[alive[parallel.any(axis=1)]] = True
    return tuple(int(i) for i in np.flatnonzero(dead))


def absorbable_example(d: int, hidden: int, seed: int) -> AbsorbableExample:
    """A random MLP made so that its skip can be absorbed, with the set that does it."""
    if not 1 <= d <= hidden:
        raise TheoryError(
            f"Expected a hidden width of at least d, as −I has rank d, got d={d} and "
            f"hidden={hidden}; widen the MLP."
        )
    rng = np.random.default_rng(seed)
    flipped = np.sort(rng.choice(hidden, size=int(rng.integers(d, hidden + 1)), replace=False))
    W_up = rng.standard_normal((hidden, d))
    W_down = rng.standard_normal((d, hidden)) / np.sqrt(hidden)
    # Singular values within a factor 4 keep the inverse, hence W_down, of ordinary size.
    U, _, Vt = np.linalg.svd(W_up[flipped], full_matrices=False)
    up = U * rng.uniform(0.5, 2.0, d) @ Vt
    inverse = np.linalg.pinv(up)
    W_up[flipped] = up
    # −inverse solves the condition; what is orthogonal to the columns of `up` is free.
    loose = W_down[:, flipped]
    W_down[:, flipped] = -inverse + loose - loose @ up @ inverse
    return AbsorbableExample(W_up, W_down, tuple(int(i) for i in flipped))


def _check(W_up: np.ndarray, W_down: np.ndarray) -> None:
    if W_up.ndim != 2 or W_down.shape != W_up.shape[::-1]:
        raise TheoryError(
            f"Expected W_up of shape (hidden, d) and W_down of shape (d, hidden), got "
            f"{W_up.shape} and {W_down.shape}; transpose or cut the weights to fit."
        )
    if not (np.isfinite(W_up).all() and np.isfinite(W_down).all()):
        raise TheoryError(
            "Expected finite weights, got nan or infinity; check where the weights come from."
        )


def _absorbs(
    W_up: Float64[np.ndarray, "hidden d"],
    W_down: Float64[np.ndarray, "d hidden"],
    flipped: tuple[int, ...],
) -> bool:
    up, down = W_up[list(flipped)], W_down[:, list(flipped)]
    rest = down @ up + np.eye(W_up.shape[1])
    terms = 1.0 + float(np.max(np.abs(down) @ np.abs(up), initial=0.0))
    return bool(np.max(np.abs(rest)) <= TOLERANCE * terms)


def _binary_chunks(n: int) -> Iterator[Float64[np.ndarray, "rows {n}"]]:
    """All 2^n rows of zeros and ones, a few thousand at a time."""
    for first in range(0, 2**n, 4096):
        numbers = np.arange(first, min(first + 4096, 2**n))
        yield ((numbers[:, None] >> np.arange(n)) & 1).astype(np.float64)
