"""What the explorer's page asks and is told: a choice of budgets becomes a plan of the one solver.

The page holds the profiled model once (`model_facts`) and builds a plan file out of it and of the
few numbers of an answer, so a live page and a saved one work alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from headwise.artifacts import versions
from headwise.errors import HeadwiseError, did_you_mean
from headwise.plan import PLAN_FORMAT, Budget, Cost, Limit, Plan, Resource
from headwise.planning.cost import cost, dense_cost, unit_cost
from headwise.planning.fit import Task, fit
from headwise.planning.widths import side_of
from headwise.planning.worth_curves import GRANULARITIES, FitRules, ranking, width_curves
from headwise.profile.format import Profile
from headwise.profile.worth import worths

BUDGETS: tuple[Resource, ...] = ("attn_params", "kv_bytes", "flops")
MULTIPLES = (1, 2, 4, 8, 16, 32, 64)
LEAST_PERCENT = 20  # no slider goes below
CACHED = 256  # answers; a page that goes back and forth asks for the same ones


@dataclass(frozen=True, slots=True)
class Choice:
    """Percentages of the uniform dense model, and the rules; 100 percent is no limit."""

    percent: tuple[float, float, float]  # in the order of BUDGETS
    granularity: str = "head"
    multiple_of: int = 8

    @classmethod
    def parse(cls, words: Mapping[str, str]) -> Choice:
        """The choice in the words of a query."""
        known = (*BUDGETS, "granularity", "multiple_of")
        for name in words:
            if name not in known:
                raise HeadwiseError(f"unknown word {name!r}. {did_you_mean(name, known)}")
        try:
            percent = [float(words.get(name, "100")) for name in BUDGETS]
            multiple = int(words.get("multiple_of", "8"))
        except ValueError as error:
            raise HeadwiseError(f"budgets and the multiple must be numbers ({error}).") from None
        if not all(0 < x <= 100 for x in percent):
            raise HeadwiseError(f"budgets must be above 0 and up to 100 percent, got {percent}.")
        first, second, third = percent
        return cls((first, second, third), words.get("granularity", "head"), multiple)

    @property
    def rules(self) -> FitRules:
        """The rules, as `headwise plan fit` takes them."""
        return FitRules(self.granularity, self.multiple_of)

    @property
    def limits(self) -> dict[Resource, Limit]:
        """What is limited; with nothing limited, all attention parameters."""
        given = zip(BUDGETS, self.percent, strict=True)
        found = {name: Limit.parse(f"{x:g}%") for name, x in given if x < 100}
        return found or {"attn_params": Limit.parse("100%")}

    @property
    def budget(self) -> Budget:
        """The limits as the solver takes them."""
        given: dict[str, Limit] = {str(name): limit for name, limit in self.limits.items()}
        return Budget(**given)


class Answers:
    """A profile, ready to answer choices."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.dense: Cost = dense_cost(profile.plan.shape)  # what percentages refer to
        self._sensitivity = worths(profile, "sensitivity")
        self.task = lru_cache(maxsize=None)(self._task)
        self.answer = lru_cache(maxsize=CACHED)(self._answer)
        self.least_cost = lru_cache(maxsize=CACHED)(self._least_cost)

    def _task(self, rules: FitRules) -> Task:
        """What the solver is given; one for all budgets, so that it is prepared once."""
        return Task(self.profile.plan, self._sensitivity, rules)

    def _answer(self, choice: Choice) -> dict[str, Any]:
        task = self.task(choice.rules)
        found = fit(task, choice.budget)
        return {
            "qk": [[head.qk_dim for head in layer.heads] for layer in found.plan.layers],
            "vo": [[head.vo_dim for head in layer.heads] for layer in found.plan.layers],
            "planes": _plane_counts(found.plan),
            "cost": cost(found.plan).model_dump(exclude={"context"}),
            "loss": found.loss_increase,
            "exact": found.exact,
        }

    def _least_cost(self, rules: FitRules) -> dict[Resource, int]:
        """What the narrowest allowed plan costs."""
        task = self.task(rules)
        plan, full = task.template, cost(task.template)
        least: dict[Resource, int] = {r: getattr(full, r) for r in BUDGETS}
        for (i, j, part), curve in width_curves(self._sensitivity, rules).items():
            width = len(curve.values) - 1
            narrow = min(width, math.ceil(curve.floor / curve.multiple_of) * curve.multiple_of)
            unit = unit_cost(plan, i, plan.layers[i].heads[j], side_of(part), task.context)
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


def levels(answers: Answers, steps: Mapping[Resource, float]) -> dict[str, list[float]]:
    """The positions of each slider, from the narrowest plan's share up to 100 percent.

    A resource that no width changes (an encoder caches nothing) has none.
    """
    least = answers.least_cost(FitRules(multiple_of=min(answers.multiples)))
    found: dict[str, list[float]] = {}
    for name in BUDGETS:
        dense, step = getattr(answers.dense, name), steps[name]
        if not dense or least[name] == dense:
            continue
        lowest = max(100 * least[name] / dense, LEAST_PERCENT)
        count = math.floor((100 - lowest) / step + 1e-9)
        found[name] = [round(100 - step * k, 6) for k in range(count, -1, -1)]
    return found


def model_facts(answers: Answers, where: str) -> dict[str, Any]:
    """What the page knows of the model: names, dense plan and costs, the order of its planes."""
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
        "granularities": list(GRANULARITIES),
        "multiples": list(answers.multiples),
        "plane_order": [
            [ranking(head.planes) for head in layer] for layer in worths(profile, "sensitivity")
        ],
    }


def _plane_counts(plan: Plan) -> list[list[int]]:
    return [[len(head.rotary_planes or ()) for head in layer.heads] for layer in plan.layers]
