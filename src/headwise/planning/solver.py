"""The one allocation solver: how many units each curve gets, of highest total value within budgets.

Every curve says what keeping 0, 1, …, U units is worth and what a unit costs in each resource. This
file turns curves into a small multiple-choice knapsack and its solution back into units:

    curve ─┐ same tie: one number of units
    curve ─┴─► group ─┐ concave, same cost of a step: one sorted list of steps
               group ─┴─► options ─► knapsack ─► units of every curve
                                  (knapsack.py)

Merging is exact. When several concave curves have the same cost per step, the best way to spend t
steps on all of them together is to take the t largest increments, whichever curve owns them (the
increments of one concave curve come in the right order by themselves). Thousands of heads thereby
become one item per kind of head, and the symmetry between equal heads is gone.

Costs and budgets are integers throughout, so nothing is ever over budget by rounding. The result is
deterministic. It is exact (up to float64 round-off) whenever `exact` is true, and then more budget
never gives less value; otherwise `gap` is proven, and is the most by which this can fail.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int

from headwise.errors import BudgetError
from headwise.planning.knapsack import EFFORT, Item, Knapsack, optimum

HUGE = 1e290
"""Values from here on are refused, so that their sums stay finite."""

ROUND_OFF = 1e-12
"""Differences below this share of the values involved are not looked for."""

CONCAVE = 8 * float(np.finfo(np.float64).eps)
"""A curve that is concave up to this share of its largest value is concave: cumulative sums of
sorted numbers are no better than that."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """What keeping 0, 1, …, U units is worth, and what one unit costs in each resource.

    Allowed are the multiples of `multiple_of` between `floor` and `ceiling`, and U itself when the
    ceiling permits it: a head that is left whole keeps its width, whatever it is. With `only`, no
    other number is allowed, U neither. Curves with the same `tie` get the same number of units.
    Values may be any finite numbers; concave curves, which sensitivities sorted from large to small
    give, are solved fastest.
    """

    values: Float[np.ndarray, " options"]
    unit_cost: tuple[int, ...]
    floor: int = 0
    ceiling: int | None = None
    multiple_of: int = 1
    tie: Hashable | None = None
    only: tuple[int, ...] | None = None

    def allowed(self) -> Int[np.ndarray, " allowed"]:
        """The allowed numbers of units, ascending."""
        full = len(self.values) - 1
        return _allowed(full, self.floor, self.ceiling, self.multiple_of, self.only)


@lru_cache(maxsize=256)  # the curves of a model have few different grids
def _allowed(
    full: int, floor: int, ceiling: int | None, multiple_of: int, only: tuple[int, ...] | None
) -> Int[np.ndarray, " allowed"]:
    top = full if ceiling is None else min(ceiling, full)
    units = np.arange(-(-floor // multiple_of) * multiple_of, top + 1, multiple_of)
    if top == full and full % multiple_of and floor <= full:
        units = np.append(units, full)
    if only is not None:
        units = units[np.isin(units, only)]
    units.flags.writeable = False
    return units


@dataclass(frozen=True, slots=True)
class Solution:
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
) -> Solution:
    """The units of highest total value that spend at most `budgets[r]` of every resource r.

    A `max_gap` above 0 stops as soon as that relative gap is proven. `resources` are names for the
    error messages. `effort` bounds the work (see `knapsack.EFFORT`); one budget, or several over a
    few kinds of layers, are solved exactly long before it is used up.
    """
    names = resources or tuple(f"resource {r}" for r in range(len(budgets)))
    return Solver(curves, names).solve(budgets, max_gap=max_gap, effort=effort)


class Solver:
    """Curves prepared for many budgets."""

    def __init__(self, curves: Sequence[Curve], resources: tuple[str, ...]) -> None:
        _check(curves, resources)
        self._curves, self._names = tuple(curves), resources
        self._groups = _tied(self._curves)
        self._grids = _grids(self._groups)
        # The options of the last budgets, and how many of each grid fitted: one value, since
        # several threads may solve at once.
        self._last: tuple[tuple[int, ...], list[_Options]] = ((), [])

    def solve(
        self, budgets: tuple[int, ...], *, max_gap: float = 0.0, effort: int = EFFORT
    ) -> Solution:
        """The units of highest total value within the budgets, one for each resource; see `solve`.

        What the budgets do not decide is settled first: an option that does not fit even alone is
        out, and an item that needs none of the resources that can bind takes its last option.
        """
        groups, room = self._groups, self._room(budgets)
        options = self._fitting_options(room)
        knapsack, places = _binding(options, room, self._names)
        competing = set(places)
        fixed = math.fsum(float(group.values[0]) for group in groups) + math.fsum(
            float(one.item.gains[-1]) for i, one in enumerate(options) if i not in competing
        )
        noise = ROUND_OFF * sum(float(np.abs(group.values).max()) for group in groups)
        best, missing = optimum(knapsack, fixed, max_gap, noise, effort)

        taken = [len(one.item.steps) - 1 for one in options]
        for place, option in zip(places, best, strict=True):
            taken[place] = option
        units = [0] * len(self._curves)
        for one, option in zip(options, taken, strict=True):
            for g, count in zip(one.groups, one.group_units(option), strict=True):
                for member in groups[g].members:
                    units[member] = count
        parts = [(c.unit_cost, u) for c, u in zip(self._curves, units, strict=True)]
        spent = _spent(parts, len(budgets))
        assert all(s <= b for s, b in zip(spent, budgets, strict=True))
        value = math.fsum(float(c.values[u]) for c, u in zip(self._curves, units, strict=True))
        exact = missing <= 2 * noise
        return Solution(tuple(units), value, value if exact else value + missing, spent, exact)

    def _room(self, budgets: tuple[int, ...]) -> tuple[int, ...]:
        """What the smallest allowed plan leaves of each budget."""
        if len(budgets) != len(self._names):
            raise BudgetError(
                f"Expected {len(self._names)} budgets, got {len(budgets)}: give one budget per "
                "resource."
            )
        least = _spent([(g.unit_cost, int(g.units[0])) for g in self._groups], len(budgets))
        for name, cost, budget in zip(self._names, least, budgets, strict=True):
            if cost > budget:
                raise BudgetError(
                    f"The budget for {name} is {budget}, but the smallest allowed plan costs "
                    f"{cost}: raise the budget or lower the minimum widths."
                )
        return tuple(b - c for b, c in zip(budgets, least, strict=True))

    def _fitting_options(self, room: tuple[int, ...]) -> list[_Options]:
        """The options that fit, alone, into the room; kept for the next budgets."""
        fitting = tuple(_fitting(self._groups[grid[0]], room) for grid in self._grids)
        last = self._last
        if last[0] != fitting:
            parts = zip(self._grids, fitting, strict=True)
            separate = [one for grid, n in parts for one in _grid_options(self._groups, grid, n)]
            self._last = last = fitting, _merged(separate)
        return last[1]


def _check(curves: Sequence[Curve], resources: tuple[str, ...]) -> None:
    if not resources:
        raise BudgetError("Expected at least one budget, got none: give one budget per resource.")
    for c, curve in enumerate(curves):
        if len(curve.values) == 0 or not float(np.abs(curve.values).max()) < HUGE:
            raise BudgetError(
                f"Curve {c} must hold a finite value for 0 units and more, got {curve.values}: "
                "check where the curve comes from."
            )
        if len(curve.unit_cost) != len(resources) or min(curve.unit_cost) < 0:
            raise BudgetError(
                f"Curve {c} must have a non-negative unit cost for each of {len(resources)} "
                f"budgets, got {curve.unit_cost}: give one cost per budget."
            )
        if curve.floor < 0 or curve.multiple_of < 1:
            raise BudgetError(
                f"Curve {c} must have a floor of at least 0 and a multiple of at least 1, got "
                f"{curve.floor} and {curve.multiple_of}: correct them."
            )


def _spent(parts: Sequence[tuple[tuple[int, ...], int]], n_resources: int) -> tuple[int, ...]:
    return tuple(sum(cost[r] * units for cost, units in parts) for r in range(n_resources))


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Curves of one tie: the units all of them allow, their summed values and unit costs."""

    members: tuple[int, ...]
    units: Int[np.ndarray, " options"]
    values: Float[np.ndarray, " options"]
    unit_cost: tuple[int, ...]


def _tied(curves: tuple[Curve, ...]) -> tuple[_Group, ...]:
    """Curves of one tie as one group; a curve without a tie is a group of its own."""
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
        groups.append(_Group(tuple(members), units, values, cost))
    return tuple(groups)


def _grids(groups: tuple[_Group, ...]) -> tuple[tuple[int, ...], ...]:
    """Groups with the same allowed units and costs, together."""
    alike: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}
    for g, group in enumerate(groups):
        alike.setdefault((group.units.tobytes(), group.unit_cost), []).append(g)
    return tuple(map(tuple, alike.values()))


@dataclass(frozen=True, slots=True, eq=False)
class _Options:
    """An item of the knapsack, and what its steps mean for the groups it stands for.

    Steps count from the least allowed plan. `units[g]` holds the units of the group `groups[g]`
    after each of its own steps; when several groups were merged, `owner` says which of them each
    step in turn belongs to.
    """

    cost: tuple[int, ...]  # of a step, in every resource
    item: Item
    groups: tuple[int, ...]
    units: tuple[Int[np.ndarray, " _"], ...]
    owner: Int[np.ndarray, " _"] | None = None

    def group_units(self, option: int) -> list[int]:
        """The units of each group when this option is chosen."""
        if self.owner is None:
            return [int(self.units[0][option])]
        taken = np.bincount(self.owner[:option], minlength=len(self.groups))
        return [int(units[count]) for units, count in zip(self.units, taken, strict=True)]


def _fitting(group: _Group, room: tuple[int, ...]) -> int:
    """How many of the group's options fit, alone, into what the least plan leaves."""
    units = group.units
    most = min((r // c for r, c in zip(room, group.unit_cost, strict=True) if c), default=None)
    if most is None or most >= int(units[-1] - units[0]):
        return len(units)
    return int(np.searchsorted(units, units[0] + most, side="right"))


def _grid_options(
    groups: tuple[_Group, ...], grid: tuple[int, ...], fitting: int
) -> list[_Options]:
    """The options of groups with the same allowed units and costs.

    As rows of one matrix, for speed: most curves are concave and rise at every step, and their
    options stay as they are. The others are looked at one by one.
    """
    units, cost = groups[grid[0]].units[:fitting], groups[grid[0]].unit_cost
    steps, stride = _steps(units)
    values = np.stack([groups[g].values[:fitting] for g in grid])
    rise = values[:, 1:] - values[:, :-1]
    noise = CONCAVE * np.abs(values).max(axis=1, keepdims=True)
    simple = (rise > 0).all(axis=1) & (rise[:, 1:] - rise[:, :-1] <= noise).all(axis=1)
    if int(steps[-1]) != len(steps) - 1:
        simple[:] = False
    gains = np.zeros_like(values)
    gains[:, 1:] = np.cumsum(np.minimum.accumulate(rise, axis=1), axis=1)
    step_cost = tuple(c * stride for c in cost)
    return [
        _Options(step_cost, Item(steps, gains[row], concave=True), (g,), (units,))
        if simple[row]
        else _useful_options(g, units, values[row], cost)
        for row, g in enumerate(grid)
    ]


def _useful_options(
    g: int,
    units: Int[np.ndarray, " options"],
    values: Float[np.ndarray, " options"],
    cost: tuple[int, ...],
) -> _Options:
    """Of any curve, the options that are worth more than every cheaper one."""
    best = np.maximum.accumulate(values)
    kept = np.concatenate([[True], values[1:] > best[:-1]])
    units, values = units[kept], values[kept]
    steps, stride = _steps(units)
    rise = np.diff(values)
    noise = CONCAVE * float(np.abs(values).max())
    concave = int(steps[-1]) == len(steps) - 1 and bool((np.diff(rise) <= noise).all())
    gains = values - values[0]
    if concave:  # exactly, from here on
        gains = np.concatenate([[0.0], np.cumsum(np.minimum.accumulate(rise))])
    return _Options(tuple(c * stride for c in cost), Item(steps, gains, concave), (g,), (units,))


def _steps(units: Int[np.ndarray, " options"]) -> tuple[Int[np.ndarray, " options"], int]:
    """Units beyond the first, counted in the largest stride that divides them all."""
    beyond = units - units[0]
    stride = int(np.gcd.reduce(beyond)) or 1
    return beyond // stride, stride


def _merged(separate: list[_Options]) -> list[_Options]:
    """Concave items of equal step cost joined into one (see the top of this file)."""
    alike: dict[tuple[int, ...], list[_Options]] = {}
    result = []
    for one in separate:
        if one.item.concave and len(one.item.steps) > 1:
            alike.setdefault(one.cost, []).append(one)
        else:
            result.append(one)
    for cost, same in alike.items():
        if len(same) == 1:
            result.append(same[0])
            continue
        rises = np.concatenate([one.item.gains[1:] - one.item.gains[:-1] for one in same])
        owners = np.repeat(np.arange(len(same)), [len(one.item.gains) - 1 for one in same])
        order = np.argsort(-rises, kind="stable")
        gains = np.concatenate([[0.0], np.cumsum(rises[order])])
        groups = tuple(one.groups[0] for one in same)
        units = tuple(one.units[0] for one in same)
        item = Item(np.arange(len(gains)), gains, concave=True)
        result.append(_Options(cost, item, groups, units, owners[order]))
    return result


def _binding(
    options: list[_Options], room: tuple[int, ...], names: tuple[str, ...]
) -> tuple[Knapsack, tuple[int, ...]]:
    """The knapsack of the items that compete, and their places among all options.

    Resources that cannot bind, or that another one implies, are dropped, and common factors of the
    costs are divided out. Resource r is implied by s when every step takes a smaller share of r's
    room than of s's. In a model whose layers are alike, parameters, cached bytes and operations are
    proportional, so that three budgets are one.
    """
    kinds = {one.cost for one in options if len(one.item.steps) > 1}
    full = [sum(one.cost[r] * int(one.item.steps[-1]) for one in options) for r in range(len(room))]
    live = [r for r in range(len(room)) if full[r] > room[r]]
    for r in reversed(live.copy()):
        if any(
            s != r and all(cost[r] * room[s] <= cost[s] * room[r] for cost in kinds) for s in live
        ):
            live.remove(r)
    places = tuple(
        i
        for i, one in enumerate(options)
        if len(one.item.steps) > 1 and any(one.cost[r] for r in live)
    )
    competing = [options[i] for i in places]
    factor = {r: math.gcd(*(one.cost[r] for one in competing)) for r in live}
    for r in live:
        if full[r] // factor[r] >= 2**62:
            raise BudgetError(
                f"The costs in {names[r]} must add up to less than 2^62, got {full[r]}: "
                "count in larger units."
            )
    cost = [[one.cost[r] // factor[r] for r in live] for one in competing]
    knapsack = Knapsack(
        tuple(one.item for one in competing),
        np.array(cost, dtype=np.int64).reshape(len(competing), len(live)),
        np.array([room[r] // factor[r] for r in live], dtype=np.int64),
    )
    return knapsack, places
