"""What the directions of a head are worth, as curves over its width.

A head has up to three parts, each cut on its own:

    planes   rotary planes, two dimensions each
    free     query-key directions without positions
    vo       value-output directions

Of each part the most valuable directions are kept, so its curve is the running sum of their worths,
sorted from large to small: concave, which the solver likes best.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from headwise.errors import PlanError, did_you_mean
from headwise.planning.widths import Part, Place, WidthCurve

GRANULARITIES = ("head", "layer", "model")


@dataclass(frozen=True, slots=True, eq=False)  # one is equal to itself only, so it can be a key
class HeadWorth:
    """What the directions of one head group are worth; `qk_whole` forbids cutting queries and keys.

    The indices are those of the profile: planes in the order of the head's `rotary_planes`.
    """

    planes: Float[np.ndarray, " planes"]
    free: Float[np.ndarray, " free"]
    vo: Float[np.ndarray, " vo"]
    qk_whole: bool = False


Worths = tuple[tuple[HeadWorth, ...], ...]  # layers, head groups


@dataclass(frozen=True, slots=True)
class FitRules:
    """What a fit has to respect besides the budget."""

    granularity: str = "head"
    multiple_of: int = 8  # of dimensions, query-key widths too
    min_dim: int | None = None  # None: one multiple
    context: int | None = None  # for FLOPs; None: the shape's

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise PlanError(
                f"granularity must be head, layer or model, got {self.granularity!r}. "
                f"{did_you_mean(self.granularity, GRANULARITIES)}"
            )
        if self.multiple_of < 1 or (self.min_dim is not None and self.min_dim < 1):
            raise PlanError(
                f"multiple-of and min-dim must be at least 1, got {self.multiple_of} "
                f"and {self.min_dim}."
            )


def most_valuable(worth: Float[np.ndarray, " n"], count: int) -> list[int]:
    """The places of the `count` largest, ascending; of equals the first."""
    return sorted(ranking(worth)[:count])


def ranking(worth: Float[np.ndarray, " n"]) -> list[int]:
    """The places from most to least valuable; of equals the first comes first."""
    found: list[int] = np.argsort(-worth, kind="stable").tolist()
    return found


def width_curves(worths: Worths, rules: FitRules) -> dict[Place, WidthCurve]:
    """One curve per part of every head, in dimensions."""
    return {
        (i, j, part): WidthCurve(
            values=_cumulative(getattr(head, part), dims),
            floor=floor,
            multiple_of=math.lcm(rules.multiple_of, dims),
            tie=_tie(rules.granularity, i, part),
        )
        for i, layer in enumerate(worths)
        for j, head in enumerate(layer)
        for part, dims, floor in _parts(head, rules)
    }


def _parts(head: HeadWorth, rules: FitRules) -> list[tuple[Part, int, int]]:
    """The parts a head has: name, dimensions per direction, least width."""
    planes, free, vo = 2 * len(head.planes), len(head.free), len(head.vo)
    least = rules.multiple_of if rules.min_dim is None else rules.min_dim
    pairs = math.lcm(rules.multiple_of, 2)
    # A partly rotated head keeps some planes; the rest of its floor lies on the free directions.
    planes_floor = planes if head.qk_whole else min(planes, pairs if free else least)
    free_floor = free if head.qk_whole else min(free, max(0, least - planes_floor))
    found: list[tuple[Part, int, int]] = [("vo", 1, min(vo, least))]
    if planes:
        found.append(("planes", 2, planes_floor))
    if free:
        found.append(("free", 1, free_floor))
    return found


def _tie(granularity: str, layer: int, part: Part) -> Hashable | None:
    ties: dict[str, Hashable | None] = {"head": None, "layer": (layer, part), "model": part}
    return ties[granularity]


def _cumulative(worth: Float[np.ndarray, " n"], dims: int) -> Float[np.ndarray, " options"]:
    """The value of 0, 1, … dimensions; a direction counts when its last dimension is there."""
    best = np.sort(worth.astype(np.float64))[::-1]
    values = np.concatenate([[0.0], np.cumsum(best)])
    return np.repeat(values, dims)[: dims * len(best) + 1]
