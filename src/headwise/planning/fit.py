"""The fit of a plan to a profile: which widths lose least, under budgets or under a loss target.

A profile gives every direction of every head a *sensitivity*: half of it is the predicted rise of
the mean loss when the direction is dropped (a diagonal second-order model, so the halves add up).
Sorted from large to small and summed they are one concave curve per part of a head,

    kept │      ╭────────     planes   rotary planes, two dimensions each
    value│   ╭──╯             free     query-key directions without positions
         │╭──╯                vo       value-output directions
         └──────────── width

and the one solver spends the budgets on them. The other policies decide the widths differently, for
comparison; which directions a head of given width keeps is one rule for all: the most sensitive.

    sensitivity   the curves above
    energy        squared output and score carried by each direction; known to lose, since errors
                  of different layers do not compare
    saturation    each head's share of energy, weighted by the layer's measured Jacobian norm
    uniform       the same share of every head
    linear        shares that fall linearly with depth, the last layer's half of the first's
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from headwise.errors import BudgetError, PlanError, did_you_mean
from headwise.plan import Budget, HeadSpec, Limit, Origin, Plan, Resource
from headwise.planning.cost import Side, cost, dense_cost, unit_cost
from headwise.planning.widths import Place, WidthCurve, Widths, largest_scale
from headwise.planning.worth_curves import FitRules, HeadWorth, Worths, ranking, width_curves

FIT_POLICIES = ("sensitivity", "uniform", "linear", "saturation", "energy")
SIDES: tuple[Side, ...] = ("qk", "vo")
LAST_LAYER_SHARE = 0.5  # linear: of the first layer's share


@dataclass(frozen=True, slots=True)
class Fit:
    """A plan, the rise of the mean loss it predicts, and whether no plan predicts less."""

    plan: Plan
    loss_increase: float
    exact: bool

    @property
    def perplexity_ratio(self) -> float:
        """e to the rise of the loss."""
        return math.exp(self.loss_increase) if self.loss_increase < 709 else math.inf


@dataclass(frozen=True, slots=True, eq=False)  # one is equal to itself only, so it can be a key
class Task:
    """The dense plan, the sensitivity of its directions, what the policy goes by, and the rules.

    Many budgets may be tried on one task: what does not depend on the budget is worked out once.
    """

    template: Plan
    sensitivity: Worths
    rules: FitRules
    policy: str = "sensitivity"
    worth: Worths | None = None  # None: the sensitivity itself

    def __post_init__(self) -> None:
        if self.policy not in FIT_POLICIES:
            raise PlanError(
                f"policy must be one that is known, got {self.policy!r}. "
                f"{did_you_mean(self.policy, FIT_POLICIES)}"
            )

    @property
    def context(self) -> int:
        """Tokens attended to, for FLOPs."""
        return self.rules.context or self.template.shape.context


def fit(task: Task, budget: Budget) -> Fit:
    """The policy's best plan within the budget; no budget means 100% of attention parameters."""
    if not budget.limited:
        budget = Budget(attn_params=Limit(share=1.0))
    if _within(task.template, budget, task.context):
        # No limit binds: nothing is dropped, not even what the text never used.
        widths, exact = {place: len(c.values) - 1 for place, c in _curves(task).items()}, True
    elif task.policy in {"uniform", "linear"}:
        widths, exact = _scaled_widths(task, budget), True
    else:
        widths, found = _ready(task).best(budget)
        exact = found.exact
    plan = _planned(task, widths)
    assert _within(plan, budget, task.context), "a fit went over its budget"
    return Fit(plan, predicted_loss(task, plan), exact)


@lru_cache(maxsize=32)
def _ready(task: Task) -> Widths:
    return Widths(task.template, task.context, _curves(task))


def _curves(task: Task) -> dict[Place, WidthCurve]:
    return width_curves(task.worth or task.sensitivity, task.rules)


def least_fit(task: Task, max_loss: float, resource: Resource, budget: Budget) -> Fit:
    """The plan of least `resource` whose predicted rise of the loss is at most `max_loss`.

    The best predicted loss falls as the budget grows, so the budget is bisected, down to the
    common divisor of what single dimensions cost.
    """
    dense = dense_cost(task.template.shape, task.context)
    full: int = getattr(cost(task.template, task.context), resource)
    given = getattr(budget, resource)
    top = full if given is None else min(full, budget.amount(resource, dense))
    units = {
        unit_cost(task.template, i, head, side, task.context)[resource]
        for i, layer in enumerate(task.template.layers)
        for head in layer.heads
        for side in SIDES
    }
    step = math.gcd(*units)
    if not step:
        raise BudgetError(
            f"no width changes the {resource.replace('_', ' ')} of this model, so there is no "
            "least; choose another resource."
        )

    def at(amount: int) -> Fit:
        return fit(task, budget.model_copy(update={resource: Limit(amount=max(1, amount))}))

    best = at(top)
    if best.loss_increase > max_loss:
        raise BudgetError(
            f"even the largest plan within the budget predicts a loss increase of "
            f"{best.loss_increase:.4g}, above {max_loss:.4g}; raise --max-loss or the budget."
        )
    low, high = 0, top // step  # in steps below the top: `low` is known to hold
    while low < high:
        middle = (low + high + 1) // 2
        try:
            found = at(top - middle * step)
        except BudgetError:  # below the smallest allowed plan
            found = None
        if found is not None and found.loss_increase <= max_loss:
            low, best = middle, found
        else:
            high = middle - 1
    return best


def predicted_loss(task: Task, plan: Plan) -> float:
    """½ · Σ of the dropped sensitivities."""
    dropped = 0.0
    for i, layer in enumerate(task.sensitivity):
        for j, worth in enumerate(layer):
            dense, head = task.template.layers[i].heads[j], plan.layers[i].heads[j]
            kept = kept_planes(dense, head)
            gone = np.ones(len(worth.planes), dtype=bool)
            gone[kept] = False
            free, vo = _least_sums(worth)
            dropped += float(worth.planes[gone].sum())
            dropped += free[len(worth.free) - (head.qk_dim - 2 * len(kept))]
            dropped += vo[len(worth.vo) - head.vo_dim]
    return 0.5 * dropped


@lru_cache(maxsize=1 << 16)
def _least_sums(worth: HeadWorth) -> tuple[list[float], list[float]]:
    """The sums of the 0, 1, … least sensitive position-free and value directions."""
    free, vo = (
        np.concatenate([[0.0], np.cumsum(np.sort(x.astype(np.float64)))])
        for x in (worth.free, worth.vo)
    )
    return free.tolist(), vo.tolist()


@lru_cache(maxsize=1 << 16)
def _plane_ranking(worth: HeadWorth) -> list[int]:
    return ranking(worth.planes)


def kept_planes(dense: HeadSpec, head: HeadSpec) -> list[int]:
    """Which of the dense head's planes a cut head keeps, as places in the dense head's list."""
    own = _places(dense.rotary_planes or ())
    planes = dense.rotary_planes if head.rotary_planes is None else head.rotary_planes
    if any(p not in own for p in planes or ()):
        raise PlanError(
            f"the plan keeps rotary planes {list(planes or ())}, but the profiled head has "
            f"{sorted(own)}; use the plan with the profile it was fitted to."
        )
    return [own[p] for p in planes or ()]


@lru_cache(maxsize=64)  # the heads of a model have few different lists
def _places(planes: tuple[int, ...]) -> Mapping[int, int]:
    return {plane: place for place, plane in enumerate(planes)}


def _scaled_widths(task: Task, budget: Budget) -> dict[Place, int]:
    """Every head its layer's share of its width, the common scale as large as the budget allows."""
    curves = width_curves(task.sensitivity, task.rules)
    last = LAST_LAYER_SHARE if task.policy == "linear" else 1.0
    shares = np.linspace(1.0, last, task.template.shape.n_layers)

    def at(scale: float) -> dict[Place, int]:
        return {place: _share(c, min(1.0, scale * shares[place[0]])) for place, c in curves.items()}

    def fits(scale: float) -> bool:
        return _within(_planned(task, at(scale)), budget, task.context)

    scale = largest_scale(fits, 1.0 / last)
    if scale is None:
        raise BudgetError(
            f"{budget} is less than the smallest allowed plan costs: raise the budget or lower "
            "the floors."
        )
    return at(scale)


def _share(curve: WidthCurve, share: float) -> int:
    """The widest allowed width within a share of the full one."""
    full = len(curve.values) - 1
    if share >= 1.0:
        return full
    least = min(full, -(-curve.floor // curve.multiple_of) * curve.multiple_of)
    whole = math.floor(share * full / curve.multiple_of + 1e-9) * curve.multiple_of
    return max(least, whole)


def _planned(task: Task, widths: dict[Place, int]) -> Plan:
    """The plan of these widths; its heads keep their most sensitive planes and their scale."""
    layers = []
    for i, layer in enumerate(task.template.layers):
        heads = []
        for j, head in enumerate(layer.heads):
            count = widths.get((i, j, "planes"), 0) // 2
            planes = sorted(_plane_ranking(task.sensitivity[i][j])[:count])
            change: dict[str, object] = {
                "qk_dim": 2 * len(planes) + widths.get((i, j, "free"), 0),
                "vo_dim": widths[i, j, "vo"],
                "rotary_planes": tuple((head.rotary_planes or ())[p] for p in planes),
            }
            heads.append(head.model_copy(update=change))
        layers.append(layer.model_copy(update={"heads": tuple(heads)}))
    origin = Origin(policy=task.policy)
    return task.template.model_copy(update={"layers": tuple(layers), "origin": origin})


def _within(plan: Plan, budget: Budget, context: int) -> bool:
    spent, dense = cost(plan, context), dense_cost(plan.shape, context)
    return all(getattr(spent, r) <= budget.amount(r, dense) for r in budget.limited)
