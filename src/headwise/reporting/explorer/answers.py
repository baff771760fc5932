"""The explorer's queries and answers: a choice of budgets becomes a plan of the solver.

The page holds the profiled model once (`model_facts`) and builds a plan file from it and from the
few numbers of an answer, so a live page and a saved one work alike.

A saved page holds the plans of a grid of budgets. In most models every dimension costs the same
parameters, bytes and operations up to a factor, so only the tightest of several limits matters: the
grid then needs one solve per level of each resource, not one per combination. (The solver
itself drops the other limits in the same way, so the plans are the same.) Limits whose costs are
not proportional are kept separately.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from headwise.artifacts import versions
from headwise.errors import BudgetError, HeadwiseError, did_you_mean, quoted
from headwise.plan import PLAN_FORMAT, RESOURCES, Budget, Cost, Limit, Plan, Resource
from headwise.planning.cost import SIDES, dense_cost, neuron_cost, unit_cost
from headwise.planning.fit import FitProblem, fit, neuron_curves, width_curves
from headwise.planning.portable import BY_LAYER, WIDTH, WIDTHS, fit_for, tied, ways_for
from headwise.planning.rules import GRANULARITIES, WidthRules, qk_weight
from headwise.planning.targets import runs_in
from headwise.planning.widths import side_of
from headwise.profiling.format import Profile
from headwise.profiling.worth import fit_problem
from headwise.progress import Progress, silent

BUDGETS: tuple[Resource, ...] = (
    "attn_params",
    "kv_bytes",
    "flops",
    "traffic",
    "params",
    "ffn_params",
)
MLPS = ("cut", "whole")  # what becomes of MLPs
LIVE_STEPS: dict[str, dict[Resource, float]] = {  # percent between positions of a slider
    "cut": dict.fromkeys(BUDGETS, 1) | {"flops": 0.5, "params": 0.5},
    "whole": {"attn_params": 1, "kv_bytes": 1, "flops": 0.5, "traffic": 1},
}
MULTIPLES = (1, 2, 4, 8, 16, 32, 64)
SAVED_MULTIPLES = (2, 8, 16)  # those that a saved page offers
LEAST_PERCENT = 20  # no slider goes below
CACHED = 256  # answers; a page that goes back and forth asks for the same ones
_SHOWN: tuple[str, ...] = RESOURCES
_DEFAULT = WidthRules()
CACHED_RULES = 32  # prepared problems; all that a page can ask for

Units = tuple[Mapping[Resource, int], ...]  # what a dimension of each kind of head costs


@dataclass(frozen=True, slots=True)
class Choice:
    """Percentages of the uniform dense model, and the rules; 100 percent is no limit."""

    percent: tuple[float, ...]  # in the order of BUDGETS; what is not given is not limited
    granularity: str = _DEFAULT.granularity
    multiple_of: int = _DEFAULT.multiple_of
    mlps: str = "whole"

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Choice:
        """The choice in the names and values of a query."""
        known = (*BUDGETS, "granularity", "multiple_of", "mlps")
        for name in query:
            if name not in known:
                raise HeadwiseError(f"unknown name {quoted(name)}. {did_you_mean(name, known)}")
        try:
            percent = tuple(float(query.get(name, "100")) for name in BUDGETS)
            multiple = int(query.get("multiple_of", _DEFAULT.multiple_of))
        except ValueError as error:
            raise HeadwiseError(
                f"budgets and the multiple must be numbers ({quoted(error)})."
            ) from None
        if not all(0 < x <= 100 for x in percent):
            shown = [f"{x:g}" for x in percent]
            raise HeadwiseError(f"budgets must be above 0 and up to 100 percent, got {shown}.")
        mlps = query.get("mlps", "whole")
        if mlps not in MLPS:
            raise HeadwiseError(f"unknown value {quoted(mlps)} of mlps. {did_you_mean(mlps, MLPS)}")
        return cls(percent, query.get("granularity", _DEFAULT.granularity), multiple, mlps)

    @property
    def limits(self) -> dict[Resource, Limit]:
        """The limits; without any, 100% of the attention parameters."""
        given = zip(BUDGETS, self.percent, strict=False)
        found = {name: Limit.parse(f"{x:g}%") for name, x in given if x < 100}
        return found or {"attn_params": Limit.parse("100%")}

    @property
    def budget(self) -> Budget:
        """The limits as the solver takes them."""
        given: dict[str, Limit] = {str(name): limit for name, limit in self.limits.items()}
        return Budget(**given)


class Answers:
    """A profile, ready to answer choices for plans that run at one context and batch.

    With `targets`, engines that must run the plans, widths are tied as they need. `weight` is that
    of queries and keys.
    """

    def __init__(
        self,
        profile: Profile,
        context: int | None = None,
        batch: int = 1,
        targets: tuple[str, ...] = (),
        weight: float | None = None,
    ) -> None:
        self.profile, self.context, self.batch = profile, context, batch
        self.weight = qk_weight(weight, recovered=profile.record.recoverable)
        self.told_weight = weight
        self.targets, ways = targets, ways_for(targets)
        # Ways that tie widths do not ask how wide heads may be.
        self.granularities = (_DEFAULT.granularity,) if ways else GRANULARITIES
        self.dense: Cost = dense_cost(profile.plan.shape, context, batch)  # of percentages
        self._problem = fit_problem(profile, "sensitivity", _DEFAULT)
        self.mlps = MLPS if self._problem.neurons is not None else ("whole",)
        self._sensitivity = self._problem.sensitivity
        # All ways that name planes name them in one order.
        named = next((way for way in ways if way in (BY_LAYER, WIDTHS, WIDTH)), None)
        self.ranked = self._sensitivity if named is None else named.worths(self._sensitivity)
        self.tied = lru_cache(maxsize=4 * CACHED_RULES)(tied)
        self.task = lru_cache(maxsize=CACHED_RULES)(self._task)
        self.answer = lru_cache(maxsize=CACHED)(self._answer)
        self.least_cost = lru_cache(maxsize=CACHED)(self._least_cost)

    def _task(self, rules: WidthRules) -> FitProblem:
        """What the solver is given; one for all budgets, so that it is prepared once."""
        return replace(self._problem, rules=rules)

    def rules(self, choice: Choice) -> WidthRules:
        """The rules of a choice, as `headwise plan fit` takes them."""
        return WidthRules(
            choice.granularity,
            choice.multiple_of,
            context=self.context,
            batch=self.batch,
            cut_ffn=choice.mlps == "cut",
            qk_weight=self.weight,
        )

    def _answer(self, choice: Choice) -> dict[str, Any]:
        task = self.task(self.rules(choice))
        budget = choice.budget
        found = fit_for(task, self.targets, lambda one: fit(one, budget), tie=self.tied)
        return {
            **_by_group(found.plan, self.profile.plan),
            "cost": task.cost(found.plan).model_dump(include=set(_SHOWN)),
            "loss": found.loss_increase,
            "exact": found.exact,
            "notes": list(found.plan.origin.notes),
            "engines": [
                {"target": one.target, "runs": one.yes, "why": one.how or one.why_not}
                for one in runs_in(found.plan)
            ],
        }

    def _least_cost(self, rules: WidthRules) -> dict[Resource, int]:
        """What the narrowest allowed plan costs."""
        task = self.task(rules)
        plan, full = task.template, task.cost(task.template)
        least: dict[Resource, int] = {r: full.counted(r) for r in BUDGETS}
        for (i, j, part), curve in width_curves(self._sensitivity, rules).items():
            width = len(curve.values) - 1
            narrow = min(width, math.ceil(curve.floor / curve.multiple_of) * curve.multiple_of)
            if task.drops_groups:
                narrow = 0
            unit = task.unit_cost(i, plan.layers[i].heads[j], side_of(part))
            for r in BUDGETS:
                least[r] -= (width - narrow) * unit[r]
        if rules.cut_ffn and task.neurons is not None:
            unit = neuron_cost(plan.shape)
            for curve in neuron_curves(task.neurons, rules).values():
                width, step = len(curve.values) - 1, curve.multiple_of
                narrow = min(width, math.ceil(curve.floor / step) * step)
                for r in BUDGETS:
                    least[r] -= (width - narrow) * unit[r]
        return least

    @property
    def multiples(self) -> tuple[int, ...]:
        """The multiples worth offering: those that leave the widest head a choice."""
        widest = max(
            max(head.qk_dim, head.vo_dim)
            for layer in self.profile.plan.layers
            for head in layer.heads
        )
        return tuple(m for m in MULTIPLES if 2 * m <= widest) or (1,)


def levels(
    answers: Answers, steps: Mapping[Resource, float], mlps: str = "whole"
) -> dict[str, list[float]]:
    """The positions of each slider, from the narrowest plan's share up to 100 percent.

    A resource that no width changes (an encoder caches nothing) has none.
    """
    finest = Choice((100.0,) * len(BUDGETS), "head", min(answers.multiples), mlps)
    least = answers.least_cost(answers.rules(finest))
    found: dict[str, list[float]] = {}
    for name, step in steps.items():
        dense = answers.dense.counted(name)
        if not dense or least[name] == dense:
            continue
        lowest = max(100 * least[name] / dense, LEAST_PERCENT)
        count = math.floor((100 - lowest) / step + 1e-9)
        found[name] = [round(100 - step * k, 6) for k in range(count, -1, -1)]
    return found


def model_facts(answers: Answers, where: str) -> dict[str, Any]:
    """The page's data about the model: names, dense plan and costs, the order of its planes."""
    profile, record = answers.profile, answers.profile.record
    return {
        "profile": where,
        "profile_sha256": profile.sha256,
        "model": record.model,
        "text": record.text.source,
        "option": "--images" if record.of_images else "--text",
        "objective": record.objective,
        "unit": record.unit,
        "loss": record.loss,
        "tokens": record.tokens,
        "notes": list(record.notes),
        "versions": dict(versions()),
        "plan": {"format": PLAN_FORMAT, **profile.plan.to_dict()},
        "dense": answers.dense.model_dump(),
        "context": answers.context,
        "qk_weight": answers.weight,
        "told_qk_weight": answers.told_weight,
        "granularities": list(answers.granularities),
        "mlps": list(answers.mlps),
        "targets": list(answers.targets),
        "multiples": list(answers.multiples),
        "plane_order": [[head.plane_ranking for head in layer] for layer in answers.ranked],
    }


def _by_group(plan: Plan, dense: Plan) -> dict[str, Any]:
    """Widths and planes of the dense model's head groups, 0 where one is gone, and their order."""
    found: dict[str, Any] = {"qk": [], "vo": [], "planes": [], "order": {}}
    found["ffn"] = list(plan.ffn_dims)
    for i, (layer, whole) in enumerate(zip(plan.layers, dense.layers, strict=True)):
        heads = [layer.by_source.get(j) for j in range(len(whole.heads))]
        found["qk"].append([head.qk_dim if head else 0 for head in heads])
        found["vo"].append([head.vo_dim if head else 0 for head in heads])
        found["planes"].append([len(head.rotary_planes or ()) if head else 0 for head in heads])
        if layer.sources != tuple(range(len(whole.heads))):
            found["order"][str(i)] = list(layer.sources)
    return found


def saved_grid(answers: Answers, step: float, progress: Progress = silent) -> dict[str, Any]:
    """Levels, distinct plans, and for each point of the grid the number of its plan (or −1).

    Of the limits that count MLPs, a saved page has the one on all parameters; with the others,
    which are not proportional to it, the grid would be too large.
    """
    coarse = 2 * step  # the grid is their product
    steps: dict[str, dict[Resource, float]] = {
        "cut": {"params": step, "kv_bytes": coarse},
        "whole": {"attn_params": step, "kv_bytes": coarse, "flops": coarse, "traffic": coarse},
    }
    found = {mlps: levels(answers, steps[mlps], mlps) for mlps in answers.mlps}
    multiples = [m for m in answers.multiples if m in SAVED_MULTIPLES] or [answers.multiples[0]]
    rules = list(itertools.product(answers.granularities, multiples))
    points = {
        mlps: list(itertools.product(*(found[mlps].get(name, [100.0]) for name in BUDGETS)))
        for mlps in answers.mlps
    }
    book, done = _Book(answers), 0
    total = len(rules) * sum(len(x) for x in points.values())
    index: dict[str, list[int]] = {}
    for mlps in answers.mlps:
        units = unit_costs(answers, mlps)
        for granularity, multiple in rules:
            numbers: list[int] = []
            for percent in points[mlps]:
                choice = Choice(percent, granularity, multiple, mlps)
                numbers.append(book.number(tightest(answers, choice, units)))
                done += 1
                progress("solving", done, total)
            index[f"{mlps} {granularity} {multiple}"] = numbers
    return {"levels": found, "multiples": multiples, "plans": book.plans, "index": index}


def tightest(answers: Answers, choice: Choice, units: Units) -> Choice:
    """The choice without the limits that another one, of proportional costs, implies."""
    limits = choice.limits
    if len(limits) < 2:
        return choice
    budget, least = choice.budget, answers.least_cost(answers.rules(choice))
    room = {r: budget.amount(r, answers.dense) - least[r] for r in limits}
    left = list(limits)
    for r in reversed(list(limits)):
        others = [s for s in left if s != r and _proportional(units, r, s)]
        if any(units[0][r] * room[s] <= units[0][s] * room[r] for s in others):
            left.remove(r)
    percent = tuple(
        x if name in left else 100.0 for name, x in zip(BUDGETS, choice.percent, strict=False)
    )
    return replace(choice, percent=percent)


def unit_costs(answers: Answers, mlps: str = "whole") -> Units:
    """What a dimension or neuron costs in each resource: the different answers over the model."""
    plan = answers.profile.plan
    found = [
        unit_cost(plan, i, head, side, answers.dense.context, batch=answers.batch)
        for i, layer in enumerate(plan.layers)
        for head in dict.fromkeys(layer.heads)
        for side in SIDES
    ]
    if mlps == "cut":
        found.append(neuron_cost(plan.shape))
    return tuple({tuple(unit.items()): unit for unit in found}.values())


def _proportional(units: Units, r: Resource, s: Resource) -> bool:
    first = units[0]
    return all(unit[r] * first[s] == unit[s] * first[r] for unit in units)


class _Book:
    """The distinct plans met so far, numbered."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.plans: list[dict[str, Any]] = []
        self._widths: dict[str, int] = {}
        self._choices: dict[Choice, int] = {}

    def number(self, choice: Choice) -> int:
        """The number of the choice's plan; −1 if there is none."""
        if choice not in self._choices:
            try:
                answer = self.answers.answer(choice)
            except BudgetError:
                self._choices[choice] = -1
                return -1
            key = repr(
                (answer["qk"], answer["vo"], answer["planes"], answer["order"], answer["ffn"])
            )
            if key not in self._widths:
                self._widths[key] = len(self.plans)
                self.plans.append(answer)
            self._choices[choice] = self._widths[key]
        return self._choices[choice]
