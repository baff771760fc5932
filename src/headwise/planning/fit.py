"""The fit of a plan to a profile: which widths lose least, under budgets or under a loss target.

A profile gives every direction of every head a *sensitivity*: half of it is the predicted increase
of the mean loss when the direction is dropped (a diagonal second-order model, so the halves add).
A head has up to three parts, each cut separately. In each part the most valuable directions are
kept, so its value over its width is the running sum of the worths, sorted from large to small:
a concave curve, which the solver handles fastest.

    kept │      ╭────────     planes   rotary planes, two dimensions each
    value│   ╭──╯             free     query-key directions without positions
         │╭──╯                vo       value-output directions
         └──────────── width

An MLP has one more curve, over its neurons, with a sensitivity for each. It is cut if a limit
counts it; limits on attention parameters and cached bytes do not change MLPs.

The solver spends the budgets on these curves. The other policies choose the widths differently, for
comparison. With every policy a head of given width keeps its most sensitive directions.

    sensitivity     the curves above
    energy          squared output and score carried by each direction; known to lose, since errors
                    of different layers are not comparable
    saturation      each head's share of energy, weighted by the layer's measured Jacobian norm
    uniform         the same share of every head
    narrower-late   shares that fall linearly with depth, the last layer's half of the first's
    wider-late      the reverse
    random          random shares, `random:7` with another seed
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Float

from headwise.errors import BudgetError, PlanError
from headwise.plan import Budget, Cost, HeadSpec, Limit, LossUnit, Origin, Plan, Resource
from headwise.planning.cost import (
    SIDES,
    Side,
    cost,
    dense_cost,
    neuron_cost,
    unit_cost,
    within_budget,
)
from headwise.planning.groups import GroupSolver
from headwise.planning.rules import WidthRules, policy_and_seed
from headwise.planning.widths import (
    Part,
    Place,
    WidthCosts,
    WidthCurve,
    WidthSolver,
    largest_scale,
    mlp_place,
)

SCALED = ("uniform", "narrower-late", "wider-late", "random")  # by shares, not by the solver
COUNT_MLPS: tuple[Resource, ...] = ("ffn_params", "block_params", "params", "flops", "traffic")
UNMEASURED = "MLPs stay whole: the profile has not measured their neurons"
LEAST_SHARE = 0.5  # of the largest: what the narrowest layer gets where shares differ


@dataclass(frozen=True, eq=False)
class HeadWorth:
    """What the directions of one head group are worth; `qk_whole` forbids cutting queries and keys.

    The indices are those of the profile: planes in the order of the head's `rotary_planes`.
    `whole_vo` is the loss of dropping all values together (queries and keys then add nothing);
    None: the sum of the values' worths.
    """

    planes: Float[np.ndarray, " planes"]
    free: Float[np.ndarray, " free"]
    vo: Float[np.ndarray, " vo"]
    qk_whole: bool = False
    plane_order: tuple[int, ...] | None = None  # None: by its own worth
    whole_vo: float | None = None

    @cached_property
    def whole(self) -> float:
        """The loss of dropping the whole group."""
        return float(self.vo.sum()) if self.whole_vo is None else self.whole_vo

    @cached_property
    def total(self) -> float:
        """The worths of all its directions."""
        return float(self.planes.sum() + self.free.sum() + self.vo.sum())

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
    """What one head group keeps, as ascending indices into its lists of planes and directions.

    `planes` index the head's rotary planes, `free` its position-free query-key directions (all of
    them in a head without rotary positions), `vo` its value directions.
    """

    planes: Sequence[int]
    free: Sequence[int]
    vo: Sequence[int]


@dataclass(frozen=True, slots=True)
class Fit:
    """A plan, the predicted loss increase, and how close to the policy's optimum it is."""

    plan: Plan
    loss_increase: float
    gap: float = 0.0  # at most this share of the value that the policy maximises is missing

    @property
    def exact(self) -> bool:
        """Whether no plan within the budget is better by the policy's measure."""
        return self.gap == 0.0

    @property
    def perplexity_ratio(self) -> float:
        """e to the loss increase."""
        return math.exp(self.loss_increase) if self.loss_increase < 709 else math.inf


@dataclass(frozen=True, eq=False)
class FitProblem:
    """The dense plan, the sensitivity of its directions, the policy's worths, and the rules.

    Many budgets can be tried on one problem: work that does not depend on the budget is done once.
    """

    template: Plan
    sensitivity: Worths
    rules: WidthRules
    policy: str = "sensitivity"
    worth: Worths | None = None  # None: the sensitivity, by the rules' weights
    loss_unit: LossUnit | None = None  # of what the sensitivities predict
    fixed_groups: bool = False  # no group may go or change its place
    # The sensitivity of every neuron of every MLP, None: not measured; what the policy goes by.
    neurons: tuple[Float[np.ndarray, " _"], ...] | None = None
    neuron_worth: tuple[Float[np.ndarray, " _"], ...] | None = None

    def __post_init__(self) -> None:
        policy_and_seed(self.policy)

    @property
    def context(self) -> int:
        """Tokens attended to, for FLOPs and traffic."""
        return self.rules.context or self.template.shape.context

    def cost(self, plan: Plan) -> Cost:
        """What a plan costs at the batch and context of the rules."""
        return cost(plan, self.context, self.rules.batch)

    @cached_property
    def dense(self) -> Cost:
        """What the uniform model costs, which shares refer to."""
        return dense_cost(self.template.shape, self.context, self.rules.batch)

    def unit_cost(self, layer: int, head: HeadSpec, side: Side) -> dict[Resource, int]:
        """What one more dimension of a head group costs."""
        return unit_cost(self.template, layer, head, side, self.context, batch=self.rules.batch)

    def allows(self, plan: Plan, budget: Budget) -> bool:
        """Whether a plan meets every limit of a budget."""
        return within_budget(plan, budget, self.context, self.rules.batch)

    @cached_property
    def weighted(self) -> Worths:
        """The sensitivities, of queries and keys by their weight in the rules."""
        weight = self.rules.qk_weight
        if weight == 1:
            return self.sensitivity

        def less(head: HeadWorth) -> HeadWorth:
            return replace(head, planes=weight * head.planes, free=weight * head.free)

        return tuple(tuple(less(head) for head in layer) for layer in self.sensitivity)

    @property
    def valued(self) -> Worths:
        """What the policy goes by."""
        return self.worth or self.weighted

    @cached_property
    def curves(self) -> dict[Place, WidthCurve]:
        """The policy's value of each width; MLPs after the heads."""
        heads = width_curves(self.valued, self.rules)
        if self.neurons is None or not self.rules.cut_ffn:
            return heads
        return heads | neuron_curves(self.neuron_worth or self.neurons, self.rules)

    def for_budget(self, limited: Sequence[Resource]) -> FitProblem:
        """The problem under limits on these resources: MLPs are whole if none counts them."""
        return self if any(r in COUNT_MLPS for r in limited) else self._whole_mlps

    @cached_property
    def _whole_mlps(self) -> FitProblem:
        return replace(self, rules=replace(self.rules, cut_ffn=False))

    @cached_property
    def solver(self) -> WidthSolver | GroupSolver:
        """The curves, ready for many budgets."""
        costs = WidthCosts(self.template, self.context, self.rules.batch, self.curves)
        most = {"layer": 1, "head": self.rules.max_classes}.get(self.rules.granularity)
        most = None if self.fixed_groups and most != 1 else most
        drops = self.drops_groups
        if not drops and (most is None or self.rules.granularity == "layer"):
            return WidthSolver(costs, self.curves)
        remains = {
            (i, j): head.total - head.whole
            for i, layer in enumerate(self.valued)
            for j, head in enumerate(layer)
            if drops
        }
        return GroupSolver(costs, self.curves, remains=remains, most=most)

    @property
    def drops_groups(self) -> bool:
        """Whether whole head groups may be dropped."""
        rules = self.rules
        tied = rules.granularity == "model" or rules.equal_sides
        return rules.drop_groups and not tied and not self.fixed_groups


def fit(problem: FitProblem, budget: Budget) -> Fit:
    """The policy's best plan within the budget; without one, 100% of the attention parameters."""
    if not budget.limited:
        budget = Budget(attn_params=Limit(share=1.0))
    problem = problem.for_budget(budget.limited)
    _refuse_unmeasured(problem, budget)
    if problem.allows(problem.template, budget):
        # No limit binds: nothing is dropped, not even what the text never used.
        widths, gap = {place: len(c.values) - 1 for place, c in problem.curves.items()}, 0.0
    elif policy_and_seed(problem.policy)[0] in SCALED:
        widths, gap = _scaled_widths(problem, budget), 0.0
    else:
        found = problem.solver.solve(budget)
        widths, gap = found.of, found.gap
    plan = _plan(problem, widths)
    assert problem.allows(plan, budget), "a fit went over its budget"
    loss = predicted_loss(problem, plan)
    notes = (UNMEASURED,) if problem.neurons is None and problem.rules.cut_ffn else ()
    weight = problem.rules.qk_weight if problem.policy == "sensitivity" else 1.0
    origin = Origin(
        policy=problem.policy,
        predicted_loss=loss,
        loss_unit=problem.loss_unit,
        qk_weight=None if weight == 1 else weight,
        notes=notes,
    )
    return Fit(plan.model_copy(update={"origin": origin}), loss, gap)


def least_fit(problem: FitProblem, max_loss: float, resource: Resource, budget: Budget) -> Fit:
    """The plan that minimises `resource` with a predicted loss increase of at most `max_loss`.

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
    if problem.neurons is not None and problem.rules.cut_ffn:
        units.add(neuron_cost(problem.template.shape)[resource])
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
    """The predicted increase of the mean loss: ½ · Σ of the dropped sensitivities."""
    return _dropped(problem, problem.sensitivity, plan)


def weighted_loss(problem: FitProblem, plan: Plan) -> float:
    """The same with queries and keys by their weight, by which plans are compared."""
    return _dropped(problem, problem.weighted, plan)


def _dropped(problem: FitProblem, worths: Worths, plan: Plan) -> float:
    dropped = 0.0
    for i, layer in enumerate(worths):
        cut = plan.layers[i].by_source
        for j, worth in enumerate(layer):
            dense, head = problem.template.layers[i].heads[j], cut.get(j)
            if head is None:
                dropped += worth.whole
                continue
            kept = kept_planes(dense, head)
            gone = np.ones(len(worth.planes), dtype=bool)
            gone[kept] = False
            dropped += float(worth.planes[gone].sum())
            dropped += worth.least_free[len(worth.free) - (head.qk_dim - 2 * len(kept))]
            dropped += worth.least_vo[len(worth.vo) - head.vo_dim]
    for i, neurons in enumerate(problem.neurons or ()):
        narrower = max(0, len(neurons) - plan.ffn_dims[i])
        dropped += float(np.sort(neurons)[:narrower].sum())
    return 0.5 * dropped


def kept_by_worth(worth: HeadWorth, dense: HeadSpec, head: HeadSpec) -> Kept:
    """What a cut head keeps of the dense one.

    The plan lists the planes. The `vo_dim` most valuable value directions are kept, and as many
    position-free ones as the planes leave of `qk_dim`; among equals the first.
    """
    planes = kept_planes(dense, head)
    free = most_valuable(worth.free, head.qk_dim - 2 * len(planes))
    return Kept(tuple(planes), tuple(free), tuple(most_valuable(worth.vo, head.vo_dim)))


def kept_planes(dense: HeadSpec, head: HeadSpec) -> list[int]:
    """Which of the dense head's planes a cut head keeps, as indices into the dense head's list."""
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
    """The indices of the `count` largest, ascending; among equals the first."""
    return sorted(ranking(worth)[:count])


def ranking(worth: Float[np.ndarray, " n"]) -> list[int]:
    """The indices from most to least valuable; among equals the first comes first."""
    found: list[int] = np.argsort(-worth, kind="stable").tolist()
    return found


def width_curves(worths: Worths, rules: WidthRules) -> dict[Place, WidthCurve]:
    """One curve per part of every head, in dimensions."""
    found = {
        (i, j, part): WidthCurve(
            values=_cumulative(_in_order(head, part), dims),
            floor=floor,
            multiple_of=math.lcm(rules.multiple_of, dims),
            tie=_tie(rules, i, part),
            only=rules.widths,
        )
        for i, layer in enumerate(worths)
        for j, head in enumerate(layer)
        for part, dims, floor in _parts(head, rules)
    }
    for (i, _, part), curve in found.items() if rules.widths is not None else ():
        if not len(curve.allowed):
            side = "values" if part == "vo" else "queries and keys"
            listed = ", ".join(map(str, rules.widths or ()))
            raise BudgetError(
                f"the {side} of layer {i} may be {curve.floor} to {len(curve.values) - 1} wide, "
                f"and there are kernels for {listed}."
            )
    return found


def neuron_curves(
    worths: Sequence[Float[np.ndarray, " _"]], rules: WidthRules
) -> dict[Place, WidthCurve]:
    """One curve per MLP, in neurons."""
    return {
        mlp_place(i): WidthCurve(
            values=_cumulative(np.sort(worth.astype(np.float64))[::-1], 1),
            floor=min(len(worth), rules.least_ffn),
            multiple_of=rules.ffn_multiple_of,
            tie="ffn" if rules.ties_ffn else None,
        )
        for i, worth in enumerate(worths)
    }


def _refuse_unmeasured(problem: FitProblem, budget: Budget) -> None:
    if budget.ffn_params is None or (problem.neurons is not None and problem.rules.cut_ffn):
        return
    reason = (
        "but the profile has not measured their neurons; make the profile again"
        if problem.rules.cut_ffn
        else "but --no-cut-ffn leaves them whole; leave one of them out"
    )
    raise BudgetError(f"--ffn-params limits MLPs, {reason}.")


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
    """Give every head its share of its width, with the largest common scale the budget allows.

    Budget left by rounding goes to the heads that lost most to it, unless all shares are equal.
    """
    shares = _shares(problem)

    def at(scale: float) -> dict[Place, int]:
        return {
            place: _share(curve, min(1.0, scale * shares[place]))
            for place, curve in problem.curves.items()
        }

    def fits(scale: float) -> bool:
        return problem.allows(_plan(problem, at(scale)), budget)

    scale = largest_scale(fits, 1.0 / min(shares.values()))
    if scale is None:
        raise BudgetError(
            f"{budget} is less than the smallest allowed plan costs: raise the budget or lower "
            "the minimum widths."
        )
    if problem.policy == "uniform":
        return at(scale)
    wanted = {
        place: min(1.0, scale * shares[place]) * (len(curve.values) - 1)
        for place, curve in problem.curves.items()
    }
    return _filled(problem, budget, at(scale), wanted)


def _shares(problem: FitProblem) -> dict[Place, float]:
    """The policy's share of each part, relative to the others."""
    name, seed = policy_and_seed(problem.policy)
    n_layers = problem.template.shape.n_layers
    by_depth = {
        "uniform": np.ones(n_layers),
        "narrower-late": np.linspace(1.0, LEAST_SHARE, n_layers),
        "wider-late": np.linspace(LEAST_SHARE, 1.0, n_layers),
    }
    if name in by_depth:
        return {place: float(by_depth[name][place[0]]) for place in problem.curves}
    rng = np.random.default_rng(seed)
    drawn: dict[Hashable, float] = {}  # tied parts have one share
    return {
        place: drawn.setdefault(
            place if curve.tie is None else curve.tie, float(rng.uniform(LEAST_SHARE, 1.0))
        )
        for place, curve in problem.curves.items()
    }


def _filled(
    problem: FitProblem, budget: Budget, widths: dict[Place, int], wanted: dict[Place, float]
) -> dict[Place, int]:
    """Widen by steps, where most is missing first, as long as the budget allows."""
    tied: dict[Hashable, list[Place]] = {}
    for place, curve in problem.curves.items():
        tied.setdefault(place if curve.tie is None else ("tie", curve.tie), []).append(place)
    open_ties = list(tied.values())
    while open_ties:
        places = max(open_ties, key=lambda group: wanted[group[0]] - widths[group[0]])
        wider = dict(widths)
        for place in places:
            allowed = problem.curves[place].allowed
            wider[place] = int(allowed[allowed > widths[place]].min(initial=allowed[-1]))
        if wider != widths and problem.allows(_plan(problem, wider), budget):
            widths = wider
        else:
            open_ties.remove(places)
    return widths


def _share(curve: WidthCurve, share: float) -> int:
    """The widest allowed width within a share of the full one."""
    allowed = curve.allowed
    within = allowed[allowed <= share * (len(curve.values) - 1) + 1e-9]
    return int(within[-1] if len(within) else allowed[0])


def _plan(problem: FitProblem, widths: dict[Place, int]) -> Plan:
    """The plan of these widths; its heads keep their most sensitive planes and their scale.

    A group of width 0 is dropped. The others are sorted by width, widest first, where that makes
    fewer classes.
    """
    layers = []
    for i, layer in enumerate(problem.template.layers):
        heads: list[HeadSpec] = []
        for j, head in enumerate(layer.heads):
            if not widths[i, j, "vo"]:
                continue
            count = widths.get((i, j, "planes"), 0) // 2
            planes = sorted(problem.sensitivity[i][j].plane_ranking[:count])
            change: dict[str, object] = {
                "qk_dim": 2 * len(planes) + widths.get((i, j, "free"), 0),
                "vo_dim": widths[i, j, "vo"],
                "rotary_planes": tuple((head.rotary_planes or ())[p] for p in planes),
                "source": j,
            }
            heads.append(head.model_copy(update=change))
        if not problem.fixed_groups:
            heads = _side_by_side(heads)
        if [head.source for head in heads] == list(range(len(heads))):  # each at its own place
            heads = [head.model_copy(update={"source": None}) for head in heads]
        ffn_dim = widths.get(mlp_place(i), layer.ffn_dim)
        layers.append(layer.model_copy(update={"heads": tuple(heads), "ffn_dim": ffn_dim}))
    return problem.template.model_copy(update={"layers": tuple(layers)})


def _class(head: HeadSpec) -> tuple[int, int, int, int]:
    """Heads that agree in this may run in one call."""
    return head.qk_dim, head.vo_dim, head.queries, len(head.rotary_planes or ())


def _side_by_side(heads: list[HeadSpec]) -> list[HeadSpec]:
    """The heads with those of one class adjacent; unchanged if they already are."""
    runs = sum(1 for _ in itertools.groupby(heads, _class))
    if runs == len(set(map(_class, heads))):
        return heads
    return sorted(heads, key=_class, reverse=True)
