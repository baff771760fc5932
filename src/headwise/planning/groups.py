"""Dropped head groups, and layers with few widths: the options of a head or of a layer.

A head group has *combinations* of widths (one per part), or it is dropped. Without its values, its
queries and keys have no effect, so they cost nothing and lose nothing: the loss is
the group's own worth, counted once.

    granularity head           one item per group: any combination, or dropped
    granularity layer          one item per layer: one combination, and which groups have it
    head, at most N widths     one item per layer: N combinations, and which groups have which

For one combination, the best k groups to keep are those that lose most when dropped: sorting gives
all options of a layer. For N combinations there are too many options to list, but at given prices
every group picks its own best one, so trying the sets of N combinations gives the best option.
Up to `MOST_SETS` sets are all tried; beyond that, sets grow greedily from the best pair, and the
bound is that of free groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np
from jaxtyping import Float, Int

from headwise.errors import BudgetError
from headwise.plan import RESOURCE_NAMES, Budget, Resource
from headwise.planning.choices import ChoiceSolver, Lazy, Options
from headwise.planning.widths import MLP, Place, WidthCosts, WidthCurve, Widths

Head = tuple[int, int]  # layer, head group
DROPPED = -1
MOST_SETS = 50_000  # of combinations in a layer that are all tried
GIVEN = 24  # options that a layer gives for each prices


@dataclass(frozen=True, slots=True, eq=False)
class GroupOptions:
    """One head group: what every combination of widths is worth and costs, and being dropped.

    `value` counts from being dropped, which is worth 0 and costs nothing.
    """

    widths: Int[np.ndarray, "combinations parts"]
    value: Float[np.ndarray, " combinations"]
    cost: Int[np.ndarray, "combinations resources"]
    may_go: bool
    offset: float  # what is left of the value when it is dropped


def combined(
    allowed: Sequence[Int[np.ndarray, " _"]],
    values: Sequence[Float[np.ndarray, " _"]],
    unit_costs: Sequence[tuple[int, ...]],
    dropped: float | None,
) -> GroupOptions:
    """A group from the allowed widths, the values and the unit costs of its parts.

    `dropped` is what remains of the value when the group is dropped; None forbids it.
    """
    grid = np.meshgrid(*allowed, indexing="ij")
    widths = np.stack([axis.ravel() for axis in grid], axis=1)
    value = np.sum([curve[w] for curve, w in zip(values, widths.T, strict=True)], axis=0)
    cost = widths @ np.array(unit_costs, dtype=np.int64)
    return GroupOptions(widths, value - (dropped or 0.0), cost, dropped is not None, dropped or 0.0)


def head_options(group: GroupOptions) -> Options:
    """A group on its own: every combination, and being dropped."""
    tags = np.arange(len(group.value))[:, None]
    kept = Options(group.cost, group.value, tags)
    if not group.may_go:
        return kept
    gone = Options(np.zeros((1, group.cost.shape[1]), np.int64), np.zeros(1), np.array([[DROPPED]]))
    return Options.joined([kept, gone])


def layer_options(groups: Sequence[GroupOptions]) -> Options:
    """A layer of one combination: for each the best 0, 1, … groups to keep.

    The groups have the same combinations, and at the same costs where they may go.
    """
    values = np.stack([group.value for group in groups], axis=1)
    n = len(groups)
    if not all(group.may_go for group in groups):
        tags = np.repeat(np.arange(len(values))[:, None], n, axis=1)
        cost = np.sum([group.cost for group in groups], axis=0)
        return Options(cost, values.sum(axis=1), tags)
    order = np.argsort(-values, axis=1, kind="stable")
    sums = np.cumsum(np.take_along_axis(values, order, axis=1), axis=1)
    ranks = np.argsort(order, axis=1)
    parts = [
        Options(
            np.zeros((1, groups[0].cost.shape[1]), np.int64), np.zeros(1), np.full((1, n), DROPPED)
        )
    ]
    own = np.arange(len(values))[:, None]
    for k in range(1, n + 1):
        tags = np.where(ranks < k, own, DROPPED)
        parts.append(Options(k * groups[0].cost, sums[:, k - 1], tags))
    return Options.joined(parts)


@dataclass(frozen=True, slots=True, eq=False)
class FewWidths:
    """A layer of at most `most` combinations, as a lazy item (see `choices`)."""

    groups: Sequence[GroupOptions]
    most: int

    def least(self) -> Options:
        """All groups dropped, or all at the narrowest combination."""
        n, resources = len(self.groups), self.groups[0].cost.shape[1]
        if all(group.may_go for group in self.groups):
            gone = np.full((1, n), DROPPED)
            return Options(np.zeros((1, resources), np.int64), np.zeros(1), gone)
        narrow = int(np.argmin(self.groups[0].cost.sum(axis=1)))
        return self._options(np.full((1, n), narrow))

    def best(self, prices: Float[np.ndarray, " resources"]) -> tuple[Options, float]:
        """The best sets of combinations at these prices, and the best profit of any."""
        profit = np.stack([group.value - group.cost @ prices for group in self.groups])
        floor = np.array([0.0 if group.may_go else -np.inf for group in self.groups])
        combinations = profit.shape[1]
        size = min(self.most, combinations)
        pairs = np.array(_sets(combinations, min(size, 2)))
        sets = pairs
        exact = size <= 2
        if size > 2 and _count(combinations, size) <= MOST_SETS:
            sets, exact = np.array(_sets(combinations, size)), True
        totals = _totals(profit, floor, sets)
        order = np.argsort(-totals, kind="stable")[:GIVEN]
        chosen = sets[order]
        while chosen.shape[1] < size:
            chosen = _grown(profit, floor, chosen)
        tags = _picked(profit, floor, chosen)
        top = float(totals.max())
        if not exact:  # free groups are no worse
            top = float(np.maximum(profit.max(axis=1), floor).sum())
        return self._options(np.unique(tags, axis=0)), top

    def _options(self, tags: Int[np.ndarray, "options groups"]) -> Options:
        cost = np.zeros((len(tags), self.groups[0].cost.shape[1]), dtype=np.int64)
        value = np.zeros(len(tags))
        for j, group in enumerate(self.groups):
            kept = tags[:, j] != DROPPED
            cost[kept] += group.cost[tags[kept, j]]
            value[kept] += group.value[tags[kept, j]]
        return Options(cost, value, tags)


def _count(n: int, size: int) -> int:
    found = 1
    for k in range(size):
        found = found * (n - k) // (k + 1)
    return found


@lru_cache(maxsize=32)
def _sets(n: int, size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(itertools.combinations(range(n), size))


def _totals(
    profit: Float[np.ndarray, "groups combinations"],
    floor: Float[np.ndarray, " groups"],
    sets: Int[np.ndarray, "sets size"],
) -> Float[np.ndarray, " sets"]:
    """What every set of combinations is worth when each group picks the best of it."""
    total = np.zeros(len(sets))
    for own, least in zip(profit, floor, strict=True):
        total += np.maximum(own[sets].max(axis=1), least)
    return total


def _picked(
    profit: Float[np.ndarray, "groups combinations"],
    floor: Float[np.ndarray, " groups"],
    sets: Int[np.ndarray, "sets size"],
) -> Int[np.ndarray, "sets groups"]:
    """The combination that each group picks of every set; `DROPPED` where that is better."""
    columns = []
    for own, least in zip(profit, floor, strict=True):
        best = np.argmax(own[sets], axis=1)
        chosen = np.take_along_axis(sets, best[:, None], axis=1)[:, 0]
        columns.append(np.where(own[chosen] > least, chosen, DROPPED))
    return np.stack(columns, axis=1)


def _grown(
    profit: Float[np.ndarray, "groups combinations"],
    floor: Float[np.ndarray, " groups"],
    sets: Int[np.ndarray, "sets size"],
) -> Int[np.ndarray, "sets size+1"]:
    """Every set with the one further combination that adds most."""
    grown = []
    for own in sets:
        now = np.maximum(profit[:, own].max(axis=1), floor)
        adds = np.maximum(profit, now[:, None]).sum(axis=0)
        grown.append([*own, int(np.argmax(adds))])
    return np.array(grown)


@dataclass(frozen=True, slots=True)
class _Ready:
    """The groups and items of a model, with their costs in some resources."""

    groups: dict[Head, GroupOptions]
    members: tuple[tuple[Head, ...], ...]  # the groups of each item
    solver: ChoiceSolver
    fixed: Int[np.ndarray, " resources"]  # what no width changes
    offset: float  # value of a plan without any group


class GroupSolver:
    """The curves of one model where groups may go or a layer has at most `most` widths.

    `remains` is what is left of the value of a group that is dropped; a group that it does not name
    stays. With `most` None every group is free.
    """

    def __init__(
        self,
        costs: WidthCosts,
        curves: Mapping[Place, WidthCurve],
        *,
        remains: Mapping[Head, float],
        most: int | None,
    ) -> None:
        self._curves, self._costs = curves, costs
        self._remains, self._most = remains, most
        self._parts: dict[Head, list[Place]] = {}
        for place in curves:
            self._parts.setdefault(place[:2], []).append(place)
        self._ready: dict[tuple[Resource, ...], _Ready] = {}

    def solve(self, budget: Budget) -> Widths:
        """The widths of highest total value within the budget."""
        resources = budget.limited
        if resources not in self._ready:
            self._ready[resources] = self._prepared(resources)
        ready, limits = self._ready[resources], self._costs.limits(budget)
        smallest = (ready.solver.least + ready.fixed).tolist()
        for r, limit, least in zip(resources, limits, smallest, strict=True):
            if limit < least:
                raise BudgetError(
                    f"The budget for {RESOURCE_NAMES[r]} is {limit}, but the smallest allowed plan "
                    f"costs {least}: raise the budget or lower the minimum widths."
                )
        found = ready.solver.solve(np.array(limits, dtype=np.int64) - ready.fixed)
        widths = dict.fromkeys(self._curves, 0)
        for members, tags in zip(ready.members, found.tags, strict=True):
            for head, tag in zip(members, tags, strict=True):
                if tag != DROPPED:
                    kept = ready.groups[head].widths[tag].tolist()
                    widths |= zip(self._parts[head], kept, strict=True)
        size = abs(found.value + ready.offset) + found.missing
        return Widths(widths, found.missing / size if size else 0.0)

    def _prepared(self, resources: tuple[Resource, ...]) -> _Ready:
        units = self._costs.units(resources)
        layers: dict[tuple[int, bool], list[Head]] = {}  # an MLP is an item of its own
        for head in self._parts:
            layers.setdefault((head[0], head[1] == MLP), []).append(head)
        groups: dict[Head, GroupOptions] = {}
        items: list[Options | Lazy] = []
        members: list[tuple[Head, ...]] = []
        for heads in layers.values():
            few = self._most is not None and self._most < len(heads)
            groups |= self._groups(heads, units, alike=few)
            own = [groups[head] for head in heads]
            if not few:
                items += map(head_options, own)
                members += [(head,) for head in heads]
            else:
                assert self._most is not None
                one = self._most == 1
                items.append(layer_options(own) if one else FewWidths(own, self._most))
                members.append(tuple(heads))
        most = np.sum([group.cost.max(axis=0) for group in groups.values()], axis=0)
        solver = ChoiceSolver(items, np.unique(list(units.values()), axis=0), most)
        fixed = np.array(self._costs.fixed(resources, units), dtype=np.int64)
        offset = sum(group.offset for group in groups.values())
        return _Ready(groups, tuple(members), solver, fixed, offset)

    def _groups(
        self, heads: Sequence[Head], units: Mapping[Place, tuple[int, ...]], *, alike: bool
    ) -> dict[Head, GroupOptions]:
        """The groups of one layer; `alike` ones have the same combinations."""
        allowed = {p: self._curves[p].allowed for head in heads for p in self._parts[head]}
        if alike:
            for part in {p[2] for p in allowed}:
                places = [p for p in allowed if p[2] == part]
                common = reduce(np.intersect1d, [allowed[p] for p in places])
                if len(common) == 0:
                    raise BudgetError(
                        f"No width of {part} is allowed in all head groups of layer {heads[0][0]}: "
                        "lower the multiple that widths are rounded to, or free the heads."
                    )
                allowed |= dict.fromkeys(places, common)
        # Groups are exchanged for one another only where they cost the same.
        same = len({tuple(units[p] for p in self._parts[head]) for head in heads}) == 1
        return {
            head: combined(
                [allowed[p] for p in self._parts[head]],
                [self._curves[p].values for p in self._parts[head]],
                [units[p] for p in self._parts[head]],
                self._remains.get(head) if same or not alike else None,
            )
            for head in heads
        }
