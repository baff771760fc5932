"""The one allocation solver: how many units each curve gets, of highest total value within budgets.

Every curve says what keeping 0, 1, …, U units is worth and what a unit costs in each resource. That
is a multiple-choice knapsack with one or several constraints. It is solved in four moves:

    curves ─► choices ─► relaxation ─► greedy plan ─► search ─► allocation
            (_choices)  (_relaxation:  (_optimum:      (_core, _search: closes the gap,
                         a bound from   a value from    or proves what is left of it)
                         above)         below)

Costs and budgets are integers throughout, so nothing is ever over budget by rounding. The result is
deterministic. It is exact (up to float64 round-off) whenever `exact` is true, and then more budget
never gives less value; otherwise `gap` is proven, and is the most by which this can fail.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from jaxtyping import Float, Int

from headwise.errors import BudgetError
from headwise.planning._choices import Group, binding, items, merged
from headwise.planning._optimum import EFFORT, optimum

HUGE = 1e290
"""Values from here on are refused, so that their sums stay finite."""

ROUND_OFF = 1e-12
"""Differences below this share of the values involved are not looked for."""


@dataclass(frozen=True, slots=True, eq=False)  # one is equal to itself only, so it can be a key
class Curve:
    """What keeping 0, 1, …, U units is worth, and what one unit costs in each resource.

    Allowed are the multiples of `multiple_of` between `floor` and `ceiling`, and U itself when the
    ceiling permits it: a head that is left whole keeps its width, whatever it is. Curves with the
    same `tie` get the same number of units. Values may be any finite numbers; concave curves, which
    sensitivities sorted from large to small give, are solved fastest.
    """

    values: Float[np.ndarray, " options"]
    unit_cost: tuple[int, ...]
    floor: int = 0
    ceiling: int | None = None
    multiple_of: int = 1
    tie: Hashable | None = None

    def allowed(self) -> Int[np.ndarray, " allowed"]:
        """The allowed numbers of units, ascending."""
        return _allowed(len(self.values) - 1, self.floor, self.ceiling, self.multiple_of)


@cache
def _allowed(
    full: int, floor: int, ceiling: int | None, multiple_of: int
) -> Int[np.ndarray, " allowed"]:
    top = full if ceiling is None else min(ceiling, full)
    units = np.arange(-(-floor // multiple_of) * multiple_of, top + 1, multiple_of)
    if top == full and full % multiple_of and floor <= full:
        units = np.append(units, full)
    units.flags.writeable = False
    return units


@dataclass(frozen=True, slots=True)
class Allocation:
    """Units per curve, their total value, a proven upper bound on any plan's, and what is spent."""

    units: tuple[int, ...]
    value: float
    bound: float
    spent: tuple[int, ...]
    exact: bool

    @property
    def gap(self) -> float:
        """How far from the optimum the value can be at most, as a share of the bound."""
        size = max(abs(self.value), abs(self.bound))
        return (self.bound - self.value) / size if size else 0.0


def solve(
    curves: Sequence[Curve],
    budgets: tuple[int, ...],
    *,
    max_gap: float = 0.0,
    resources: tuple[str, ...] | None = None,
    effort: int = EFFORT,
) -> Allocation:
    """The units of highest total value that spend at most `budgets[r]` of every resource r.

    A `max_gap` above 0 stops as soon as that relative gap is proven. `resources` are names for the
    error messages. `effort` bounds the work (see `_optimum`); one budget, or several over a few
    kinds of layers, are solved exactly long before it is used up.
    """
    names = resources or tuple(f"resource {r}" for r in range(len(budgets)))
    _check(curves, budgets, names)
    groups = _groups(tuple(curves))
    room = _room(groups, budgets, names)
    choices = merged(items(groups, room))
    problem = binding(choices, room, names)

    competing = set(problem.places)
    options = [len(one.steps) - 1 for one in choices]  # all, unless they compete
    fixed = math.fsum(float(group.values[0]) for group in groups) + math.fsum(
        float(one.gains[-1]) for i, one in enumerate(choices) if i not in competing
    )
    noise = ROUND_OFF * sum(float(np.abs(group.values).max()) for group in groups)
    best, missing = optimum(problem, fixed, max_gap, noise, effort)
    for place, option in zip(problem.places, best, strict=True):
        options[place] = option

    units = [0] * len(curves)
    for one, option in zip(choices, options, strict=True):
        for g, count in zip(one.groups, one.group_units(option), strict=True):
            for member in groups[g].members:
                units[member] = count
    spent = _spent([(c.unit_cost, u) for c, u in zip(curves, units, strict=True)], len(budgets))
    assert all(s <= b for s, b in zip(spent, budgets, strict=True))
    value = math.fsum(float(c.values[u]) for c, u in zip(curves, units, strict=True))
    exact = missing <= 2 * noise
    return Allocation(tuple(units), value, value if exact else value + missing, spent, exact)


def _room(
    groups: Sequence[Group], budgets: tuple[int, ...], names: tuple[str, ...]
) -> tuple[int, ...]:
    """What the smallest allowed plan leaves of each budget."""
    least = _spent([(g.unit_cost, int(g.units[0])) for g in groups], len(budgets))
    for name, cost, budget in zip(names, least, budgets, strict=True):
        if cost > budget:
            raise BudgetError(
                f"The budget for {name} is {budget}, but the smallest allowed plan costs {cost}: "
                "raise the budget or lower the floors."
            )
    return tuple(b - c for b, c in zip(budgets, least, strict=True))


def _spent(parts: Sequence[tuple[tuple[int, ...], int]], n_resources: int) -> tuple[int, ...]:
    return tuple(sum(cost[r] * units for cost, units in parts) for r in range(n_resources))


@lru_cache(maxsize=8)  # many budgets are tried on the same curves
def _groups(curves: tuple[Curve, ...]) -> tuple[Group, ...]:
    """Curves of one tie as one group: allowed units intersected, values and costs summed."""
    tied: dict[tuple[bool, Hashable], list[int]] = {}
    for c, curve in enumerate(curves):
        tied.setdefault((curve.tie is None, c if curve.tie is None else curve.tie), []).append(c)
    groups = []
    for members in tied.values():
        units = curves[members[0]].allowed()
        for c in members[1:]:
            units = np.intersect1d(units, curves[c].allowed(), assume_unique=True)
        if len(units) == 0:
            which = f"curve {members[0]}"
            if len(members) > 1:
                which = f"{len(members)} curves tied as {curves[members[0]].tie!r} together"
            raise BudgetError(
                f"No number of units is allowed for {which}: widen the range between floor and "
                "ceiling or lower the multiple that widths are rounded to."
            )
        values = curves[members[0]].values[units].astype(np.float64)
        for c in members[1:]:
            values = values + curves[c].values[units]
        cost = tuple(map(sum, zip(*(curves[c].unit_cost for c in members), strict=True)))
        groups.append(Group(tuple(members), units, values, cost))
    return tuple(groups)


def _check(curves: Sequence[Curve], budgets: tuple[int, ...], names: tuple[str, ...]) -> None:
    if not budgets or len(names) != len(budgets):
        raise BudgetError(
            f"Expected at least one budget and a name for each, got {len(budgets)} budgets and "
            f"{len(names)} names: give one budget per resource."
        )
    _check_curves(tuple(curves), len(budgets))


@lru_cache(maxsize=8)
def _check_curves(curves: tuple[Curve, ...], n_budgets: int) -> None:
    for c, curve in enumerate(curves):
        if len(curve.values) == 0 or not float(np.abs(curve.values).max()) < HUGE:
            raise BudgetError(
                f"Curve {c} must hold a finite value for 0 units and more, got {curve.values}: "
                "check where the curve comes from."
            )
        if len(curve.unit_cost) != n_budgets or min(curve.unit_cost) < 0:
            raise BudgetError(
                f"Curve {c} must have a non-negative unit cost for each of {n_budgets} budgets, "
                f"got {curve.unit_cost}: give one cost per budget."
            )
        if curve.floor < 0 or curve.multiple_of < 1:
            raise BudgetError(
                f"Curve {c} must have a floor of at least 0 and a multiple of at least 1, got "
                f"{curve.floor} and {curve.multiple_of}: correct them."
            )
