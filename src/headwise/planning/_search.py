"""The exact search: dynamic programming over the core.

States (room left, waste so far) are extended core by core. A state is dropped when its waste, plus
the price of the room that the remaining cores cannot use up, reaches the gap, or when another state
is as good in everything. If there are too many states, the least wasteful are kept and the least
waste among the others is remembered: the optimum is then proven up to that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

from headwise.planning._choices import Problem
from headwise.planning._core import PAIRS, Core, joint_cores, records
from headwise.planning._relaxation import Relaxation

MIXER = 0x1E3779B97F4A7C15
"""An odd number that spreads rooms over 64 bits, so that equal ones can be brought together by one
sort; rooms that collide are still told apart."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan seen (None: none below the gap); no other plan wastes less than `missed`."""

    options: Int[np.ndarray, " items"] | None
    missed: float


@dataclass(frozen=True, slots=True)
class _States:
    """Partial plans: room left, waste so far, least waste when completed; and where from."""

    left: Int[np.ndarray, "states resources"]
    waste: Float[np.ndarray, " states"]
    least: Float[np.ndarray, " states"]
    parent: Int[np.ndarray, " states"]
    option: Int[np.ndarray, " states"]

    def __getitem__(self, kept: np.ndarray) -> _States:
        return _States(
            self.left[kept],
            self.waste[kept],
            self.least[kept],
            self.parent[kept],
            self.option[kept],
        )


def search(problem: Problem, relaxed: Relaxation, gap: float, effort: int) -> Found:
    """The plan of least waste below `gap`, looking at about `effort` (state, option) pairs."""
    cores = joint_cores(problem, relaxed, gap, effort)
    left = problem.room - np.sum([core.cost[0] for core in cores], axis=0)
    if (left < 0).any():
        return Found(None, gap)
    options = np.zeros(len(problem.items), dtype=np.int64)
    for core in cores:
        options[list(core.items)] = core.picks[0]
    cores = _ordered([core for core in cores if len(core.waste) > 1], problem)
    if not cores:
        return Found(options if float(left @ relaxed.prices) < gap else None, gap)
    usable = np.sum([core.cost[-1] - core.cost[0] for core in cores], axis=0)
    width = effort // sum(len(core.waste) for core in cores) + 1
    none = np.zeros(1, dtype=np.int64)
    states = _States(left[None], np.zeros(1), np.zeros(1), none, none)
    missed, history = gap, []
    for core, following in pairwise(cores):
        usable = usable - (core.cost[-1] - core.cost[0])
        states = _undominated(_extended(states, core, usable, relaxed.prices, gap), relaxed.prices)
        pairs = PAIRS // len(following.waste) + 1
        states, lost = _narrowed(states, width if following is cores[-1] else min(width, pairs))
        missed = min(missed, lost)
        history.append((states.parent, states.option))
    states = _finished(states, cores[-1], relaxed.prices)
    if len(states.least) == 0 or states.least.min() >= gap:
        return Found(None, missed)
    at = int(np.argmin(states.least))
    history.append((states.parent, states.option))
    for core, (parent, option) in zip(reversed(cores), reversed(history), strict=True):
        options[list(core.items)] = core.picks[option[at]]
        at = int(parent[at])
    return Found(options, missed)


def _ordered(cores: list[Core], problem: Problem) -> list[Core]:
    """The order of search.

    Cores that span much come first, so that the rest can be seen not to use up what is left. The
    one with the most options comes last, where the largest option that fits is the best.
    """

    def span(core: Core) -> float:
        return float(((core.cost[-1] - core.cost[0]) / problem.room).max())

    cores = sorted(cores, key=span, reverse=True)
    if cores:
        cores.append(cores.pop(max(range(len(cores)), key=lambda c: len(cores[c].waste))))
    return cores


def _extended(
    states: _States,
    core: Core,
    usable: Int[np.ndarray, " resources"],
    prices: Float[np.ndarray, " resources"],
    gap: float,
) -> _States:
    """Every state with every option, as long as it fits and may still end below the gap."""
    parent, option = np.nonzero(states.waste[:, None] + core.waste < gap)
    left = states.left[parent] - (core.cost - core.cost[0])[option]
    fits = (left >= 0).all(axis=1)
    parent, option, left = parent[fits], option[fits], left[fits]
    waste = states.waste[parent] + core.waste[option]
    least = waste + np.maximum(left - usable, 0) @ prices
    return _States(left, waste, least, parent, option)[least < gap]


def _finished(states: _States, core: Core, prices: Float[np.ndarray, " resources"]) -> _States:
    """Each state with the largest option of the last item that fits: the more the better."""
    cost = core.cost - core.cost[0]
    option = np.full(len(states.waste), len(core.waste) - 1)
    for r in range(cost.shape[1]):
        option = np.minimum(option, np.searchsorted(cost[:, r], states.left[:, r], "right") - 1)
    left = states.left - cost[option]
    waste = states.waste + core.waste[option]
    return _States(left, waste, waste + left @ prices, np.arange(len(waste)), option)


def _undominated(states: _States, prices: Float[np.ndarray, " resources"]) -> _States:
    """Without states that another equals or beats in value and in every room left.

    With several resources only states of equal room are compared.
    """
    if states.left.shape[1] == 1:
        value = -(states.waste + states.left @ prices)
        order = np.lexsort((-value, -states.left[:, 0]))
        return states[order[records(value[order])]]
    mixed = states.left[:, 0].copy()
    for column in states.left.T[1:]:
        mixed *= MIXER
        mixed += column
    order = np.lexsort((states.waste, mixed))
    left = states.left[order]
    fresh = np.concatenate([[True], (left[1:] != left[:-1]).any(axis=1)])[: len(order)]
    return states[order[fresh]]


def _narrowed(states: _States, width: int) -> tuple[_States, float]:
    """The `width` most promising states, and the least waste of the rest."""
    if len(states.waste) <= width:
        return states, np.inf
    order = np.argsort(states.least, kind="stable")
    return states[np.sort(order[:width])], float(states.least[order[width]])
