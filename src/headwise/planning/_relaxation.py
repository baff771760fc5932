"""The relaxation: what a budget could buy if steps were divisible, and the prices this implies.

With a price λ per unit of each resource, no plan within the budgets `room` is worth more than

    L(λ) = λ·room + Σ_items max_j (gain_j − λ·cost·steps_j),

for any λ ≥ 0 (weak Lagrangian duality), so a bound proven here never depends on how well λ was
found. The best λ is the dual of the linear relaxation over the steps of each item's concave hull.
With one budget it is read off the steps sorted by gain per cost (Dantzig): the first that does not
fit. With several, a linear program decides; see `_several_prices`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from headwise.planning._choices import Item, Problem


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Prices, the bound they prove, and the option of each item in a plan near the optimum."""

    prices: Float[np.ndarray, " resources"]
    bound: float
    start: Int[np.ndarray, " items"]


@dataclass(frozen=True, slots=True)
class _Rises:
    """The hull steps of all items in a row: gain, cost, the item, and the option reached."""

    gain: Float[np.ndarray, " rises"]
    cost: Int[np.ndarray, "rises resources"]
    item: Int[np.ndarray, " rises"]
    option: Int[np.ndarray, " rises"]


def relaxation(problem: Problem) -> Relaxation:
    """The relaxed optimum of a problem with at least one item and one resource."""
    rises, one = _rises(problem), len(problem.room) == 1
    prices, taken = _one_price(rises, problem) if one else _several_prices(rises, problem)
    profit = rises.gain - rises.cost @ prices
    bound = float(prices @ problem.room) + float(profit[profit > 0].sum())
    start = np.zeros(len(problem.items), dtype=np.int64)
    np.maximum.at(start, rises.item[taken], rises.option[taken])
    return Relaxation(prices, bound, start)


def _one_price(
    rises: _Rises, problem: Problem
) -> tuple[Float[np.ndarray, " 1"], Int[np.ndarray, " _"]]:
    """The price for one budget, and the steps that fit before the one that sets it."""
    density = _falling(rises.gain / rises.cost[:, 0], rises)
    order = np.argsort(-density, kind="stable")
    fits = int(np.count_nonzero(np.cumsum(rises.cost[order, 0]) <= problem.room[0]))
    return density[order[fits : fits + 1]], order[:fits]


def _falling(density: Float[np.ndarray, " rises"], rises: _Rises) -> Float[np.ndarray, " rises"]:
    """Densities that never rise within an item.

    On a hull they do not, but for round-off, and a stable sort then keeps an item's steps in turn:
    taking the k best of them is taking its first k.
    """
    starts = np.flatnonzero(np.diff(rises.item, prepend=-1))
    parts = np.split(density, starts[1:])
    return np.concatenate([np.minimum.accumulate(part) for part in parts])


def _hull(item: Item) -> Int[np.ndarray, " corners"]:
    """The options on the upper concave hull (Andrew's monotone chain)."""
    if item.concave:
        return np.arange(len(item.steps))
    steps, gains = item.steps.tolist(), item.gains.tolist()
    corners = [0]
    for j in range(1, len(steps)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (gains[b] - gains[a]) * (steps[j] - steps[a]) > (gains[j] - gains[a]) * (
                steps[b] - steps[a]
            ):
                break
            corners.pop()
        corners.append(j)
    return np.array(corners)


def _rises(problem: Problem) -> _Rises:
    corners = [_hull(item) for item in problem.items]
    owner = np.repeat(np.arange(len(corners)), [len(c) - 1 for c in corners])
    pairs = list(zip(problem.items, corners, strict=True))
    gain = np.concatenate([np.diff(item.gains[c]) for item, c in pairs])
    width = np.concatenate([np.diff(item.steps[c]) for item, c in pairs])
    option = np.concatenate([c[1:] for c in corners])
    return _Rises(gain, problem.cost[owner] * width[:, None], owner, option)


@dataclass(frozen=True, slots=True)
class _Kind:
    """All steps whose cost points in one direction, best first, as one concave curve.

    The relaxation cannot tell them apart: `amount` of the direction buys `gain`.
    """

    direction: Float[np.ndarray, " resources"]
    rises: Int[np.ndarray, " rises"]
    density: Float[np.ndarray, " rises"]
    amount: Float[np.ndarray, " rises+1"]
    gain: Float[np.ndarray, " rises+1"]


def _kinds(rises: _Rises, problem: Problem) -> list[_Kind]:
    factor = np.gcd.reduce(problem.cost, axis=1)
    directions, kind_of_item = np.unique(
        problem.cost // factor[:, None], axis=0, return_inverse=True
    )
    kind = kind_of_item[rises.item]
    axis = np.argmax(directions, axis=1)
    amount = rises.cost[np.arange(len(kind)), axis[kind]] / directions[kind, axis[kind]]
    density = _falling(rises.gain / amount, rises)
    order = np.lexsort((-density, kind))
    kinds = []
    for direction, part in zip(
        directions, np.split(order, np.cumsum(np.bincount(kind))[:-1]), strict=True
    ):
        total = [np.concatenate([[0.0], np.cumsum(x[part])]) for x in (amount, rises.gain)]
        kinds.append(_Kind(direction / problem.room, part, density[part], *total))
    return kinds


def _several_prices(
    rises: _Rises, problem: Problem
) -> tuple[Float[np.ndarray, " resources"], Int[np.ndarray, " _"]]:
    """Prices for several budgets, and the whole steps in the optimum of the linear program.

    A program with every step as a variable is slow, and only the steps near the margin decide. Each
    kind of step starts in a few coarse pieces. The prices found say where each curve breaks (its
    density falls below the price of its direction); pieces are split there, finer the nearer, and
    the program is solved again until every break is the end of a piece: then no piece is worth
    splitting and the prices are those of the full program.
    """
    kinds = _kinds(rises, problem)
    ends = [np.unique(np.linspace(0, len(k.density), 9).astype(np.int64)) for k in kinds]
    near = np.concatenate([[0], 2 ** np.arange(20), -(2 ** np.arange(20))])
    scale = float(np.median(np.concatenate([k.density / k.direction.sum() for k in kinds])))
    best, prices, amounts = np.inf, np.zeros(len(problem.room)), np.zeros(len(kinds))
    for _ in range(20):
        trial, trial_amounts = _program(kinds, ends, scale)
        value, settled = float(trial.sum()), True
        for k, kind in enumerate(kinds):
            price = float(trial @ kind.direction)
            at = int(np.count_nonzero(kind.density > price))
            value += float(kind.gain[at]) - price * float(kind.amount[at])
            if at not in ends[k]:
                settled = False
                ends[k] = np.union1d(ends[k], np.clip(at + near, 0, len(kind.density)))
        if value < best:
            best, prices, amounts = value, trial, trial_amounts
        if settled:
            break
        scale = float(trial.max()) or scale
    return np.asarray(prices / problem.room), _whole(kinds, amounts, rises, problem)


def _whole(
    kinds: list[_Kind], amounts: Float[np.ndarray, " kinds"], rises: _Rises, problem: Problem
) -> Int[np.ndarray, " _"]:
    """The steps of each kind that its amount pays for in full, less the program's round-off."""
    for share in (1e-9, 1e-6, 1e-3):
        taken = np.concatenate(
            [
                kind.rises[: int(np.searchsorted(kind.amount, most, side="right")) - 1]
                for kind, most in zip(kinds, (1 - share) * amounts + 1e-12, strict=True)
            ]
        )
        if (rises.cost[taken].sum(axis=0) <= problem.room).all():
            return taken
    return np.zeros(0, dtype=np.int64)


def _program(
    kinds: list[_Kind], ends: list[Int[np.ndarray, " _"]], scale: float
) -> tuple[Float[np.ndarray, " resources"], Float[np.ndarray, " kinds"]]:
    """Prices per whole budget, and the amount bought of each kind, with pieces that end at `ends`.

    The solver's tolerances are absolute: each variable is scaled to a cost near 1, and gains by the
    expected price.
    """
    from scipy.optimize import linprog

    pieces = [len(e) - 1 for e in ends]
    amount = np.concatenate([np.diff(k.amount[e]) for k, e in zip(kinds, ends, strict=True)])
    gain = np.concatenate([np.diff(k.gain[e]) for k, e in zip(kinds, ends, strict=True)])
    direction = np.repeat([k.direction for k in kinds], pieces, axis=0)
    size = direction.sum(axis=1)
    worth = gain / (amount * size * scale)
    solution = linprog(
        -np.minimum(worth, 1e6),
        A_ub=(direction / size[:, None]).T,
        b_ub=np.ones(direction.shape[1]),
        bounds=[(0.0, most) for most in (amount * size).tolist()],
        method="highs",
    )
    if solution.status != 0:  # no prices: the bound is valid, if loose
        return np.zeros(direction.shape[1]), np.zeros(len(kinds))
    bought = np.add.reduceat(solution.x / size, np.cumsum([0, *pieces[:-1]]))
    return np.maximum(-solution.ineqlin.marginals, 0.0) * scale, bought
