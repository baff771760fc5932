"""The fit of a plan to a profile: which widths lose least, under budgets or under a loss target.

A profile gives every direction of every head a *sensitivity*: half of it is the predicted rise of
the mean loss when the direction is dropped (a diagonal second-order model, so the halves add up).
A head has up to three parts, each cut on its own. Of each part the most valuable directions are
kept, so its value over its width is the running sum of the worths, sorted from large to small:
a concave curve, which the solver handles fastest.

    kept │      ╭────────     planes   rotary planes, two dimensions each
    value│   ╭──╯             free     query-key directions without positions
         │╭──╯                vo       value-output directions
         └──────────── width

The solver spends the budgets on these curves. The other policies choose the widths differently, for
comparison. Which directions a head of given width keeps is one rule for all: the most sensitive.

    sensitivity     the curves above
    energy          squared output and score carried by each direction; known to lose, since errors
                    of different layers do not compare
    saturation      each head's share of energy, weighted by the layer's measured Jacobian norm
    uniform         the same share of every head
    narrower-late   shares that fall linearly with depth, the last layer's half of the first's
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Float

from headwise.errors import BudgetError, PlanError, did_you_mean, quoted
from headwise.plan import Budget, Cost, HeadSpec, Limit, LossUnit, Origin, Plan, Resource
from headwise.planning.cost import SIDES, Side, cost, dense_cost, unit_cost, within_budget
from headwise.planning.rules import FIT_POLICIES, WidthRules
from headwise.planning.widths import Part, Place, WidthCurve, WidthSolver, largest_scale

LAST_LAYER_SHARE = 0.5  # narrower-late: of the first layer's share


@dataclass(frozen=True, eq=False)
class HeadWorth:
    """What the directions of one head group are worth; `qk_whole` forbids cutting queries and keys.

    The indices are those of the profile: planes in the order of the head's `rotary_planes`.
    """

    planes: Float[np.ndarray, " planes"]
    free: Float[np.ndarray, " free"]
    vo: Float[np.ndarray, " vo"]
    qk_whole: bool = False
    plane_order: tuple[int, ...] | None = None  # None: by its own worth

    @cached_property
    def plane_ranking(self) -> list[int]:
        """The planes in the order in which they are kept."""
        return ranking(self.planes) if self.plane_order is None else list(self.plane_order)

    @cached_property
    def least_free(self) -> list[float]:
        """The worth of the 0, 1, … least valuable position-free directions together."""
        return _running_sums(np.sort(self.free.astype(np.float64)))

    @cached_property
    def least_vo(self) -> list[float]:
        """The worth of the 0, 1, … least valuable value directions together."""
        return _running_sums(np.sort(self.vo.astype(np.float64)))


Worths = tuple[tuple[HeadWorth, ...], ...]  # layers, head groups


@dataclass(frozen=True, slots=True)
class Kept:
    """What one head group keeps, as ascending places in its lists of planes and directions.

    `planes` index the head's rotary planes, `free` its position-free query-key directions (all of
    them in a head without rotary positions), `vo` its value directions.
    """

    planes: Sequence[int]
    free: Sequence[int]
    vo: Sequence[int]


@dataclass(frozen=True, slots=True)
class Fit:
    """A plan, the rise of the mean loss it predicts, and how near to the policy's best it is."""

    plan: Plan
    loss_increase: float
    gap: float = 0.0  # at most this share of the value that the policy maximises is missing

    @property
    def exact(self) -> bool:
        """Whether no plan within the budget is better by the policy's measure."""
        return self.gap == 0.0

    @property
    def perplexity_ratio(self) -> float:
        """e to the rise of the loss."""
        return math.exp(self.loss_increase) if self.loss_increase < 709 else math.inf


@dataclass(frozen=True, eq=False)
class FitProblem:
    """The dense plan, the sensitivity of its directions, what the policy goes by, and the rules.

    Many budgets may be tried on one problem: what does not depend on the budget is prepared once.
    """

    template: Plan
    sensitivity: Worths
    rules: WidthRules
    policy: str = "sensitivity"
    worth: Worths | None = None  # None: the sensitivity itself
    loss_unit: LossUnit | None = None  # of what the sensitivities predict

    def __post_init__(self) -> None:
        if self.policy not in FIT_POLICIES:
            raise PlanError(
                f"unknown policy {quoted(self.policy)}. {did_you_mean(self.policy, FIT_POLICIES)}"
            )

    @property
    def context(self) -> int:
        """Tokens attended to, for FLOPs and traffic."""
        return self.rules.context or self.template.shape.context

    def cost(self, plan: Plan) -> Cost:
        """What a plan costs where the rules say it runs."""
        return cost(plan, self.context, self.rules.batch)

    @cached_property
    def dense(self) -> Cost:
        """What the uniform model costs, which shares refer to."""
        return dense_cost(self.template.shape, self.context, self.rules.batch)

    def unit_cost(self, layer: int, head: HeadSpec, side: Side) -> dict[Resource, int]:
        """What one more dimension of a head group costs."""
        return unit_cost(self.template, layer, head, side, self.context, batch=self.rules.batch)

    def allows(self, plan: Plan, budget: Budget) -> bool:
        """Whether a plan keeps every limit of a budget."""
        return within_budget(plan, budget, self.context, self.rules.batch)

    @cached_property
    def curves(self) -> dict[Place, WidthCurve]:
        """What the policy holds each width to be worth."""
        return width_curves(self.worth or self.sensitivity, self.rules)

    @cached_property
    def solver(self) -> WidthSolver:
        """The curves, ready for many budgets."""
        return WidthSolver(self.template, self.context, self.rules.batch, self.curves)


def fit(problem: FitProblem, budget: Budget) -> Fit:
    """The policy's best plan within the budget; no budget means 100% of attention parameters."""
    if not budget.limited:
        budget = Budget(attn_params=Limit(share=1.0))
    if problem.allows(problem.template, budget):
        # No limit binds: nothing is dropped, not even what the text never used.
        widths, gap = {place: len(c.values) - 1 for place, c in problem.curves.items()}, 0.0
    elif problem.policy in {"uniform", "narrower-late"}:
        widths, gap = _scaled_widths(problem, budget), 0.0
    else:
        widths, found = problem.solver.solve(budget)
        gap = found.gap
    plan = _plan(problem, widths)
    assert problem.allows(plan, budget), "a fit went over its budget"
    loss = predicted_loss(problem, plan)
    origin = Origin(policy=problem.policy, predicted_loss=loss, loss_unit=problem.loss_unit)
    return Fit(plan.model_copy(update={"origin": origin}), loss, gap)


def least_fit(problem: FitProblem, max_loss: float, resource: Resource, budget: Budget) -> Fit:
    """The plan of least `resource` whose predicted rise of the loss is at most `max_loss`.

    The best predicted loss falls as the budget grows, so the budget is bisected, down to the
    common divisor of what single dimensions cost.
    """
    full = problem.cost(problem.template).counted(resource)
    given = getattr(budget, resource)
    top = full if given is None else min(full, budget.amount(resource, problem.dense))
    units = {
        problem.unit_cost(i, head, side)[resource]
        for i, layer in enumerate(problem.template.layers)
        for head in layer.heads
        for side in SIDES
    }
    step = math.gcd(*units)
    if not step:
        raise BudgetError(
            f"no head width changes the {resource.replace('_', ' ')} of this model, so they cannot "
            "be minimised; choose another resource."
        )

    def at(amount: int) -> Fit:
        return fit(problem, budget.model_copy(update={resource: Limit(amount=max(1, amount))}))

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


def predicted_loss(problem: FitProblem, plan: Plan) -> float:
    """The predicted rise of the mean loss: ½ · Σ of the dropped sensitivities."""
    dropped = 0.0
    for i, layer in enumerate(problem.sensitivity):
        for j, worth in enumerate(layer):
            dense, head = problem.template.layers[i].heads[j], plan.layers[i].heads[j]
            kept = kept_planes(dense, head)
            gone = np.ones(len(worth.planes), dtype=bool)
            gone[kept] = False
            dropped += float(worth.planes[gone].sum())
            dropped += worth.least_free[len(worth.free) - (head.qk_dim - 2 * len(kept))]
            dropped += worth.least_vo[len(worth.vo) - head.vo_dim]
    return 0.5 * dropped


def kept_by_worth(worth: HeadWorth, dense: HeadSpec, head: HeadSpec) -> Kept:
    """What a cut head keeps of the dense one.

    The plan names the planes. Of the value directions the `vo_dim` most valuable are kept, and of
    the position-free ones as many as the planes leave of `qk_dim`; of equals the first.
    """
    planes = kept_planes(dense, head)
    free = most_valuable(worth.free, head.qk_dim - 2 * len(planes))
    return Kept(tuple(planes), tuple(free), tuple(most_valuable(worth.vo, head.vo_dim)))


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


def most_valuable(worth: Float[np.ndarray, " n"], count: int) -> list[int]:
    """The places of the `count` largest, ascending; of equals the first."""
    return sorted(ranking(worth)[:count])


def ranking(worth: Float[np.ndarray, " n"]) -> list[int]:
    """The places from most to least valuable; of equals the first comes first."""
    found: list[int] = np.argsort(-worth, kind="stable").tolist()
    return found


def width_curves(worths: Worths, rules: WidthRules) -> dict[Place, WidthCurve]:
    """One curve per part of every head, in dimensions."""
    return {
        (i, j, part): WidthCurve(
            values=_cumulative(_in_order(head, part), dims),
            floor=floor,
            multiple_of=math.lcm(rules.multiple_of, dims),
            tie=_tie(rules, i, part),
        )
        for i, layer in enumerate(worths)
        for j, head in enumerate(layer)
        for part, dims, floor in _parts(head, rules)
    }


def _parts(head: HeadWorth, rules: WidthRules) -> list[tuple[Part, int, int]]:
    """The parts a head has: name, dimensions per direction, least width."""
    planes, free, vo = 2 * len(head.planes), len(head.free), len(head.vo)
    pairs = math.lcm(rules.multiple_of, 2)
    # A partly rotated head keeps some planes; the rest of its floor lies on the free directions.
    planes_floor = planes if head.qk_whole else min(planes, pairs if free else rules.least)
    free_floor = free if head.qk_whole else min(free, max(0, rules.least - planes_floor))
    found: list[tuple[Part, int, int]] = [("vo", 1, min(vo, rules.least))]
    if planes:
        found.append(("planes", 2, planes_floor))
    if free:
        found.append(("free", 1, free_floor))
    return found


def _tie(rules: WidthRules, layer: int, part: Part) -> Hashable | None:
    one = "width" if rules.equal_sides else part
    ties: dict[str, Hashable | None] = {"head": None, "layer": (layer, one), "model": one}
    return ties[rules.granularity]


def _in_order(head: HeadWorth, part: Part) -> Float[np.ndarray, " n"]:
    """The worths of one part in the order in which its directions are kept."""
    worth: Float[np.ndarray, " n"] = getattr(head, part).astype(np.float64)
    if part == "planes" and head.plane_order is not None:
        return worth[head.plane_ranking]
    return np.sort(worth)[::-1]


def _cumulative(worth: Float[np.ndarray, " n"], dims: int) -> Float[np.ndarray, " options"]:
    """The value of 0, 1, … dimensions; a direction counts when its last dimension is there."""
    values = np.array(_running_sums(worth))
    return np.repeat(values, dims)[: dims * len(worth) + 1]


def _running_sums(values: Float[np.ndarray, " n"]) -> list[float]:
    """The sums of the first 0, 1, …, n values."""
    sums: list[float] = np.concatenate([[0.0], np.cumsum(values)]).tolist()
    return sums


def _scaled_widths(problem: FitProblem, budget: Budget) -> dict[Place, int]:
    """Every head its layer's share of its width, the common scale as large as the budget allows."""
    last = LAST_LAYER_SHARE if problem.policy == "narrower-late" else 1.0
    shares = np.linspace(1.0, last, problem.template.shape.n_layers)

    def at(scale: float) -> dict[Place, int]:
        return {
            place: _share(curve, min(1.0, scale * shares[place[0]]))
            for place, curve in problem.curves.items()
        }

    def fits(scale: float) -> bool:
        return problem.allows(_plan(problem, at(scale)), budget)

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


def _plan(problem: FitProblem, widths: dict[Place, int]) -> Plan:
    """The plan of these widths; its heads keep their most sensitive planes and their scale."""
    layers = []
    for i, layer in enumerate(problem.template.layers):
        heads = []
        for j, head in enumerate(layer.heads):
            count = widths.get((i, j, "planes"), 0) // 2
            planes = sorted(problem.sensitivity[i][j].plane_ranking[:count])
            change: dict[str, object] = {
                "qk_dim": 2 * len(planes) + widths.get((i, j, "free"), 0),
                "vo_dim": widths[i, j, "vo"],
                "rotary_planes": tuple((head.rotary_planes or ())[p] for p in planes),
            }
            heads.append(head.model_copy(update=change))
        layers.append(layer.model_copy(update={"heads": tuple(heads)}))
    return problem.template.model_copy(update={"layers": tuple(layers)})
