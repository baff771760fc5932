"""Which signs of a poor allocation a plan shows, and what to change.

The papers' readers name three: late layers with more than they need, early layers with less, and
equal layers where a measurement asks for different ones. A fourth is a head below a floor. The
first three are differences from what was *measured*, so they take a second plan of about the same
cost: one that was fitted to a profile or to proxies. Without it they are unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwise.errors import TheoryError
from headwise.plan import LayerPlan, Plan
from headwise.theory.floors import entropy_floor

THIRD = 1 / 3  # of the layers are early, as many are late
APART = 0.1  # less than this share of the fitted width is no difference
MEASURE = "fit a plan of this cost with `headwise plan design`, and give it as --fitted"


@dataclass(frozen=True, slots=True)
class Sign:
    """One failure sign: whether the plan shows it (None: unknown), why, what to change."""

    name: str
    shown: bool | None
    why: str
    change: str = ""


def failure_signs(
    plan: Plan, fitted: Plan | None = None, context: int | None = None
) -> tuple[Sign, ...]:
    """The four signs, in the order late, early, uniform, floor."""
    if fitted is not None and len(fitted.layers) != len(plan.layers):
        raise TheoryError(
            f"Expected a fitted plan of {len(plan.layers)} layers, got {len(fitted.layers)}; give "
            "one that was fitted for this model."
        )
    n = max(1, round(THIRD * len(plan.layers)))
    late, early = range(len(plan.layers) - n, len(plan.layers)), range(n)
    return (
        _compared("late layers over-provided", plan, fitted, late, lambda ratio: ratio > 1 + APART),
        _compared("early layers starved", plan, fitted, early, lambda ratio: ratio < 1 - APART),
        _uniform(plan, fitted),
        _floor(plan, context or plan.shape.context),
    )


def _compared(
    name: str,
    plan: Plan,
    fitted: Plan | None,
    layers: range,
    is_sign: Callable[[float], bool],
) -> Sign:
    where = f"layers {layers[0]}–{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
    if fitted is None:
        return Sign(name, None, "nothing was measured to compare with", MEASURE)
    own, wanted = (sum(_width(p.layers[i]) for i in layers) for p in (plan, fitted))
    why = f"{where} are {own} wide in all, {wanted} in the fitted plan"
    if not is_sign(own / wanted):
        return Sign(name, False, why)
    verb = "narrow" if own > wanted else "widen"
    return Sign(name, True, why, f"{verb} {where} by {abs(1 - wanted / own):.0%}, or take the fit")


def _uniform(plan: Plan, fitted: Plan | None) -> Sign:
    name = "uniform against the measurement"
    if any(layer.heads != plan.layers[0].heads for layer in plan.layers):
        return Sign(name, False, "the layers differ")
    if fitted is None:
        return Sign(name, None, "all layers are equal, and nothing was measured", MEASURE)
    differ = [
        i
        for i, (own, other) in enumerate(zip(plan.layers, fitted.layers, strict=True))
        if abs(_width(own) / _width(other) - 1) > APART
    ]
    if not differ:
        return Sign(name, False, f"no layer of the fitted plan differs by more than {APART:.0%}")
    listed = ", ".join(map(str, differ))
    return Sign(
        name, True, f"the fitted plan differs in layers {listed}",
        "train the fitted plan beside this one: a fit predicts cutting, not training",
    )  # fmt: skip


def _floor(plan: Plan, context: int) -> Sign:
    floor = entropy_floor(context)
    below = [
        i
        for i, layer in enumerate(plan.layers)
        if any(not floor.is_met(head.qk_dim) for head in layer.heads)
    ]
    name = "below a floor"
    if not below:
        return Sign(name, False, f"every head is above the entropy estimate {floor.threshold:.3g}")
    narrowest = min(head.qk_dim for i in below for head in plan.layers[i].heads)
    total = plan.layers[below[0]].query_width
    heads = max(1, total // floor.width)
    return Sign(
        name, True,
        f"{len(below)} of {len(plan.layers)} layers have heads down to {narrowest} wide, below the "
        f"entropy estimate {floor.threshold:.3g} for {context} tokens",
        f"{heads} heads of {total // heads} instead, at equal parameters; most working models "
        "ignore this floor, so try it first",
    )  # fmt: skip


def _width(layer: LayerPlan) -> int:
    return layer.query_width + layer.output_width
