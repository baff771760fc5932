"""Plans precomputed on a grid of budgets, for a page that needs no server.

In most models every dimension costs the same parameters, cached bytes and operations up to a
factor, so of three limits only the tightest counts: the grid then needs one solve per level of each
resource, not one per combination. (The solver itself drops the other limits in the same way, so
the plans are the same.) Limits whose costs are not proportional are kept side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from headwise.errors import BudgetError
from headwise.plan import Resource
from headwise.planning.cost import unit_cost
from headwise.planning.fit import SIDES
from headwise.planning.worth_curves import GRANULARITIES
from headwise.report.explorer.answers import BUDGETS, Answers, Choice, levels

MULTIPLES = (2, 8, 16)  # of those worth offering
Tick = Callable[[int, int], None]
Units = tuple[Mapping[Resource, int], ...]  # what a dimension of each kind of head costs


def saved_grid(answers: Answers, step: float, tick: Tick | None = None) -> dict[str, Any]:
    """Levels, distinct plans, and for each point of the grid the number of its plan (or −1)."""
    found = levels(answers, {"attn_params": step, "kv_bytes": 2 * step, "flops": step})
    axes = [found.get(name, [100.0]) for name in BUDGETS]
    multiples = [m for m in answers.multiples if m in MULTIPLES] or [answers.multiples[0]]
    rules = list(itertools.product(GRANULARITIES, multiples))
    points = list(itertools.product(axes[0], axes[1], axes[2]))
    units, book = unit_costs(answers), _Book(answers)
    index: dict[str, list[int]] = {}
    for done, (granularity, multiple) in enumerate(rules):
        numbers: list[int] = []
        for percent in points:
            choice = Choice(percent, granularity, multiple)
            numbers.append(book.number(tightest(answers, choice, units)))
            if tick is not None:
                tick(done * len(points) + len(numbers), len(rules) * len(points))
        index[f"{granularity} {multiple}"] = numbers
    return {"levels": found, "multiples": multiples, "plans": book.plans, "index": index}


def tightest(answers: Answers, choice: Choice, units: Units) -> Choice:
    """The choice without the limits that another one, of proportional costs, implies."""
    limits = choice.limits
    if len(limits) < 2:
        return choice
    budget, least = choice.budget, answers.least_cost(choice.rules)
    room = {r: budget.amount(r, answers.dense) - least[r] for r in limits}
    left = list(limits)
    for r in reversed(list(limits)):
        others = [s for s in left if s != r and _proportional(units, r, s)]
        if any(units[0][r] * room[s] <= units[0][s] * room[r] for s in others):
            left.remove(r)
    first, second, third = (
        x if name in left else 100.0 for name, x in zip(BUDGETS, choice.percent, strict=True)
    )
    return Choice((first, second, third), choice.granularity, choice.multiple_of)


def unit_costs(answers: Answers) -> Units:
    """What a dimension costs in each resource: the different answers over the whole model."""
    plan = answers.profile.plan
    found = [
        unit_cost(plan, i, head, side, plan.shape.context)
        for i, layer in enumerate(plan.layers)
        for head in dict.fromkeys(layer.heads)
        for side in SIDES
    ]
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
            key = repr((answer["qk"], answer["vo"], answer["planes"]))
            if key not in self._widths:
                self._widths[key] = len(self.plans)
                self.plans.append(answer)
            self._choices[choice] = self._widths[key]
        return self._choices[choice]
