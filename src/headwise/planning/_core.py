"""The exact search: dynamic programming over the few options that can still be part of an optimum.

Relative to the prices λ of the relaxation, a plan's value is the bound minus what it wastes:

    value = bound − Σ_items waste_j − λ·(room left over),     waste_j ≥ 0.

Given any plan that misses the bound by `gap`, an option that alone wastes as much is in no better
plan (reduced-cost fixing). What survives is the core, typically a few options around the margin.
States (room left, waste so far) are extended item by item. A state is dropped when its waste, plus
the price of the room that the remaining items cannot use up, reaches the gap, or when another state
is as good in everything. If there are too many states, the least wasteful are kept and the least
waste among the others is remembered: the optimum is then proven up to that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

from headwise.planning._choices import Problem
from headwise.planning._relaxation import Relaxation

PAIRS = 4_000_000
"""Most (state, option) pairs looked at in one step; a memory bound."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan seen (None: none below the gap); no other plan wastes less than `missed`."""

    options: Int[np.ndarray, "items"] | None
    missed: float


@dataclass(frozen=True, slots=True)
class _Core:
    """The surviving options of one item: index, cost beyond the first of them, and waste."""

    item: int
    options: Int[np.ndarray, "options"]
    cost: Int[np.ndarray, "options resources"]
    waste: Float[np.ndarray, "options"]


@dataclass(frozen=True, slots=True)
class _States:
    """Partial plans: room left, waste so far, least waste when completed; and where from."""

    left: Int[np.ndarray, "states resources"]
    waste: Float[np.ndarray, "states"]
    least: Float[np.ndarray, "states"]
    parent: Int[np.ndarray, "states"]
    option: Int[np.ndarray, "states"]

    def __getitem__(self, kept: np.ndarray) -> _States:
        return _States(
            self.left[kept],
            self.waste[kept],
            self.least[kept],
            self.parent[kept],
            self.option[kept],
        )


def search(problem: Problem, relaxed: Relaxation, gap: float, width: int) -> Found:
    """The plan of least waste below `gap`, looking at no more than `width` states at a time."""
    options, cores = _cores(problem, relaxed, gap)
    steps = np.array([item.steps[o] for item, o in zip(problem.items, options, strict=True)])
    left = problem.room - steps @ problem.cost
    if (left < 0).any():
        return Found(None, gap)
    if not cores:
        return Found(options if float(left @ relaxed.prices) < gap else None, gap)
    usable = sum((core.cost[-1] for core in cores), start=np.zeros_like(left))
    states = _States(left[None], np.zeros(1), np.zeros(1), np.zeros(1, int), np.zeros(1, int))
    missed, history = gap, []
    for core, following in pairwise(cores):
        usable = usable - core.cost[-1]
        states = _undominated(_extended(states, core, usable, relaxed.prices, gap), relaxed.prices)
        pairs = PAIRS // len(following.options) + 1
        states, lost = _narrowed(states, width if following is cores[-1] else min(width, pairs))
        missed = min(missed, lost)
        history.append((states.parent, states.option))
    states = _finished(states, cores[-1], relaxed.prices)
    if len(states.least) == 0 or states.least.min() >= gap:
        return Found(None, missed)
    at = int(np.argmin(states.least))
    history.append((states.parent, states.option))
    for core, (parent, option) in zip(reversed(cores), reversed(history), strict=True):
        options[core.item] = core.options[option[at]]
        at = int(parent[at])
    return Found(options, missed)


def _cores(
    problem: Problem, relaxed: Relaxation, gap: float
) -> tuple[Int[np.ndarray, "items"], list[_Core]]:
    """The first surviving option of each item, and the items with more than one, in search order.

    Items that use much come first, so that the rest can be seen not to use up what is left. The one
    with the most options comes last, where the largest option that fits is the best.
    """
    first = np.zeros(len(problem.items), dtype=np.int64)
    cores = []
    reach = _reach(problem)
    for i, item in enumerate(problem.items):
        profit = item.gains - (problem.cost[i] @ relaxed.prices) * item.steps
        waste = profit.max() - profit
        low = 0
        if reach is not None:
            low = max(int(relaxed.start[i]) - reach, 0)
            waste = waste[low : int(relaxed.start[i]) + reach + 1]
        alive = np.flatnonzero(waste < gap)
        first[i] = low + alive[0]
        if len(alive) > 1:
            steps = item.steps[low + alive] - item.steps[first[i]]
            cores.append(_Core(i, low + alive, steps[:, None] * problem.cost[i], waste[alive]))
    cores.sort(key=lambda core: float((core.cost[-1] / problem.room).max()), reverse=True)
    if cores:
        cores.append(cores.pop(max(range(len(cores)), key=lambda c: len(cores[c].options))))
    return first, cores


def _reach(problem: Problem) -> int | None:
    """How far from the relaxed optimum some optimum of a concave one-budget problem lies, in steps.

    Undo the differences between the two plans one at a time, adding while there is room and removing
    while there is none: the room left stays within ±Δ, the largest step cost. Past 2Δ + 1 steps it
    repeats, and what happened in between costs nothing; the relaxed plan being optimal, it gains
    nothing either and can be left out. (Eisenbrand and Weismantel, 2018, one row.) Without this,
    curves of equal gain per cost would leave every option in the core.
    """
    if len(problem.room) > 1 or not all(item.concave for item in problem.items):
        return None
    return 2 * int(problem.cost.max()) + 2


def _extended(
    states: _States,
    core: _Core,
    usable: Int[np.ndarray, "resources"],
    prices: Float[np.ndarray, "resources"],
    gap: float,
) -> _States:
    """Every state with every option, as long as it fits and may still end below the gap."""
    parent, option = np.nonzero(states.waste[:, None] + core.waste < gap)
    left = states.left[parent] - core.cost[option]
    fits = (left >= 0).all(axis=1)
    parent, option, left = parent[fits], option[fits], left[fits]
    waste = states.waste[parent] + core.waste[option]
    least = waste + np.maximum(left - usable, 0) @ prices
    return _States(left, waste, least, parent, option)[least < gap]


def _finished(
    states: _States, core: _Core, prices: Float[np.ndarray, "resources"]
) -> _States:
    """Each state with the largest option of the last item that fits: the more the better."""
    option = np.full(len(states.waste), len(core.options) - 1)
    for r in range(core.cost.shape[1]):
        fits = np.searchsorted(core.cost[:, r], states.left[:, r], side="right") - 1
        option = np.minimum(option, fits)
    left = states.left - core.cost[option]
    waste = states.waste + core.waste[option]
    return _States(left, waste, waste + left @ prices, np.arange(len(waste)), option)


def _undominated(states: _States, prices: Float[np.ndarray, "resources"]) -> _States:
    """Without states that another equals or beats in value and in every room left.

    With several resources only states of equal room are compared.
    """
    if states.left.shape[1] == 1:
        value = -(states.waste + states.left @ prices)
        order = np.lexsort((-value, -states.left[:, 0]))
        value = value[order]
        best = np.maximum.accumulate(value)
        return states[order[np.concatenate([[True], value[1:] > best[:-1]])[: len(value)]]]
    order = np.lexsort((states.waste, *states.left.T))
    left = states.left[order]
    fresh = np.concatenate([[True], (left[1:] != left[:-1]).any(axis=1)])[: len(order)]
    return states[order[fresh]]


def _narrowed(states: _States, width: int) -> tuple[_States, float]:
    """The `width` most promising states, and the least waste of the rest."""
    if len(states.waste) <= width:
        return states, np.inf
    order = np.argsort(states.least, kind="stable")
    return states[np.sort(order[:width])], float(states.least[order[width]])
