"""Whitened truncation in head space: which directions of a head carry its function.

Everything a head does passes through `dim` numbers per token, so all of this is small: C is the
dim × dim second moment of those numbers, measured on text.

    value side    z = A·X·W_V,  out = z·W_O       z ≈ z·encode·decode   (encode folds into W_V,
                                                                          decode into W_O)
    score side    s = q·kᵀ                        q·kᵀ ≈ (q·encode_q)·(k·encode_k)ᵀ

Of all rank-r maps the one below has the least mean squared error in the output (in the score),
measured under C. With all directions kept the map is the identity, whatever C is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from headwise.errors import HeadwiseError

# A direction that the text never used has no variance; this share of the mean variance stands in
# for it, so that it is the last to be kept but its map stays invertible.
RIDGE = 1e-9


@dataclass(frozen=True, slots=True)
class ValueBasis:
    """Directions of one value head, most important first; coordinates are white."""

    encode: Float[np.ndarray, "dim dim"]  # z·encode[:, i] is coordinate i
    decode: Float[np.ndarray, "dim dim"]  # coordinates·decode is z again
    energy: Float[np.ndarray, " dim"]  # mean squared output that coordinate i carries


@dataclass(frozen=True, slots=True)
class ScoreBasis:
    """Directions of one query-key head, most important first."""

    encode_q: Float[np.ndarray, "dim dim"]
    encode_k: Float[np.ndarray, "dim dim"]
    energy: Float[np.ndarray, " dim"]  # mean squared score that coordinate i carries


def value_basis(C: Float[np.ndarray, "dim dim"], W_O: Float[np.ndarray, "dim out"]) -> ValueBasis:
    """The whitened basis of z under its second moment C, for the output matrix (or matrices) W_O.

    Grouped heads: C is the sum over the query heads of the group and W_O stands their matrices
    side by side, since one W_V serves them all.
    """
    root, inverse_root = _roots(C)
    # Only a W_O narrower than the head leaves directions that a thin SVD would not name.
    U, S, _ = np.linalg.svd(root @ W_O, full_matrices=W_O.shape[1] < len(C))
    energy = np.zeros(len(C))
    energy[: len(S)] = S**2
    return ValueBasis(encode=inverse_root @ U, decode=U.T @ root, energy=energy)


def score_basis(C_q: Float[np.ndarray, "dim dim"], C_k: Float[np.ndarray, "dim dim"]) -> ScoreBasis:
    """The basis in which E(q·kᵀ)² splits into independent parts, for scores without positions."""
    root_q, inverse_q = _roots(C_q)
    root_k, inverse_k = _roots(C_k)
    U, S, Vt = np.linalg.svd(root_q @ root_k)
    share = np.sqrt(S)  # split between both sides, so that neither becomes large
    return ScoreBasis(
        encode_q=inverse_q @ U * share, encode_k=inverse_k @ Vt.T * share, energy=S**2
    )


def _roots(
    C: Float[np.ndarray, "dim dim"],
) -> tuple[Float[np.ndarray, "dim dim"], Float[np.ndarray, "dim dim"]]:
    """The symmetric square root of C and its inverse."""
    if not np.isfinite(C).all():
        raise HeadwiseError(
            "A head's second moment must be finite, got NaN or infinite entries; the model's "
            "weights or its activations on this text are broken."
        )
    eigenvalues, vectors = np.linalg.eigh((C + C.T) / 2)
    mean = eigenvalues.clip(min=0).mean()
    # A head whose numbers are all zero does nothing: any basis is right, take the plain one.
    safe = np.maximum(eigenvalues, RIDGE * mean) if mean > 0 else np.ones_like(eigenvalues)
    root = np.sqrt(safe)
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
