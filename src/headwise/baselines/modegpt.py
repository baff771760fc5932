"""MoDeGPT (arXiv 2408.09632): each pair of matrices has its own decomposition.

    MLP            Nyström   neurons of the largest leverage [C·(C + I)⁻¹]_jj; W_down is refitted:
                             W_down·C[:, S]·C[S, S]⁻¹                C: second moment of neurons
    query-key      CR        columns of the largest ‖C^½·W_Q‖ · ‖C^½·W_K‖   C: of what enters them
    value-output   SVD       of C^½·W_V·W_O, truncated

A layer loses a share ∝ softmax(−s / ε) of its widths, s = 1 − cos(its input, its output): layers
that change their input least lose most. With rotary positions whole planes are chosen, by the norms
of their two columns; the query heads of a group are summed. The common factor of the shares is the
smallest that fits the budget, and no layer loses more than nine tenths.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float

from headwise.baselines.narrowing import by_plane, without_columns
from headwise.baselines.parts import Cut, Group, Subject, groups_of, joined, kept_mlp
from headwise.errors import BudgetError
from headwise.models.backbones_headwise import Projection, Projections
from headwise.plan import HeadSpec, LayerPlan, Plan
from headwise.planning.cost import cost
from headwise.planning.fit import Kept, most_valuable
from headwise.planning.widths import largest_scale
from headwise.profiling.reduction import value_basis

EPSILON = 0.1  # the temperature of the shares
MOST = 0.9  # of a layer's widths that may go


def modegpt(subject: Subject, amount: int) -> Cut:
    """Every layer narrowed by its share, pair by pair."""
    dense = subject.profile.plan
    given = np.array([float(subject.measured[f"{i}.influence"]) for i in range(len(dense.layers))])
    parts = np.exp(-(given - given.min()) / EPSILON)  # of the layer that gives most
    top = MOST / float(parts.min())

    def plan_at(scale: float) -> Plan:
        gone = np.minimum(MOST, (top - scale) * parts)
        layers = (
            _narrower(layer, dense.ffn_dims[i], 1.0 - float(gone[i]), whole_qk=subject.qk_whole)
            for i, layer in enumerate(dense.layers)
        )
        return dense.model_copy(update={"layers": tuple(layers)})

    def fits(scale: float) -> bool:
        spent = cost(plan_at(scale))
        return spent.attn_params + spent.ffn_params <= amount

    scale = largest_scale(fits, top)
    if scale is None:
        raise BudgetError(f"{amount} parameters are fewer than a tenth of every width needs.")
    plan = plan_at(scale)
    spent = cost(plan)
    layers = tuple(_attention(subject, i, layer) for i, layer in enumerate(plan.layers))
    mlps = tuple(_mlp(subject, i, width) for i, width in enumerate(plan.ffn_dims))
    return Cut(layers, spent.attn_params, mlps, spent.ffn_params)


def _narrower(layer: LayerPlan, ffn_dim: int, share: float, *, whole_qk: bool) -> LayerPlan:
    """The widths of a layer that keeps this share of each."""

    def part(width: int, share: float = share) -> int:
        return max(min(1, width), math.floor(share * width + 1e-9))

    heads = []
    for head in layer.heads:
        planes = head.rotary_planes or ()
        qk_share = 1.0 if whole_qk else share
        kept = planes[: part(len(planes), qk_share)]
        free = part(head.qk_dim - 2 * len(planes), qk_share)
        change = {"qk_dim": 2 * len(kept) + free, "vo_dim": part(head.vo_dim)}
        heads.append(head.model_copy(update={**change, "rotary_planes": kept}))
    return layer.model_copy(update={"heads": tuple(heads), "ffn_dim": part(ffn_dim)})


def _attention(subject: Subject, i: int, layer: LayerPlan) -> Projections:
    """The attention of one layer with the widths of `layer`; which planes those are is open."""
    dense, whole = subject.profile.plan.layers[i], subject.dense[i]
    if [(h.qk_dim, h.vo_dim) for h in layer.heads] == [(h.qk_dim, h.vo_dim) for h in dense.heads]:
        return whole
    C = np.pad(subject.measured[f"{i}.input"], (0, 1))  # biases follow, but do not count
    groups = [
        _narrowed(group, old, new, C)
        for group, old, new in zip(groups_of(dense, whole), dense.heads, layer.heads, strict=True)
    ]
    return joined(groups, whole)


def _narrowed(
    group: Group, dense: HeadSpec, head: HeadSpec, C: Float[np.ndarray, "inputs inputs"]
) -> Group:
    """CR for queries and keys, SVD for values and outputs, of one head group."""
    query = np.einsum("gri,ij,grj->r", group.query, C, group.query, optimize=True)
    key = np.einsum("ri,ij,rj->r", group.key, C, group.key, optimize=True)
    (planes_q, free_q), (planes_k, free_k) = by_plane(query, dense), by_plane(key, dense)
    n_planes = len(head.rotary_planes or ())
    kept = Kept(
        planes=most_valuable(np.sqrt(planes_q * planes_k), n_planes),
        free=most_valuable(np.sqrt(free_q * free_k), head.qk_dim - 2 * n_planes),
        vo=(),
    )
    made = without_columns(group, dense, kept)
    if head.vo_dim == dense.vo_dim:
        return made
    basis = value_basis(group.value @ C @ group.value.T, group.stacked_output.T)
    first = slice(head.vo_dim)
    P = basis.decode[first].T @ basis.encode[:, first].T
    return Group(made.query, made.key, P @ group.value, made.output)


def _mlp(subject: Subject, i: int, width: int) -> Projections:
    """The MLP of one layer: neurons by leverage, W_down refitted to what all of them gave."""
    whole = subject.mlps[i]
    down = whole["down"]
    if width == down.weight.shape[1]:
        return whole
    C = subject.measured[f"{i}.neurons"].astype(np.float64)
    tokens = subject.profile.record.tokens
    kept = most_valuable(leverage(C * tokens), width)
    made = np.zeros(down.weight.shape)
    made[:, kept] = nystrom(down.weight.double().numpy(), C, kept)
    refitted = Projection(torch.from_numpy(made).to(down.weight.dtype), down.bias)
    return kept_mlp(whole, kept).replaced(down=refitted)


def leverage(C: Float[np.ndarray, "n n"]) -> Float[np.ndarray, " n"]:
    """The ridge leverage score of every neuron: the diagonal of C·(C + I)⁻¹."""
    return 1.0 - np.diag(np.linalg.inv(C + np.eye(len(C))))


def nystrom(
    W: Float[np.ndarray, "d n"], C: Float[np.ndarray, "n n"], kept: list[int]
) -> Float[np.ndarray, "d kept"]:
    """The columns that give W·x from the kept entries of x with the least squared error."""
    own = C[np.ix_(kept, kept)]
    ridge = 1e-9 * float(np.trace(own)) / len(own) + 1e-30
    return np.asarray(np.linalg.solve(own + ridge * np.eye(len(own)), C[kept] @ W.T).T)
