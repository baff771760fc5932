"""Methods that keep some planes, query-key directions and value directions of every head group.

They differ in what a direction is worth, in whether widths are uniform or go where the worth is,
and in how a head group is narrowed; the rest is one path. Widths are as fine as they can be (single
dimensions, whole planes), so that a method comes as near to the budget as it may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Float

from headwise.baselines.parts import Cut, Group, Subject, groups_of, joined
from headwise.models.slicing import qk_columns
from headwise.plan import Budget, HeadSpec, Limit, Plan
from headwise.planning.cost import cost
from headwise.planning.fit import FitProblem, Kept, WidthRules, Worths, fit, kept_by_worth

FINEST = WidthRules(multiple_of=1, min_dim=1)


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


def planned_cut(subject: Subject, amount: int, rule: Rule) -> Cut:
    """The method's cut to at most `amount` attention parameters."""
    dense = subject.profile.plan
    policy = "uniform" if rule.widths == "uniform" else "sensitivity"
    problem = FitProblem(dense, rule.worths, FINEST, policy)
    plan = fit(problem, Budget(attn_params=Limit(amount=amount))).plan
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
    return Cut(tuple(layers), cost(plan).attn_params)


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
