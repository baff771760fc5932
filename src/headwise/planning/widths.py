"""From value curves to widths: shared by designing a model and fitting a profile.

A curve gives the value of 0, 1, …, U dimensions of one part of a head group, or of 0, 1, …, U
neurons of an MLP. The solver spends the budgets on all curves together. Fixed costs (embeddings,
output biases) enter as one more curve without a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from headwise.plan import RESOURCE_NAMES, Budget, Plan, Resource
from headwise.planning.cost import Side, cost, dense_cost, neuron_cost, unit_cost
from headwise.planning.solver import Curve, Solver

# A head's query-key width as a whole, or its rotary and its position-free columns separately.
# The neurons of an MLP stand beside the heads.
Part = Literal["qk", "planes", "free", "vo", "ffn"]
Place = tuple[int, int, Part]  # layer, head group, part
MLP = -1  # in place of a head group


def mlp_place(layer: int) -> Place:
    """The place of a layer's neurons."""
    return layer, MLP, "ffn"


@dataclass(frozen=True, slots=True)
class WidthCurve:
    """What each width of one part of a head is worth, and which widths are allowed."""

    values: Float[np.ndarray, " options"]  # of 0, 1, … dimensions
    floor: int
    multiple_of: int
    tie: Hashable | None = None  # curves of one tie get the same width
    only: tuple[int, ...] | None = None  # no other widths than these

    def costing(self, unit_cost: tuple[int, ...]) -> Curve:
        """The curve as the solver takes it, with what a dimension costs in each resource."""
        return Curve(
            self.values, unit_cost, self.floor, None, self.multiple_of, self.tie, self.only
        )

    @property
    def allowed(self) -> Int[np.ndarray, " allowed"]:
        """The allowed widths, ascending."""
        return self.costing(()).allowed()


def side_of(part: Part) -> Side:
    """The side whose costs a part has."""
    return "vo" if part == "vo" else "qk"


@dataclass(frozen=True, slots=True)
class Widths:
    """The width of every part, 0 where its group is dropped, and how near the best value is."""

    of: dict[Place, int]
    gap: float  # at most this share of the highest value is missing


class WidthCosts:
    """What a dimension of each part costs, and what no width changes."""

    def __init__(
        self, template: Plan, context: int, batch: int, curves: Mapping[Place, WidthCurve]
    ) -> None:
        self._template, self._context, self._batch = template, context, batch
        self._curves = curves
        self._full = cost(template, context, batch)
        self.dense = dense_cost(template.shape, context, batch)

    def limits(self, budget: Budget) -> tuple[int, ...]:
        """The most that may be spent of every limited resource."""
        return tuple(budget.amount(r, self.dense) for r in budget.limited)

    def units(self, resources: tuple[Resource, ...]) -> dict[Place, tuple[int, ...]]:
        """What a dimension of every part costs."""
        slopes: dict[tuple[int, int, Side], tuple[int, ...]] = {}  # heads of a layer share them
        found: dict[Place, tuple[int, ...]] = {}
        neuron = neuron_cost(self._template.shape)
        for i, j, part in self._curves:
            if part == "ffn":
                found[i, j, part] = tuple(neuron[r] for r in resources)
                continue
            head = self._template.layers[i].heads[j]
            kind = i, head.queries, side_of(part)
            if kind not in slopes:
                unit = unit_cost(self._template, i, head, kind[2], self._context, batch=self._batch)
                slopes[kind] = tuple(unit[r] for r in resources)
            found[i, j, part] = slopes[kind]
        return found

    def fixed(
        self, resources: tuple[Resource, ...], units: dict[Place, tuple[int, ...]]
    ) -> tuple[int, ...]:
        """What no width changes."""
        full = {place: len(curve.values) - 1 for place, curve in self._curves.items()}
        return tuple(
            self._full.counted(r) - sum(unit[k] * full[place] for place, unit in units.items())
            for k, r in enumerate(resources)
        )


class WidthSolver:
    """The curves of one model, ready for many budgets; ties make widths equal."""

    def __init__(self, costs: WidthCosts, curves: Mapping[Place, WidthCurve]) -> None:
        self._costs, self._curves = costs, curves
        self._solvers: dict[tuple[Resource, ...], Solver] = {}

    def solve(self, budget: Budget) -> Widths:
        """The widths of highest total value within the budget."""
        resources = budget.limited
        if resources not in self._solvers:
            names = tuple(RESOURCE_NAMES[r] for r in resources)
            self._solvers[resources] = Solver(self._with_costs(resources), names)
        found = self._solvers[resources].solve(self._costs.limits(budget))
        return Widths(dict(zip(self._curves, found.units[:-1], strict=True)), found.gap)

    def _with_costs(self, resources: tuple[Resource, ...]) -> tuple[Curve, ...]:
        """The curves with what a dimension costs, then one for what no width changes."""
        units = self._costs.units(resources)
        curves = [curve.costing(units[place]) for place, curve in self._curves.items()]
        fixed = self._costs.fixed(resources, units)
        curves.append(Curve(values=np.zeros(2), unit_cost=fixed, floor=1))
        return tuple(curves)


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
