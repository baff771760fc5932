"""Methods that look at the weights only.

    magnitude   a structure is as good as the sum of its squared weights; the whole model competes
    clover      plain SVD of the products W_O·W_V and W_Qᵀ·W_K of every head group (arXiv
                2411.17426), uniform widths

With A the output matrices of a group, one upon the other, and B its value matrix, the truncated SVD
of A·B is A·B·V_r·V_rᵀ: the value matrix is projected on the first right singular vectors of the
product. Rotary positions stand between W_Q and W_K, so there whole planes are kept, those of the
largest ‖W_Q‖·‖W_K‖.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from jaxtyping import Float

from headwise.baselines.parts import Cut, Group, Subject, groups_of
from headwise.baselines.planned import (
    Narrowed,
    Rule,
    planned_cut,
    without_columns,
    without_planes,
)
from headwise.plan import HeadSpec
from headwise.planning.fit import HeadWorth, Kept, Worths


def magnitude(subject: Subject, amount: int) -> Cut:
    """Planes, columns and value dimensions with the smallest squared weights removed."""

    def worth(group: Group, spec: HeadSpec) -> HeadWorth:
        query, key = np.square(group.query).sum((0, 2)), np.square(group.key).sum(1)
        vo = np.square(group.value).sum(1) + np.square(group.output).sum((0, 1))
        planes, free = _by_plane(query + key, spec)
        return HeadWorth(planes, free, vo, qk_whole=subject.profile.record.qk_whole)

    def narrowed(layer: int, head: int, group: Group, spec: HeadSpec, kept: Kept) -> Narrowed:
        stays = np.zeros((spec.vo_dim, 1))
        stays[list(kept.vo)] = 1.0
        made = replace(without_columns(group, spec, kept), value=group.value * stays)
        return Narrowed(made)

    return planned_cut(subject, amount, Rule(_worths(subject, worth), "valuable", narrowed))


def clover(subject: Subject, amount: int) -> Cut:
    """Uniform widths; the products of each head group truncated, rotary planes by weight norm."""

    def worth(group: Group, spec: HeadSpec) -> HeadWorth:
        squares = np.square(group.query).sum((0, 2)), np.square(group.key).sum(1)
        (planes_q, free), (planes_k, _) = (_by_plane(x, spec) for x in squares)
        # Singular values fall: of the directions of a product the first are kept.
        return HeadWorth(
            np.sqrt(planes_q * planes_k),
            np.zeros(len(free)),
            np.zeros(spec.vo_dim),
            qk_whole=subject.profile.record.qk_whole,
        )

    def narrowed(layer: int, head: int, group: Group, spec: HeadSpec, kept: Kept) -> Narrowed:
        value = group.value
        if len(kept.vo) < spec.vo_dim:
            value = value.copy()
            # A value bias is a constant in the output. An output bias takes it up as it is; without
            # one it is cut with the rest.
            end = -1 if subject.dense[layer].has_bias("output") else None
            value[:, :end] = _truncated(group.stacked_output, value[:, :end], len(kept.vo))
        made = replace(without_planes(group, spec, kept), value=value)
        rotary = 2 * len(spec.rotary_planes or ())
        if len(kept.free) < spec.qk_dim - rotary:
            key = made.key.copy()
            queries = group.stacked_query[:, rotary:]
            key[rotary:] = _truncated(queries, key[rotary:], len(kept.free))
            made = replace(made, key=key)
        return Narrowed(made)

    return planned_cut(subject, amount, Rule(_worths(subject, worth), "uniform", narrowed))


def _truncated(
    A: Float[np.ndarray, "rows dim"], B: Float[np.ndarray, "dim inputs"], rank: int
) -> Float[np.ndarray, "dim inputs"]:
    """B' of this rank for which A·B' is the truncated SVD of A·B."""
    Q, R = np.linalg.qr(B.T)
    _, _, Vt = np.linalg.svd(A @ R.T, full_matrices=False)
    V = Q @ Vt[:rank].T
    return np.asarray(B @ V @ V.T)


def _by_plane(columns: Float[np.ndarray, " qk"], spec: HeadSpec) -> tuple[np.ndarray, np.ndarray]:
    """Sums over the two columns of each plane, and what has no plane."""
    half = len(spec.rotary_planes or ())
    return columns[:half] + columns[half : 2 * half], columns[2 * half :]


def _worths(subject: Subject, worth: Callable[[Group, HeadSpec], HeadWorth]) -> Worths:
    return tuple(
        tuple(
            worth(group, spec)
            for group, spec in zip(groups_of(layer, weights), layer.heads, strict=True)
        )
        for layer, weights in zip(subject.profile.plan.layers, subject.dense, strict=True)
    )
