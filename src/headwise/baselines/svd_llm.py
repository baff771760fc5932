"""SVD-LLM (arXiv 2403.07378): every projection on its own, truncated in the metric of its input.

    y = W·x,  S = E[x·xᵀ] = L·Lᵀ          minimise ‖(W − W')·L‖² over rank r

The truncated SVD of W·L, times L⁻¹, is U_r·(U_rᵀ·W), with U_r the first eigenvectors of W·S·Wᵀ: two
factors that hold r·(m + n) numbers, and no inverse. As published, every matrix keeps the same share
of its parameters, so r = share·m·n/(m + n). Heads are ignored, biases are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float

from headwise.baselines.parts import Cut, Subject
from headwise.errors import BudgetError
from headwise.models.backbones_headwise import Projection, Projections
from headwise.planning.widths import largest_scale

Shape = tuple[int, ...]  # m × n
_MOMENT = {  # of what enters each projection
    **dict.fromkeys(("query", "key", "value"), "input"),
    "output": "mixed",
    **dict.fromkeys(("gate", "up"), "mlp"),
    "down": "neurons",
}


def svd_llm(subject: Subject, amount: int, *, blocks: bool = False) -> Cut:
    """Every projection whitened and truncated, the same share of each.

    Of whole `blocks`: those of the MLPs too.
    """
    mlps = subject.mlps if blocks else ()
    projections = [p for layer in (*subject.dense, *mlps) for _, p in layer.items()]
    shapes = [tuple(p.weight.shape) for p in projections]
    biases = sum(p.bias.numel() for p in projections if p.bias is not None)
    share = largest_scale(lambda s: biases + sum(kept(x, s) for x in shapes) <= amount, 1.0)
    if share is None or any(_rank(x, share) == 0 for x in shapes):
        raise BudgetError(f"{amount} parameters leave some projection with rank 0.")
    layers, narrow = (
        tuple(_truncated(subject, i, layer, share) for i, layer in enumerate(some))
        for some in (subject.dense, mlps)
    )
    return Cut(layers, _counted(subject.dense, share), narrow, _counted(mlps, share))


def _truncated(subject: Subject, i: int, dense: Projections, share: float) -> Projections:
    made = {}
    for side, whole in dense.items():
        W = whole.weight
        rank = _rank(tuple(W.shape), share)
        if rank < min(W.shape):
            S = subject.measured[f"{i}.{_MOMENT[side]}"].astype(np.float64)
            W = torch.from_numpy(truncated(W.double().numpy(), S, rank)).to(W.dtype)
        made[side] = Projection(W, whole.bias)
    return Projections(made)


def _counted(layers: Sequence[Projections], share: float) -> int:
    """Parameters of all projections at this share."""
    all_of = [p for layer in layers for _, p in layer.items()]
    biases = sum(p.bias.numel() for p in all_of if p.bias is not None)
    return biases + sum(kept(tuple(p.weight.shape), share) for p in all_of)


def truncated(
    W: Float[np.ndarray, "m n"], S: Float[np.ndarray, "n n"], rank: int
) -> Float[np.ndarray, "m n"]:
    """The matrix of this rank that is nearest to W for inputs of second moment S."""
    _, vectors = np.linalg.eigh(W @ S @ W.T)
    U = vectors[:, len(vectors) - rank :]
    return np.asarray(U @ (U.T @ W))


def kept(shape: Shape, share: float) -> int:
    """Parameters of one projection: two factors, or the matrix itself at the full share."""
    m, n = shape
    rank = _rank(shape, share)
    return m * n if rank == min(shape) else rank * (m + n)


def _rank(shape: Shape, share: float) -> int:
    m, n = shape
    # Two factors of full rank are larger than the matrix: at the full share it stays as it is.
    return min(m, n) if share >= 1.0 else math.floor(share * m * n / (m + n) + 1e-9)
