"""Methods that narrow every head: they differ in how directions are ranked and removed.

    magnitude   a structure is worth the sum of its squared weights; ranked over the whole model
    clover      plain SVD of the products W_O·W_V and W_Qᵀ·W_K of every head group (arXiv
                2411.17426), uniform widths
    uniform     whitened value directions, planes and scores; every head the same widths
    energy      the same; ranked over the whole model by squared output and score

All of them share one path: the planner's own fit turns the worths into a plan, and every head group
is narrowed to it. Widths are as fine as possible (single dimensions, whole planes), so that a
method comes as close to the budget as possible.

With A the output matrices of a group, one upon the other, and B its value matrix, the truncated SVD
of A·B is A·B·V_r·V_rᵀ: the value matrix is projected on the first right singular vectors of the
product. Rotary positions stand between W_Q and W_K, so there whole planes are kept, those of the
largest ‖W_Q‖·‖W_K‖.

The measured bases are those of plain whitened truncation (`headwise.profiling.reduction`), made
here from the profile's moments; where the layer has an output bias, the mean of what is dropped
moves into it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
from jaxtyping import Float

from headwise.baselines.parts import Cut, Group, Subject, groups_of, joined, kept_mlp
from headwise.models.backbones_headwise import Projections
from headwise.models.slicing import qk_columns
from headwise.plan import Budget, HeadSpec, Limit, Plan
from headwise.planning.cost import cost
from headwise.planning.fit import (
    FitProblem,
    HeadWorth,
    Kept,
    Worths,
    fit,
    kept_by_worth,
    most_valuable,
)
from headwise.planning.rules import WidthRules
from headwise.profiling.reduction import ScoreBasis, ValueBasis, score_basis, value_basis

FINEST = WidthRules("head", multiple_of=1, min_dim=1, ffn_multiple_of=1)


@dataclass(frozen=True, slots=True)
class Narrowed:
    """A narrowed head group, and what its loss adds to the output on average."""

    group: Group
    shift: Float[np.ndarray, " d_model"] | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """A method: the worth of every direction, the spread of the widths, the narrowing."""

    worths: Worths
    widths: Literal["uniform", "valuable"]
    narrowed: Callable[[int, int, Group, HeadSpec, Kept], Narrowed]  # layer, head group, …
    # The worth of every neuron of every MLP: the budget is of whole blocks, and neurons may go.
    neurons: tuple[Float[np.ndarray, " _"], ...] | None = None


def planned_cut(subject: Subject, amount: int, rule: Rule) -> Cut:
    """The method's cut to at most `amount` parameters, of attention or of whole blocks."""
    dense, limit = subject.profile.plan, Limit(amount=amount)
    policy = "uniform" if rule.widths == "uniform" else "sensitivity"
    problem = FitProblem(
        dense, rule.worths, FINEST, policy, fixed_groups=True, neurons=rule.neurons
    )
    whole_blocks = rule.neurons is not None
    budget = Budget(block_params=limit) if whole_blocks else Budget(attn_params=limit)
    plan = fit(problem, budget).plan
    if rule.widths == "uniform":
        plan = _filled(plan, dense, amount)
    layers = []
    for i, weights in enumerate(subject.dense):
        groups, shift = [], np.zeros(dense.shape.d_model)
        for j, group in enumerate(groups_of(dense.layers[i], weights)):
            whole, spec = dense.layers[i].heads[j], plan.layers[i].heads[j]
            kept = kept_by_worth(rule.worths[i][j], whole, spec)
            made = rule.narrowed(i, j, group, whole, kept)
            groups.append(made.group)
            shift += 0.0 if made.shift is None else made.shift
        unchanged = dense.layers[i].heads == plan.layers[i].heads
        layers.append(weights if unchanged else joined(groups, weights, shift))
    spent = cost(plan)
    mlps = tuple(
        kept_mlp(mlp, most_valuable(worth, width))
        for mlp, worth, width in zip(subject.mlps, rule.neurons or (), plan.ffn_dims, strict=False)
    )
    return Cut(tuple(layers), spent.attn_params, mlps, spent.ffn_params if mlps else 0)


def _filled(plan: Plan, dense: Plan, amount: int) -> Plan:
    """All values equally wider as long as the budget allows: a plane is two dimensions, and what
    is short of one more in every head would be given away.
    """
    while True:
        layers = []
        for layer, whole in zip(plan.layers, dense.layers, strict=True):
            heads = (
                head.model_copy(update={"vo_dim": min(head.vo_dim + 1, full.vo_dim)})
                for head, full in zip(layer.heads, whole.heads, strict=True)
            )
            layers.append(layer.model_copy(update={"heads": tuple(heads)}))
        wider = plan.model_copy(update={"layers": tuple(layers)})
        if wider.layers == plan.layers or cost(wider).attn_params > amount:
            return plan
        plan = wider


def without_planes(group: Group, spec: HeadSpec, kept: Kept) -> Group:
    """The group with the query rows of dropped planes set to zero: they add nothing to a score."""
    n_planes = len(spec.rotary_planes or ())
    free = tuple(range(spec.qk_dim - 2 * n_planes))
    return without_columns(group, spec, Kept(planes=kept.planes, free=free, vo=()))


def without_columns(group: Group, spec: HeadSpec, kept: Kept) -> Group:
    """The group with the query and key rows of dropped planes and columns set to zero."""
    stays = np.zeros((spec.qk_dim, 1))
    stays[qk_columns(spec, kept)] = 1.0
    return replace(group, query=group.query * stays, key=group.key * stays)


def magnitude(subject: Subject, amount: int, *, blocks: bool = False) -> Cut:
    """Planes, columns and value dimensions with the smallest squared weights removed.

    Of whole `blocks`, neurons compete with them.
    """

    def worth(group: Group, spec: HeadSpec) -> HeadWorth:
        query, key = np.square(group.query).sum((0, 2)), np.square(group.key).sum(1)
        vo = np.square(group.value).sum(1) + np.square(group.output).sum((0, 1))
        planes, free = by_plane(query + key, spec)
        return HeadWorth(planes, free, vo, qk_whole=subject.qk_whole)

    def narrowed(layer: int, head: int, group: Group, spec: HeadSpec, kept: Kept) -> Narrowed:
        stays = np.zeros((spec.vo_dim, 1))
        stays[list(kept.vo)] = 1.0
        made = replace(without_columns(group, spec, kept), value=group.value * stays)
        return Narrowed(made)

    neurons = tuple(map(_neuron_squares, subject.mlps)) if blocks else None
    rule = Rule(_worths(subject, worth), "valuable", narrowed, neurons)
    return planned_cut(subject, amount, rule)


def _neuron_squares(mlp: Projections) -> Float[np.ndarray, " neurons"]:
    """The sum of the squared weights of every neuron, biases into it too."""
    total = mlp["down"].weight.double().square().sum(0)
    for side, own in mlp.items():
        if side != "down":
            total = total + own.weight.double().square().sum(1)
            total = total + (0.0 if own.bias is None else own.bias.double().square())
    return np.asarray(total.numpy())


def clover(subject: Subject, amount: int) -> Cut:
    """Uniform widths; the products of each head group truncated, rotary planes by weight norm."""

    def worth(group: Group, spec: HeadSpec) -> HeadWorth:
        squares = np.square(group.query).sum((0, 2)), np.square(group.key).sum(1)
        (planes_q, free), (planes_k, _) = (by_plane(x, spec) for x in squares)
        # Singular values fall: of the directions of a product the first are kept.
        return HeadWorth(
            np.sqrt(planes_q * planes_k),
            np.zeros(len(free)),
            np.zeros(spec.vo_dim),
            qk_whole=subject.qk_whole,
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


def by_plane(columns: Float[np.ndarray, " qk"], spec: HeadSpec) -> tuple[np.ndarray, np.ndarray]:
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


def uniform(subject: Subject, amount: int) -> Cut:
    """Uniform widths, the directions of the largest energy in every head."""
    return _by_energy(subject, amount, "uniform")


def energy(subject: Subject, amount: int) -> Cut:
    """The directions of the largest energy in the model."""
    return _by_energy(subject, amount, "valuable")


def _by_energy(subject: Subject, amount: int, widths: Literal["uniform", "valuable"]) -> Cut:
    plan, profile = subject.profile.plan, subject.profile

    @cache
    def bases(layer: int) -> list[tuple[ValueBasis, ScoreBasis | None]]:
        groups = groups_of(plan.layers[layer], subject.dense[layer])
        return [
            (_values(subject, layer, j, group), _scores(subject, layer, j))
            for j, group in enumerate(groups)
        ]

    def worth(layer: int, head: int, spec: HeadSpec) -> HeadWorth:
        n_planes = len(spec.rotary_planes or ())
        values, scores = bases(layer)[head]
        planes = np.zeros(n_planes)
        if profile.has(layer, "plane_energy"):
            planes = profile.get(layer, "plane_energy")[head]
        scale = np.square(spec.score_scale or spec.qk_dim**-0.5)
        free = np.zeros(spec.qk_dim - 2 * n_planes) if scores is None else scale * scores.energy
        return HeadWorth(planes, free, values.energy, qk_whole=subject.qk_whole)

    def narrowed(layer: int, head: int, group: Group, spec: HeadSpec, kept: Kept) -> Narrowed:
        values, scores = bases(layer)[head]
        made, shift = without_planes(group, spec, kept), None
        if len(kept.vo) < spec.vo_dim:
            vo = list(kept.vo)
            P = values.decode[vo].T @ values.encode[:, vo].T  # of column vectors z
            made = replace(made, value=P @ group.value)
            if profile.record.centred:
                lost = _means(subject, layer, head) @ (np.eye(len(P)) - P).T
                shift = np.einsum("gdv,gv->d", group.output, lost)
        if scores is not None and len(kept.free) < len(scores.energy):
            free, rotary = list(kept.free), 2 * len(spec.rotary_planes or ())
            query = made.query.copy()
            P_q = scores.encode_k[:, free] @ scores.encode_q[:, free].T
            query[:, rotary:] = P_q @ query[:, rotary:]
            made = replace(made, query=query)
        return Narrowed(made, shift)

    worths = tuple(
        tuple(worth(i, j, spec) for j, spec in enumerate(layer.heads))
        for i, layer in enumerate(plan.layers)
    )
    return planned_cut(subject, amount, Rule(worths, widths, narrowed))


def _values(subject: Subject, layer: int, head: int, group: Group) -> ValueBasis:
    C = subject.profile.get(layer, "z_moment")[head]
    if subject.profile.record.centred:
        means = _means(subject, layer, head)
        C = C - means.T @ means
    return value_basis(C, group.stacked_output.T)


def _scores(subject: Subject, layer: int, head: int) -> ScoreBasis | None:
    """The basis of the columns without positions, if there are any that may be cut."""
    profile = subject.profile
    spec = profile.plan.layers[layer].heads[head]
    rotary = 2 * len(spec.rotary_planes or ())
    if rotary == spec.qk_dim or subject.qk_whole:
        return None
    C_q, C_k = (profile.get(layer, f"{s}_moment")[head][rotary:, rotary:] for s in ("q", "k"))
    mean = profile.get(layer, "k_mean")[head][rotary:]
    # A constant added to all keys is ignored by the softmax: they count by their covariance.
    return score_basis(C_q, C_k - np.outer(mean, mean))


def _means(subject: Subject, layer: int, head: int) -> np.ndarray:
    """The mean of z of every query head of a group, queries × vo."""
    heads = subject.profile.plan.layers[layer].heads
    first = sum(h.queries for h in heads[:head])
    z = subject.profile.get(layer, "z_mean").reshape(-1, heads[head].vo_dim)
    return z[first : first + heads[head].queries]
