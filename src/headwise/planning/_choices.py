"""From curves to choices: ties summed, forbidden and useless options dropped, equal curves merged.

    curve ─┐ same tie: one number of units
    curve ─┴─► group ─┐ concave, same cost of a step: one sorted list of steps
               group ─┴─► item ─► the solver picks how many steps

Merging is exact. When several concave curves have the same cost per step, the best way to spend t
steps on all of them together is to take the t largest increments, whichever curve owns them (the
increments of one concave curve come in the right order by themselves). Thousands of heads thereby
become one item per kind of head, and the symmetry between equal heads is gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int

from headwise.errors import BudgetError

ROUND_OFF = 8 * float(np.finfo(np.float64).eps)
"""A curve that is concave up to this share of its largest value is concave: cumulative sums of
sorted numbers are no better than that."""


@dataclass(frozen=True, slots=True, eq=False)  # a key, by identity
class Group:
    """The options that curves of one tie share: allowed units, their summed value, unit costs."""

    members: tuple[int, ...]
    units: Int[np.ndarray, " options"]
    values: Float[np.ndarray, " options"]
    unit_cost: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)  # a key, by identity
class Item:
    """One choice: `steps[j]` steps beyond the least allowed plan are worth `gains[j]`.

    Both lists start at 0 and increase strictly, since an option that costs more must be worth more.
    `units[g]` holds what each step count means for the group `groups[g]`; when several groups were
    merged, `owner` says which of them each step in turn belongs to.
    """

    cost: tuple[int, ...]
    steps: Int[np.ndarray, " options"]
    gains: Float[np.ndarray, " options"]
    concave: bool
    groups: tuple[int, ...]
    units: tuple[Int[np.ndarray, " _"], ...]
    owner: Int[np.ndarray, " _"] | None = None

    def group_units(self, option: int) -> list[int]:
        """The units of each group when this option is chosen."""
        if self.owner is None:
            return [int(self.units[0][option])]
        taken = np.bincount(self.owner[:option], minlength=len(self.groups))
        return [int(units[count]) for units, count in zip(self.units, taken, strict=True)]


def items(groups: Sequence[Group], room: Sequence[int]) -> list[Item]:
    """One item per group: the useful options that fit, alone, into what the least plan leaves."""
    whole = tuple(groups)
    return [
        one
        for same in _alike(whole)
        for one in _same_grid(whole, same, _fitting(whole[same[0]], room))
    ]


@lru_cache(maxsize=8)  # many budgets are tried on the same groups
def _alike(groups: tuple[Group, ...]) -> tuple[tuple[int, ...], ...]:
    """Places of groups with the same allowed units and costs."""
    alike: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}
    for g, group in enumerate(groups):
        alike.setdefault((group.units.tobytes(), group.unit_cost), []).append(g)
    return tuple(map(tuple, alike.values()))


def _fitting(group: Group, room: Sequence[int]) -> int:
    """How many of the group's options fit, alone, into what the least plan leaves."""
    units = group.units
    most = min((r // c for r, c in zip(room, group.unit_cost, strict=True) if c), default=None)
    if most is None or most >= int(units[-1] - units[0]):
        return len(units)
    return int(np.searchsorted(units, units[0] + most, side="right"))


@lru_cache(maxsize=256)
def _same_grid(groups: tuple[Group, ...], same: tuple[int, ...], fitting: int) -> tuple[Item, ...]:
    """Items of groups with the same allowed units and costs, as rows of one matrix for speed."""
    units, cost = groups[same[0]].units[:fitting], groups[same[0]].unit_cost
    steps, stride = _steps(units)
    values = np.stack([groups[g].values[: len(units)] for g in same])
    rise = values[:, 1:] - values[:, :-1]
    noise = ROUND_OFF * np.abs(values).max(axis=1, keepdims=True)
    simple = (rise > 0).all(axis=1) & (rise[:, 1:] - rise[:, :-1] <= noise).all(axis=1)
    if int(steps[-1]) != len(steps) - 1:
        simple[:] = False
    gains = np.zeros_like(values)
    gains[:, 1:] = np.cumsum(np.minimum.accumulate(rise, axis=1), axis=1)
    step_cost = tuple(c * stride for c in cost)
    return tuple(
        Item(step_cost, steps, gains[row], True, (g,), (units,))
        if simple[row]
        else _item(g, units, values[row], cost)
        for row, g in enumerate(same)
    )


def _item(
    g: int,
    units: Int[np.ndarray, " options"],
    values: Float[np.ndarray, " options"],
    cost: tuple[int, ...],
) -> Item:
    """Any curve: options that are not worth more than a cheaper one are dropped."""
    best = np.maximum.accumulate(values)
    kept = np.concatenate([[True], values[1:] > best[:-1]])
    units, values = units[kept], values[kept]
    steps, stride = _steps(units)
    rise = np.diff(values)
    noise = ROUND_OFF * float(np.abs(values).max())
    concave = int(steps[-1]) == len(steps) - 1 and bool((np.diff(rise) <= noise).all())
    gains = values - values[0]
    if concave:  # exactly, from here on
        gains = np.concatenate([[0.0], np.cumsum(np.minimum.accumulate(rise))])
    return Item(tuple(c * stride for c in cost), steps, gains, concave, (g,), (units,))


def _steps(units: Int[np.ndarray, " options"]) -> tuple[Int[np.ndarray, " options"], int]:
    """Units beyond the first, counted in the largest stride that divides them all."""
    beyond = units - units[0]
    stride = int(np.gcd.reduce(beyond)) or 1
    return beyond // stride, stride


def merged(choices: Sequence[Item]) -> list[Item]:
    """The same choices with concave items of equal step cost joined into one (see above)."""
    return list(_merged(tuple(choices)))


@lru_cache(maxsize=8)
def _merged(choices: tuple[Item, ...]) -> tuple[Item, ...]:
    alike: dict[tuple[int, ...], list[Item]] = {}
    result = []
    for choice in choices:
        if choice.concave and len(choice.steps) > 1:
            alike.setdefault(choice.cost, []).append(choice)
        else:
            result.append(choice)
    for cost, same in alike.items():
        if len(same) == 1:
            result.append(same[0])
            continue
        rises = np.concatenate([one.gains[1:] - one.gains[:-1] for one in same])
        owners = np.repeat(np.arange(len(same)), [len(one.gains) - 1 for one in same])
        order = np.argsort(-rises, kind="stable")
        gains = np.concatenate([[0.0], np.cumsum(rises[order])])
        groups = tuple(one.groups[0] for one in same)
        units = tuple(one.units[0] for one in same)
        result.append(Item(cost, np.arange(len(gains)), gains, True, groups, units, owners[order]))
    return tuple(result)


@dataclass(frozen=True, slots=True)
class Problem:
    """Items that compete, in the resources that can bind, with every common factor removed.

    `places` says where they stand among all items; the others take their last option for free.
    """

    items: tuple[Item, ...]
    places: tuple[int, ...]
    cost: Int[np.ndarray, "items resources"]
    room: Int[np.ndarray, " resources"]


def binding(choices: Sequence[Item], room: Sequence[int], names: Sequence[str]) -> Problem:
    """Drop the resources that cannot bind, or that another one implies.

    Resource r is implied by s when every step takes a smaller share of r's room than of s's. In a
    model whose layers are alike, parameters, cached bytes and operations are proportional, so that
    three budgets are one.
    """
    kinds = {choice.cost for choice in choices if len(choice.steps) > 1}
    full = [
        sum(choice.cost[r] * int(choice.steps[-1]) for choice in choices) for r in range(len(room))
    ]
    live = [r for r in range(len(room)) if full[r] > room[r]]
    for r in reversed(live.copy()):
        if any(
            s != r and all(cost[r] * room[s] <= cost[s] * room[r] for cost in kinds) for s in live
        ):
            live.remove(r)
    places = tuple(
        i for i, c in enumerate(choices) if len(c.steps) > 1 and any(c.cost[r] for r in live)
    )
    competing = tuple(choices[i] for i in places)
    factor = {r: math.gcd(*(choice.cost[r] for choice in competing)) for r in live}
    for r in live:
        if full[r] // factor[r] >= 2**62:
            raise BudgetError(
                f"The costs in {names[r]} must add up to less than 2^62, got {full[r]}: "
                "count in larger units."
            )
    cost = [[choice.cost[r] // factor[r] for r in live] for choice in competing]
    return Problem(
        competing,
        places,
        np.array(cost, dtype=np.int64).reshape(len(competing), len(live)),
        np.array([room[r] // factor[r] for r in live], dtype=np.int64),
    )
