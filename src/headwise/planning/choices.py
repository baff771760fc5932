"""Joint choices: one option of every item, of any cost, within the budgets.

The curves of `solver.py` rise step by step, every step of one cost. Dropping a head group, or
allowing few widths in a layer, makes the widths of a head or of a layer one choice among *options*:

    item: a layer                        cost (one number per budget)    value
      option: all 3 groups, 64/64          1152                           4.1
      option: all 3 groups, 56/64          1080                           4.0
      option: groups 0 and 2, 64/64         768                           3.7
      …

This is the multiple-choice knapsack in its general form. Where one budget binds, options sorted by
cost are steps again and `knapsack.py` has the answer. Otherwise prices λ come from the linear
program of the Lagrangian bound, with the options that were ever best:

    minimise  λ·room + Σ t_item   so that   t_item ≥ value − λ·cost   for these options

An item with too many options to list gives the best ones for given prices (`Lazy`). The bound then
holds for all of its options, the plan is found among those it gave, and the difference is proven.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Float, Int

from headwise.planning.knapsack import (
    EFFORT,
    Core,
    Item,
    Knapsack,
    optimum,
    relaxation,
    running_maxima,
    search_cores,
)

ROUNDS = 60  # of prices; each adds an option to the program
SETTLED = 1e-10  # prices are found when the bound falls by less than this share
ROUND_OFF = 1e-12  # differences below this share of the values are not looked for
NEARBY = (0.4, 0.6, 0.75, 0.9, 1.0, 1.1, 1.3, 1.7, 2.5)  # × the prices: what lazy items are asked


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """What an item may be: the cost of each option in every resource, its worth, what it means."""

    cost: Int[np.ndarray, "options resources"]
    value: Float[np.ndarray, " options"]
    tags: Int[np.ndarray, "options marks"]

    def __getitem__(self, which: np.ndarray) -> Options:
        return Options(self.cost[which], self.value[which], self.tags[which])

    @classmethod
    def joined(cls, parts: Sequence[Options]) -> Options:
        """Several lists, one after the other."""
        return cls(
            np.concatenate([one.cost for one in parts]),
            np.concatenate([one.value for one in parts]),
            np.concatenate([one.tags for one in parts]),
        )


class Lazy(Protocol):
    """An item with too many options to list."""

    def least(self) -> Options:
        """The cheapest option, alone."""

    def best(self, prices: Float[np.ndarray, " resources"]) -> tuple[Options, float]:
        """Good options at these prices, and what no option's value − prices·cost exceeds."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tags of every item's option, their value, and by how much the optimum may be better."""

    tags: tuple[tuple[int, ...], ...]
    value: float
    missing: float


class ChoiceSolver:
    """Items prepared for many budgets.

    Every cost is a sum of `units`, the costs of single dimensions; `most` is what all of them
    together cost.
    """

    def __init__(
        self,
        items: Sequence[Options | Lazy],
        units: Int[np.ndarray, "kinds resources"],
        most: Int[np.ndarray, " resources"],
    ) -> None:
        self._items, self._units, self._most = items, units, most
        line = all(_proportional(units, 0, r) for r in range(1, units.shape[1]))
        self._known = [
            _undominated(one if isinstance(one, Options) else one.least(), line) for one in items
        ]
        self.least: Int[np.ndarray, " resources"] = np.sum(
            [one.cost.min(axis=0) for one in self._known], axis=0
        )

    def solve(self, budgets: Int[np.ndarray, " resources"], effort: int = EFFORT) -> Chosen:
        """The options of highest total value within budgets that hold the cheapest ones."""
        room = budgets - self.least
        assert (room >= 0).all()
        live = self._live(room)
        lazy = {i: one for i, one in enumerate(self._items) if not isinstance(one, Options)}
        pools = [
            Options(one.cost[:, live] - one.cost[:, live].min(axis=0), one.value, one.tags)
            for one in self._known
        ]
        room = room[live]
        bases = {i: self._known[i].cost[:, live].min(axis=0) for i in lazy}
        bound = self._asked(pools, lazy, bases, room, live) if lazy else math.inf
        noise = ROUND_OFF * sum(float(np.abs(one.value).max()) for one in pools)
        if not live:
            picks, missing = [int(np.argmax(one.value)) for one in pools], 0.0
        elif len(live) == 1:
            picks, missing = _along_one(pools, room, noise, effort)
        else:
            picks, missing = _along_several(pools, room, noise, effort)
        chosen = [one.tags[p] for one, p in zip(pools, picks, strict=True)]
        value = math.fsum(float(one.value[p]) for one, p in zip(pools, picks, strict=True))
        if lazy:
            missing = max(0.0, bound - value)
        tags = tuple(tuple(int(t) for t in mark) for mark in chosen)
        return Chosen(tags, value, 0.0 if missing <= 2 * noise else missing)

    def _live(self, room: Int[np.ndarray, " resources"]) -> list[int]:
        """The resources that can bind and that no other one implies."""
        full = self._most - self.least
        live = [r for r in range(len(room)) if full[r] > room[r]]
        for r in reversed(live.copy()):
            if any(
                s != r
                and all(int(u[r]) * int(room[s]) <= int(u[s]) * int(room[r]) for u in self._units)
                for s in live
            ):
                live.remove(r)
        return live

    def _asked(
        self,
        pools: list[Options],
        lazy: dict[int, Lazy],
        bases: dict[int, Int[np.ndarray, " resources"]],
        room: Int[np.ndarray, " resources"],
        live: list[int],
    ) -> float:
        """Fill the pools of lazy items with options near the best prices; the bound they prove."""
        best, found = math.inf, np.zeros(len(live))

        def ask(prices: Float[np.ndarray, " resources"]) -> float:
            whole = np.zeros(self._units.shape[1])
            whole[live] = prices
            bound = float(prices @ room)
            for i, one in enumerate(pools):
                if i not in lazy:
                    bound += float((one.value - one.cost @ prices).max())
                    continue
                more, top = lazy[i].best(whole)
                cost = more.cost[:, live] - bases[i]
                pools[i] = _distinct(Options.joined([one, Options(cost, more.value, more.tags)]))
                bound += top + float(prices @ bases[i])
            return bound

        prices = np.zeros(len(live))
        for _ in range(ROUNDS):
            bound = ask(prices)
            if bound < best:
                best, found = bound, prices
            if not live:
                return best
            prices, reached = _prices(pools, room)
            if best - reached <= SETTLED * abs(best):
                break
        for nearby in NEARBY:
            best = min(best, ask(nearby * found))
        return best


def _proportional(units: Int[np.ndarray, "kinds resources"], r: int, s: int) -> bool:
    first = units[0]
    return all(int(u[r]) * int(first[s]) == int(u[s]) * int(first[r]) for u in units)


def _undominated(options: Options, line: bool) -> Options:
    """The undominated options: no other one costs at most as much and is worth at least as much.

    With one resource, or proportional ones (`line`), this is one sort. With several only options
    of equal cost are compared.
    """
    found = _distinct(options)
    return found[running_maxima(found.value)] if line else found


def _distinct(options: Options) -> Options:
    """The most valuable option of every cost, by rising cost."""
    order = np.lexsort((-options.value, *options.cost.T[::-1]))
    cost = options.cost[order]
    fresh = np.concatenate([[True], (cost[1:] != cost[:-1]).any(axis=1)])
    return options[order[fresh]]


def _along_one(
    pools: list[Options], room: Int[np.ndarray, " 1"], noise: float, effort: int
) -> tuple[list[int], float]:
    """The picks where one budget binds: options are steps of one kind."""
    knapsack, places = _steps(pools, room)
    fixed = math.fsum(float(one.value[kept[0]]) for one, kept in zip(pools, places, strict=True))
    if _all_fits(knapsack):
        return [int(kept[-1]) for kept in places], 0.0
    found, missing = optimum(knapsack, fixed, 0.0, noise, effort)
    return [int(kept[o]) for kept, o in zip(places, found, strict=True)], missing


def _all_fits(knapsack: Knapsack) -> bool:
    return sum(int(item.steps[-1]) for item in knapsack.items) <= int(knapsack.room[0])


def _steps(
    pools: list[Options], room: Int[np.ndarray, " 1"]
) -> tuple[Knapsack, list[Int[np.ndarray, " _"]]]:
    """The knapsack of options along one resource, and the place of every step in its pool."""
    items, places = [], []
    for one in pools:
        order = np.lexsort((-one.value, one.cost[:, 0]))
        order = order[running_maxima(one.value[order])]
        order = order[one.cost[order, 0] <= room[0]]
        gains = one.value[order] - one.value[order[0]]
        items.append(Item(one.cost[order, 0], gains, concave=False))
        places.append(order)
    return Knapsack(tuple(items), np.ones((len(items), 1), dtype=np.int64), room), places


def _prices(
    pools: list[Options], room: Int[np.ndarray, " resources"]
) -> tuple[Float[np.ndarray, " resources"], float]:
    """The prices of least bound, and the bound."""
    if len(room) == 1:
        knapsack, places = _steps(pools, room)
        fixed = sum(float(one.value[kept[0]]) for one, kept in zip(pools, places, strict=True))
        if _all_fits(knapsack):
            return np.zeros(1), fixed + sum(float(item.gains[-1]) for item in knapsack.items)
        relaxed = relaxation(knapsack)
        return relaxed.prices, fixed + relaxed.bound
    return _several_prices(pools, room)


def _several_prices(
    pools: list[Options], room: Int[np.ndarray, " resources"]
) -> tuple[Float[np.ndarray, " resources"], float]:
    """The dual of the linear relaxation, by rows that are added where they are violated."""
    from scipy.optimize import linprog

    n, scaled = len(room), np.maximum(room, 1).astype(np.float64)
    worth = max(float(np.ptp(one.value)) for one in pools) or 1.0
    rows: list[set[int]] = [{0, int(np.argmax(one.value))} for one in pools]
    best, found = math.inf, np.zeros(n)
    for _ in range(ROUNDS):
        # Variables: prices per whole room, then the profit of every item, in units of `worth`.
        matrix, right = [], []
        for i, one in enumerate(pools):
            for o in sorted(rows[i]):
                row = np.zeros(n + len(pools))
                row[:n], row[n + i] = -one.cost[o] / scaled, -1.0
                matrix.append(row)
                right.append(-float(one.value[o]) / worth)
        weights = np.concatenate([room / scaled, np.ones(len(pools))])
        free = [(0.0, None)] * n + [(None, None)] * len(pools)
        solution = linprog(weights, np.array(matrix), np.array(right), bounds=free, method="highs")
        if solution.x is None or solution.fun is None:
            break
        prices = np.maximum(solution.x[:n], 0.0) * worth / scaled
        tops = [int(np.argmax(one.value - one.cost @ prices)) for one in pools]
        profits = sum(
            float(one.value[t] - one.cost[t] @ prices) for one, t in zip(pools, tops, strict=True)
        )
        bound = float(prices @ room) + profits
        if bound < best:
            best, found = bound, prices
        if best - solution.fun * worth <= SETTLED * max(abs(best), worth) or all(
            t in known for t, known in zip(tops, rows, strict=True)
        ):
            break
        for t, known in zip(tops, rows, strict=True):
            known.add(t)
    return found, best


def _along_several(
    pools: list[Options], room: Int[np.ndarray, " resources"], noise: float, effort: int
) -> tuple[list[int], float]:
    """The picks where several budgets bind, and by how much others may be better."""
    prices, bound = _several_prices(pools, room)
    profits = [one.value - one.cost @ prices for one in pools]
    wastes = [float(p.max()) - p for p in profits]
    picks = _repaired(pools, wastes, room)

    def value(chosen: Sequence[int]) -> float:
        return math.fsum(float(one.value[p]) for one, p in zip(pools, chosen, strict=True))

    gain, proven = value(picks), bound
    for part in (effort // 25, effort // 5, effort):
        gap = bound - gain - noise
        if proven - gain <= noise or gap <= 0:
            break
        cores = []
        for i, (one, waste) in enumerate(zip(pools, wastes, strict=True)):
            alive = np.flatnonzero(waste < gap)
            cores.append(
                Core((i,), alive[:, None], one.cost[alive], waste[alive], chain=len(alive) == 1)
            )
        found = search_cores(cores, room, prices, gap, part)
        if found.options is not None:
            picks = [int(o) for o in found.options]
            gain = value(picks)
        proven = max(gain, min(proven, bound - found.least_unseen))
    return picks, proven - gain


def _repaired(
    pools: list[Options], wastes: list[Float[np.ndarray, " _"]], room: Int[np.ndarray, " resources"]
) -> list[int]:
    """The best options at the prices, made to fit by what wastes least for the room it frees."""
    picks = [int(np.argmin(waste)) for waste in wastes]
    scaled = np.maximum(room, 1)
    left = room - sum(one.cost[p] for one, p in zip(pools, picks, strict=True))
    while (left < 0).any():
        best, move = math.inf, (0, 0)
        for i, (one, waste) in enumerate(zip(pools, wastes, strict=True)):
            over = np.maximum(-(left + one.cost[picks[i]] - one.cost), 0) / scaled
            freed = float((np.maximum(-left, 0) / scaled).sum()) - over.sum(axis=1)
            with np.errstate(divide="ignore", invalid="ignore"):
                rate = np.where(freed > 0, (waste - waste[picks[i]]) / freed, math.inf)
            o = int(np.argmin(rate))
            if rate[o] < best:
                best, move = float(rate[o]), (i, o)
        i, o = move
        assert math.isfinite(best), "the cheapest options fit"
        left = left + pools[i].cost[picks[i]] - pools[i].cost[o]
        picks[i] = o
    return picks
