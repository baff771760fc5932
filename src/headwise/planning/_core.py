"""The core: the few options that can still be part of an optimum.

Relative to the prices λ of the relaxation, a plan's value is the bound minus what it wastes:

    value = bound − Σ_items waste_j − λ·(room left over),     waste_j ≥ 0.

Given any plan that misses the bound by `gap`, an option that alone wastes as much is in no better
plan (reduced-cost fixing). What survives is typically a few options around the margin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from headwise.planning._choices import Problem
from headwise.planning._relaxation import Relaxation

PAIRS = 4_000_000
"""Most pairs of options or states looked at in one step; a memory bound."""


@dataclass(frozen=True, slots=True)
class Core:
    """The surviving options of one item, or of several together: what each costs and wastes.

    `picks[j]` are the options of `items` that make the joint option j.
    """

    items: tuple[int, ...]
    picks: Int[np.ndarray, "options items"]
    cost: Int[np.ndarray, "options resources"]
    waste: Float[np.ndarray, " options"]


def _item_cores(problem: Problem, relaxed: Relaxation, gap: float) -> list[Core]:
    """The options of every item that waste less than the gap (the best one wastes nothing)."""
    cores = []
    reach = _reach(problem)
    for i, item in enumerate(problem.items):
        profit = item.gains - (problem.cost[i] @ relaxed.prices) * item.steps
        waste = profit.max() - profit
        low, high = 0, len(waste)
        if reach is not None:
            low, high = max(int(relaxed.start[i]) - reach, 0), int(relaxed.start[i]) + reach + 1
        alive = low + np.flatnonzero(waste[low:high] < gap)
        cost = item.steps[alive][:, None] * problem.cost[i]
        cores.append(Core((i,), alive[:, None], cost, waste[alive]))
    return cores


def joint_cores(problem: Problem, relaxed: Relaxation, gap: float, effort: int) -> list[Core]:
    """The cores of all items; with several resources, those of proportional costs are joined.

    Along one direction of cost, of two joint options either one is dominated or it costs more and
    is worth more. A value dimension and a query-key plane, which costs twice as much of everything,
    are thereby one core per kind of layer. Cores too large to be joined within the effort stay.
    """
    cores, prices = _item_cores(problem, relaxed, gap), relaxed.prices
    if len(prices) == 1:
        return cores
    pairs = min(PAIRS, 1_000 + 2 * effort // (1 + sum(len(core.waste) > 1 for core in cores)))
    open_cores: dict[tuple[int, ...], Core] = {}
    done = []
    for core in cores:
        span = core.cost[-1] - core.cost[0]
        direction = tuple((span // max(int(np.gcd.reduce(span)), 1)).tolist())
        other = open_cores.pop(direction, None)
        if other is not None and len(other.waste) * len(core.waste) <= pairs:
            open_cores[direction] = _join(other, core, prices, gap)
        else:
            open_cores[direction] = core
            if other is not None:
                done.append(other)
    return [*done, *open_cores.values()]


def _join(a: Core, b: Core, prices: Float[np.ndarray, " resources"], gap: float) -> Core:
    """The undominated pairs of options of two cores whose costs are proportional."""
    i, j = np.nonzero(a.waste[:, None] + b.waste < gap)
    cost, waste = a.cost[i] + b.cost[j], a.waste[i] + b.waste[j]
    gain = cost @ prices - waste
    order = np.lexsort((-gain, cost.sum(axis=1)))
    kept = order[records(gain[order])]
    picks = np.concatenate([a.picks[i[kept]], b.picks[j[kept]]], axis=1)
    return Core(a.items + b.items, picks, cost[kept], waste[kept])


def _reach(problem: Problem) -> int | None:
    """How far from the relaxed optimum some optimum of a concave one-budget problem lies, in steps.

    Turn one plan into the other a step at a time, adding while there is room and removing while
    there is none: the room stays within ±Δ, the largest cost of a step. After 2Δ + 1 steps it must
    have repeated, and what happened in between cost nothing; the relaxed plan being optimal, it
    gained nothing either and can be left out. (Eisenbrand and Weismantel, 2018, for one row.)
    Without this, curves of equal gain per cost would leave every option in the core.
    """
    if len(problem.room) > 1 or not all(item.concave for item in problem.items):
        return None
    return 2 * int(problem.cost.max()) + 2


def records(values: Float[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Where a value exceeds every one before it."""
    before = np.concatenate([[-np.inf], np.maximum.accumulate(values)[:-1]])[: len(values)]
    return values > before
