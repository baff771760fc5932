"""The allocation solver on a large model, as one JSON document.

80 layers of 8 head groups, each with 128 value dimensions and 64 query-key planes; sensitivities
are heavy-tailed and each layer has its own scale. Multiples of 8 are widths: 8 value dimensions,
4 planes. One case more has neurons beside the heads: 32 layers, 32 heads of 128 and 11,008 neurons
each, layers tied, single neurons. The time to build the curves is not counted. A budget is solved
once from the curves ("once"), and again by a solver that has them prepared ("again"). The load
average tells how quiet the machine was.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import partial

import numpy as np
from timing import Timing, interleaved

from headwise.planning.solver import Curve, Solution, Solver, solve

LAYERS, GROUPS, VO_UNITS, QK_PLANES, D_MODEL = 80, 8, 128, 64, 8192
RESOURCES = ("attention parameters", "KV bytes per token", "FLOPs per token")


def curve_values(rng: np.random.Generator, units: int, scale: float) -> np.ndarray:
    """The cumulative sum of sorted sensitivities with a power-law spectrum and log-normal noise."""
    rank = np.arange(1, units + 1)
    sensitivity = np.sort(scale * rng.lognormal(0.0, 1.5, units) / rank)[::-1]
    return np.concatenate([[0.0], np.cumsum(sensitivity)])


def model(mixed: bool, multiple_of: int, tied: bool, seed: int = 0) -> list[Curve]:
    """All curves. A mixed model has three kinds of layers, so that its resources differ.

    Query heads per group: 4, or in a mixed model 8 in even and 4 in odd layers. Context: 8192, or
    in a mixed model a window of 1024 except in every fourth layer.
    """
    rng = np.random.default_rng(seed)
    curves = []
    for layer in range(LAYERS):
        scale = rng.lognormal()
        queries = 8 if mixed and layer % 2 == 0 else 4
        context = 1024 if mixed and layer % 4 else 8192
        params = (1 + queries) * D_MODEL
        cost = (params, 2, 2 * params + 2 * queries * context)
        for _ in range(GROUPS):
            for side, units, width, weight in (("vo", VO_UNITS, 1, 1.0), ("qk", QK_PLANES, 2, 0.5)):
                curves.append(
                    Curve(
                        curve_values(rng, units, weight * scale),
                        tuple(width * c for c in cost),
                        multiple_of=max(1, multiple_of // width),
                        tie=(layer, side) if tied else None,
                    )
                )
    return curves


def with_neurons(seed: int = 0) -> list[Curve]:
    """A model of Llama-2-7B's widths under two budgets, all parameters and cached bytes."""
    rng = np.random.default_rng(seed)
    layers, heads, width, neurons, d = 32, 32, 128, 11008, 4096
    curves = []
    for layer in range(layers):
        scale = rng.lognormal()
        for _ in range(heads):
            for side, units, dims, weight in (("vo", width, 1, 1.0), ("qk", width // 2, 2, 0.5)):
                values = curve_values(rng, units, weight * scale)
                cost = (2 * d * dims, 2 * dims)
                curves.append(Curve(values, cost, multiple_of=8 // dims, tie=(layer, side)))
        curves.append(Curve(curve_values(rng, neurons, 3 * scale), (3 * d, 0)))
    return curves


def full_cost(curves: list[Curve]) -> np.ndarray:
    """What keeping everything costs, in each resource."""
    costs = np.array([curve.unit_cost for curve in curves])
    return np.asarray(np.array([len(curve.values) - 1 for curve in curves]) @ costs)


def one_budget(curves: list[Curve]) -> list[Curve]:
    """The same curves when only attention parameters count."""
    return [Curve(c.values, c.unit_cost[:1], multiple_of=c.multiple_of, tie=c.tie) for c in curves]


def jointly_binding(curves: list[Curve], keep: float) -> tuple[int, ...]:
    """Budgets that all bind: just less than a plan spends that pays for all three resources."""
    full = full_cost(curves)
    costs = np.array([curve.unit_cost for curve in curves])
    share = (costs / full).sum(axis=1)
    density = np.concatenate([np.diff(c.values) / s for c, s in zip(curves, share, strict=True)])
    margin = np.quantile(density, 1 - keep)
    units = [np.sum(np.diff(c.values) > margin * s) for c, s in zip(curves, share, strict=True)]
    return tuple(int(0.999 * b) for b in np.array(units) @ costs)


def each_binds(curves: list[Curve], budgets: tuple[int, ...]) -> bool:
    """Whether lifting any one of the budgets buys a better plan."""
    value = solve(curves, budgets).value
    lifted = [
        tuple(10 * b if r == free else b for r, b in enumerate(budgets))
        for free in range(len(budgets))
    ]
    return all(solve(curves, more).value > value for more in lifted)


def figures(
    timings: dict[str, Timing], found: Solution, budgets: tuple[int, ...], limit: float
) -> object:
    """One case of the document."""
    return {
        "seconds": {when: asdict(timing) for when, timing in timings.items()},
        "seconds_target": limit,
        "exact": found.exact,
        "gap": found.gap,
        "share_of_budget_spent": [s / b for s, b in zip(found.spent, budgets, strict=True)],
    }


def main() -> None:
    alike, mixed = model(False, 1, False), model(True, 8, False)
    single, tied = one_budget(alike), model(True, 8, True)
    full = int(full_cost(single)[0])
    blocks = with_neurons()
    params, cached = (int(x) for x in full_cost(blocks))
    cases: dict[str, tuple[list[Curve], tuple[int, ...], float]] = {
        "one budget, keep 50%": (single, (full // 2,), 0.1),
        "one budget, keep 75%": (single, (3 * full // 4,), 0.1),
        "three budgets, multiples of 8": (mixed, jointly_binding(mixed, 0.5), 5.0),
        "three budgets, multiples of 8, layers tied": (tied, jointly_binding(tied, 0.5), 5.0),
        "heads and 352,256 neurons, two budgets": (
            blocks,
            (9 * params // 10, 17 * cached // 20),
            0.2,
        ),
    }
    once = {name: partial(solve, c, b) for name, (c, b, _) in cases.items()}
    again = {}
    for name, (curves, budgets, _) in cases.items():
        names = tuple(RESOURCES[: len(budgets)])
        again[name] = partial(Solver(curves, names).solve, budgets)
    timings = {
        "once": interleaved(once, repeats=9, warmup=1),
        "again": interleaved(again, repeats=9, warmup=1),
    }
    document = {
        "layers": LAYERS,
        "groups": GROUPS,
        "units": [VO_UNITS, QK_PLANES],
        "resources": RESOURCES,
        "gap_target": 1e-3,
        "three_budgets_bind": each_binds(*cases["three budgets, multiples of 8"][:2]),
        "load_average": os.getloadavg()[0],
        "cases": {
            name: figures(
                {when: found[name] for when, found in timings.items()}, once[name](), budgets, limit
            )
            for name, (_, budgets, limit) in cases.items()
        },
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
