"""From the chunks of a profile run to the profile of each layer.

Whitened truncation in head space finds the directions that carry a head's function.
All of a head's signal passes through `dim` numbers per token, so the matrices are small: C is the
dim × dim second moment of those numbers, measured on text.

    value side    z = A·X·W_V,  out = z·W_O       z ≈ z·encode·decode   (encode folds into W_V,
                                                                          decode into W_O)
    score side    s = q·kᵀ                        q·kᵀ ≈ (q·encode_q)·(k·encode_k)ᵀ

Of all rank-r maps the one below has the least mean squared error in the output (in the score),
measured under C. With all directions kept the map is the identity, whatever C is.

Reduce: the chunks are added in order, in double precision.

    chunks ──► moments, means ──► basis of every head
       └─────► M_s ─────────────────────┴──► ∂L_s/∂gate in that basis ──► sensitivity

One layer at a time, so memory does not grow with the number of layers. The order of the sums is
the order of the text, so the result is the same to the last bit whoever computed the chunks.

The bases use two exact corrections:
- where the output projection has a bias, the mean of z can go into it: z is cut around its mean;
- a constant added to all keys adds the same to all scores of a row, which the softmax ignores: the
  keys without positions count by their covariance, not by their second moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from headwise.errors import HeadwiseError
from headwise.plan import LayerPlan
from headwise.profiling.recorder import ROW_STATISTICS
from headwise.runs import Run

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


Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a run, in the order of the text."""

    run: Run
    names: tuple[str, ...]
    counts: Float[np.ndarray, " sequences"]  # n_s of every sequence
    tokens: int  # that the moments are sums over

    def each(self, name: str) -> Iterator[np.ndarray]:
        """One tensor of every chunk, in double precision."""
        for part in self.names:
            yield self.run.tensor(part, name).astype(np.float64)

    def mean(self, layer: int, name: str) -> np.ndarray:
        """A sum over tokens, as a mean per token."""
        total: np.ndarray | None = None
        for part in self.each(f"{layer}.{name}"):
            total = part if total is None else total + part
        assert total is not None
        return total / self.tokens

    def stacked(self, layer: int, name: str) -> np.ndarray:
        """A tensor with one entry per sequence, of all sequences."""
        return np.concatenate(list(self.each(f"{layer}.{name}")))


def reduced_layer(
    chunks: Chunks,
    index: int,
    layer: LayerPlan,
    W_O: Float[np.ndarray, "groups vo out"],
    down: Float[np.ndarray, " neurons"],
    *,
    length: int,
    centred: bool,
    qk_whole: bool,
) -> Arrays:
    """Everything the profile says about one layer; `down` are the squared norms of its W_down."""
    found: Arrays = {}
    for name in ("z", "q", "k"):
        found[f"{name}_moment"] = chunks.mean(index, f"{name}_moment")
        found[f"{name}_mean"] = chunks.mean(index, f"{name}_sum")
    for name in ROW_STATISTICS:  # sums over sequences
        found[name] = chunks.mean(index, name) * length
    found |= _values(chunks, index, found, W_O, centred=centred)
    if not qk_whole:
        found |= _scores(chunks, index, found, layer)
    gates = chunks.stacked(index, "ffn_gradient") / np.sqrt(chunks.counts)[:, None]
    found["ffn_sensitivity"] = np.square(gates).mean(0)
    found["ffn_energy"] = chunks.mean(index, "ffn_power") * down
    found["ffn_mean"] = chunks.mean(index, "ffn_sum")
    return found


def _values(
    chunks: Chunks, index: int, moments: Arrays, W_O: np.ndarray, *, centred: bool
) -> Arrays:
    """The value side: its basis, and the gates on it."""
    groups = len(W_O)
    C = moments["z_moment"]
    means = moments["z_mean"].reshape(groups, -1, C.shape[-1]) if centred else None
    if means is not None:
        C = C - means.swapaxes(1, 2) @ means
    bases = [value_basis(c, w) for c, w in zip(C, W_O, strict=True)]
    encode = _rounded(np.stack([b.encode for b in bases]))
    rows = []
    sums = chunks.each(f"{index}.vo_gradient_sum")
    for M, g in zip(chunks.each(f"{index}.vo_gradient"), sums, strict=True):
        if means is not None:  # Σ_t (z_t − mean)ᵀ·g_t
            apart = g.reshape(len(g), groups, -1, C.shape[-1])
            M = M - np.einsum("ghi,sghj->sgij", means, apart)  # noqa: PLW2901
        rows.append(_gate_gradients(M, encode))
    gates = np.concatenate(rows)
    return {
        "vo_encode": encode,
        "vo_energy": np.stack([b.energy for b in bases]),
        **_sensitivity("vo", gates, chunks.counts),
    }


def _scores(chunks: Chunks, index: int, moments: Arrays, layer: LayerPlan) -> Arrays:
    """The query-key side: planes, then what has no positions."""
    head = layer.heads[0]
    n_planes = len(head.rotary_planes or ())
    C_q, C_k = moments["q_moment"], moments["k_moment"]
    scale = np.square(head.score_scale or head.qk_dim**-0.5)
    found: Arrays = {}
    if n_planes:
        power_q, power_k = (
            np.diagonal(C, axis1=1, axis2=2)[:, : 2 * n_planes].reshape(-1, 2, n_planes).sum(1)
            for C in (C_q, C_k)
        )
        # A plane's score is |q|·|k|·cos of an angle that turns with the distance: half on average.
        found["plane_energy"] = scale * power_q * power_k / 2
        gates = chunks.stacked(index, "plane_gradient")
        found |= _sensitivity("plane", gates, chunks.counts)
    if 2 * n_planes < head.qk_dim:
        free = slice(2 * n_planes, None)
        mean_k = moments["k_mean"][:, free]
        cov_k = C_k[:, free, free] - mean_k[:, :, None] * mean_k[:, None, :]
        bases = [score_basis(q, k) for q, k in zip(C_q[:, free, free], cov_k, strict=True)]
        encode = _rounded(np.stack([b.encode_q for b in bases]))
        rows = [_gate_gradients(M, encode) for M in chunks.each(f"{index}.free_gradient")]
        found["free_encode_q"] = encode
        found["free_energy"] = scale * np.stack([b.energy for b in bases])
        found |= _sensitivity("free", np.concatenate(rows), chunks.counts)
    return found


def _gate_gradients(
    M: Float[np.ndarray, "sequences groups dim dim"], encode: Float[np.ndarray, "groups dim dim"]
) -> Float[np.ndarray, "sequences groups dim"]:
    """(encodeᵀ·M·decodeᵀ)_ii of every sequence and head group, with decode the inverse."""
    decode = np.linalg.inv(encode)
    return np.asarray(((M @ decode.mT) * encode).sum(-2))


def _sensitivity(
    part: str, gates: Float[np.ndarray, "sequences groups n"], counts: np.ndarray
) -> Arrays:
    """The gradients per √token, and the mean of their squares."""
    scaled = gates / np.sqrt(counts)[:, None, None]
    return {f"{part}_gradients": scaled, f"{part}_sensitivity": np.square(scaled).mean(0)}


def _rounded(encode: np.ndarray) -> np.ndarray:
    """Rounded as in the file, so that later steps use the same directions."""
    return encode.astype(np.float32).astype(np.float64)
