"""The best options for a problem: a plan from below, a bound from above, a search between them."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int

from headwise.planning._choices import Problem
from headwise.planning._relaxation import relaxation
from headwise.planning._search import search

EFFORT = 5_000_000
"""Pairs of states and options that the search may look at, a few seconds' worth; a bound on work
that, unlike a time limit, gives the same answer on every machine."""


def optimum(
    problem: Problem, fixed: float, max_gap: float, noise: float, effort: int
) -> tuple[list[int], float]:
    """The option of every competing item, and by how much the optimum may be better."""
    if not problem.items:
        return [], 0.0
    relaxed = relaxation(problem)
    options = _filled(problem, relaxed.start, relaxed.prices)
    value = _gain(problem, options)
    bound = max(relaxed.bound, value)
    for part in (effort // 25, effort // 5, effort):
        enough = max(noise, max_gap * max(abs(fixed + value), abs(fixed + bound)))
        gap = relaxed.bound - value - enough
        if bound - value <= enough or gap <= 0:
            break
        found = search(problem, relaxed, gap, part)
        if found.options is not None:
            options, value = found.options, _gain(problem, found.options)
        bound = max(value, min(bound, relaxed.bound - found.missed))
    return options.tolist(), bound - value


def _filled(
    problem: Problem,
    start: Int[np.ndarray, " items"],
    prices: Float[np.ndarray, " resources"],
) -> Int[np.ndarray, " items"]:
    """More steps, best gain per price first, until no item's next option fits."""
    options = start.copy()
    steps = np.array([one.steps[o] for one, o in zip(problem.items, options, strict=True)])
    left = problem.room - steps @ problem.cost
    assert (left >= 0).all()
    prices = np.maximum(prices, 1e-9 * float(prices.max()) or 1.0)  # nothing is free
    ahead = np.zeros(len(options), dtype=np.int64)  # steps to the next option; 0 if there is none
    worth = np.zeros(len(options))

    def look(i: int) -> None:
        one, o = problem.items[i], options[i]
        last = o + 1 == len(one.steps)
        ahead[i] = 0 if last else one.steps[o + 1] - one.steps[o]
        price = float((ahead[i] * problem.cost[i]) @ prices)
        worth[i] = 0.0 if last else (one.gains[o + 1] - one.gains[o]) / price

    for i in range(len(options)):
        look(i)
    while True:
        fits = (ahead > 0) & (ahead[:, None] * problem.cost <= left).all(axis=1)
        if not fits.any():
            return options
        i = int(np.argmax(np.where(fits, worth, -1.0)))
        left = left - ahead[i] * problem.cost[i]
        options[i] += 1
        look(i)


def _gain(problem: Problem, options: Int[np.ndarray, " items"]) -> float:
    return math.fsum(float(one.gains[o]) for one, o in zip(problem.items, options, strict=True))
