"""SVD-LLM (arXiv 2403.07378): every projection on its own, truncated in the metric of its input.

    y = W·x,  S = E[x·xᵀ] = L·Lᵀ          minimise ‖(W − W')·L‖² over rank r

The truncated SVD of W·L, times L⁻¹, is U_r·(U_rᵀ·W), with U_r the first eigenvectors of W·S·Wᵀ: two
factors that hold r·(m + n) numbers, and no inverse. As published, every matrix has the same share
of its parameters, so r = share·m·n/(m + n). Heads play no part, biases are kept.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float

from headwise.baselines.parts import Cut, Subject
from headwise.errors import BudgetError
from headwise.models.backbones_headwise import Projection, Projections
from headwise.planning.widths import largest_scale

Shape = tuple[int, ...]  # m × n
_MOMENT = {"query": "input", "key": "input", "value": "input", "output": "mixed"}


def svd_llm(subject: Subject, amount: int) -> Cut:
    """Every projection whitened and truncated, the same share of each."""
    projections = [p for layer in subject.dense for _, p in layer.items()]
    shapes = [tuple(p.weight.shape) for p in projections]
    biases = sum(p.bias.numel() for p in projections if p.bias is not None)
    share = largest_scale(lambda s: biases + sum(kept(x, s) for x in shapes) <= amount, 1.0)
    if share is None or any(_rank(x, share) == 0 for x in shapes):
        raise BudgetError(f"{amount} attention parameters leave some projection without a rank.")
    layers = []
    for i, dense in enumerate(subject.dense):
        made = {}
        for side, whole in dense.items():
            W = whole.weight
            rank = _rank(tuple(W.shape), share)
            if rank < min(W.shape):
                S = subject.measured[f"{i}.{_MOMENT[side]}"]
                W = torch.from_numpy(truncated(W.double().numpy(), S, rank)).to(W.dtype)
            made[side] = Projection(W, whole.bias)
        layers.append(Projections(made))
    return Cut(tuple(layers), biases + sum(kept(x, share) for x in shapes))


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
