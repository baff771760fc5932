"""One way from curves to widths, shared by the policies for new models and the fit to a profile.

A curve says what 0, 1, …, U dimensions of one part of one head group are worth. What no width
changes (embeddings, MLPs, output biases) is one more curve without a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from headwise.plan import RESOURCE_NAMES, Budget, Plan
from headwise.planning.cost import Side, cost, dense_cost, unit_cost
from headwise.planning.solver import Allocation, Curve, solve

# A head's query-key width as a whole, or its rotated and its position-free columns apart.
Part = Literal["qk", "planes", "free", "vo"]
Place = tuple[int, int, Part]  # layer, head group, part


@dataclass(frozen=True, slots=True)
class WidthCurve:
    """What each width of one part of a head is worth, and which widths are allowed."""

    values: Float[np.ndarray, " options"]  # of 0, 1, … dimensions
    floor: int
    multiple_of: int
    tie: Hashable | None = None


def side_of(part: Part) -> Side:
    """The side whose costs a part has."""
    return "vo" if part == "vo" else "qk"


def best_widths(
    template: Plan, budget: Budget, context: int, curves: Mapping[Place, WidthCurve]
) -> tuple[dict[Place, int], Allocation]:
    """The widths of highest total value within the budget, and how they were found."""
    resources = budget.limited
    made = []
    for (i, j, part), curve in curves.items():
        unit = unit_cost(template, i, template.layers[i].heads[j], side_of(part), context)
        made.append(
            Curve(
                values=curve.values,
                unit_cost=tuple(unit[r] for r in resources),
                floor=curve.floor,
                multiple_of=curve.multiple_of,
                tie=curve.tie,
            )
        )
    full, dense = cost(template, context), dense_cost(template.shape, context)
    fixed = tuple(
        getattr(full, r) - sum(c.unit_cost[k] * (len(c.values) - 1) for c in made)
        for k, r in enumerate(resources)
    )
    made.append(Curve(values=np.zeros(2), unit_cost=fixed, floor=1))
    limits = tuple(budget.amount(r, dense) for r in resources)
    found = solve(made, limits, resources=tuple(RESOURCE_NAMES[r] for r in resources))
    return dict(zip(curves, found.units[:-1], strict=True)), found


def largest_scale(fits: Callable[[float], bool], top: float) -> float | None:
    """The largest scale up to `top` that fits, to about 15 digits; None if not even 0 does."""
    if not fits(0.0):
        return None
    if fits(top):
        return top
    low, high = 0.0, top
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
