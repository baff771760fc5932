"""Reduce: the chunks, added in order in double precision, become the profile of each layer.

    chunks ──► moments, means ──► basis of every head (factor.py)
       └─────► M_s ─────────────────────┴──► ∂L_s/∂gate in that basis ──► sensitivity

One layer at a time, so memory does not grow with the number of layers. The order of the sums is
the order of the text, so the result is the same to the last bit whoever computed the chunks.

Two things are exact and cost nothing, so the bases take them into account:
- where the output projection has a bias, the mean of z can go into it: z is cut around its mean;
- a constant added to all keys adds the same to all scores of a row, which the softmax ignores: the
  keys without positions count by their covariance, not by their second moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from headwise.plan import LayerPlan
from headwise.profiling.factor import score_basis, value_basis
from headwise.profiling.recorder import ROW_STATISTICS
from headwise.runs import Run

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
    """As it will be read from the file, so that what follows speaks of the same directions."""
    return encode.astype(np.float32).astype(np.float64)
