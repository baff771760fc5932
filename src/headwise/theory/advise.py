"""Advice on heads: four views on one configuration, and the signs of a poor allocation.

Why not always more heads? There are four views. Two of them give no threshold, one gives a floor
that grows with ln(context), and one gives a floor that grows with the context itself. They
disagree, so each is shown with its assumptions and the reader decides.

The signs: readers of the papers name three: over-provisioned late layers, starved early layers, and
equal layers although the measurement differs by layer. A fourth is a head below a floor. The first
three are differences from what was *measured*, so they need a second plan of about the same cost,
fitted to a profile or to proxies. Without it they are unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from headwise.errors import TheoryError
from headwise.plan import LayerPlan, Plan
from headwise.theory.bottleneck import bottleneck_floor
from headwise.theory.floors import entropy_floor, jl_floor, memorization


class Verdict(StrEnum):
    """What a view concludes about a configuration."""

    OK = "ok"
    BELOW_FLOOR = "below floor"
    DOES_NOT_APPLY = "does not apply"
    NO_THRESHOLD = "no threshold"


@dataclass(frozen=True, slots=True)
class View:
    """One view: its numbers by name, its verdict, and the sentence why."""

    name: str
    numbers: tuple[tuple[str, float | int], ...]
    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True)
class _Case:
    d_model: int
    heads: int
    head_dim: int
    context: int
    eps: float


def advise(
    d_model: int, heads: int, head_dim: int, context: int, eps: float | int = 0.5
) -> tuple[View, ...]:
    """The four views, in the order freedom, ensemble, Johnson–Lindenstrauss, theory."""
    for name, number in (
        ("d_model", d_model),
        ("heads", heads),
        ("head_dim", head_dim),
        ("context", context),
    ):
        if number < 1:
            raise TheoryError(f"Expected {name} of at least 1, got {number}; pass a whole number.")
    case = _Case(d_model, heads, head_dim, context, float(eps))
    return (_freedom(case), _ensemble(case), _johnson_lindenstrauss(case), _theory(case))


def _freedom(case: _Case) -> View:
    free = 4 * case.d_model * case.heads * case.head_dim
    # Tied attention weights: one W_Q and W_K, all of W_V and W_O.
    tied = 2 * case.d_model * case.head_dim * (1 + case.heads)
    numbers = (("heads", case.heads), ("weights", free), ("weights_if_tied", tied))
    if case.heads == 1:
        why = (
            f"One head has nothing to be tied to: its {free:,} weights are all there is to choose."
        )
        return View("freedom", numbers, Verdict.DOES_NOT_APPLY, why)
    why = (
        f"Tying the attention weights of {case.heads} heads leaves exactly one head, "
        f"{case.head_dim} wide in its scores and {case.heads * case.head_dim} in its values "
        f"({tied:,} of {free:,} weights), so more heads only add freedom; the view names no number "
        "at which training becomes hard."
    )
    return View("freedom", numbers, Verdict.NO_THRESHOLD, why)


def _ensemble(case: _Case) -> View:
    share = case.head_dim / case.d_model
    numbers = (("heads", case.heads), ("head_dim", case.head_dim), ("share_of_d_model", share))
    if case.heads == 1:
        why = f"One head of width {case.head_dim} is no ensemble."
        return View("ensemble", numbers, Verdict.DOES_NOT_APPLY, why)
    why = (
        f"The layer adds up {case.heads} small models that each see {case.head_dim} of "
        f"{case.d_model} directions ({share:.3g}); each must stay good enough alone, and the view "
        "does not say how narrow that is."
    )
    return View("ensemble", numbers, Verdict.NO_THRESHOLD, why)


def _johnson_lindenstrauss(case: _Case) -> View:
    lemma, entropy = jl_floor(case.context, case.eps), entropy_floor(case.context)
    numbers = (
        ("eps", case.eps),
        ("jl_threshold", lemma.threshold),
        ("jl_width", lemma.width),
        ("entropy_threshold", entropy.threshold),
        ("entropy_width", entropy.width),
    )
    met, estimate_met = lemma.is_met(case.head_dim), entropy.is_met(case.head_dim)
    second = (
        f"the entropy estimate 8.33·ln {case.context} asks for {entropy.width} and is "
        f"{'met' if estimate_met else 'not met'} by {case.head_dim}"
    )
    if not met and lemma.width > case.d_model:
        verdict = Verdict.DOES_NOT_APPLY if estimate_met else Verdict.BELOW_FLOOR
        first = (
            f"The lemma asks for {lemma.width} for {case.context} tokens at eps {case.eps:g}, more "
            f"than the d_model {case.d_model} at which nothing is lost, so it does not apply"
        )
    else:
        verdict = Verdict.OK if met and estimate_met else Verdict.BELOW_FLOOR
        first = (
            f"A random projection of {case.context} tokens keeps all their distances to "
            f"1 ± {case.eps:g} from width {lemma.width} on, and the head has {case.head_dim}, but "
            "that is enough, not necessary: a learned projection can do with less"
        )
    return View("johnson-lindenstrauss", numbers, verdict, f"{first}; {second}.")


def _theory(case: _Case) -> View:
    # Only so many tokens can be linearly independent, which both theorems ask for.
    covered = min(case.context, case.d_model)
    floor = bottleneck_floor(covered)
    memory = memorization(case.heads, case.head_dim, covered)
    numbers = (
        ("independent_tokens", covered),
        ("bottleneck_width", floor.exact),
        ("bottleneck_width_published", floor.published),
        ("memorization_order", memory.order),
    )
    beyond = case.context > case.d_model
    if case.head_dim < floor.exact:
        verdict = Verdict.BELOW_FLOOR
        first = (
            f"Over {covered} independent tokens every attention pattern is reachable from width "
            f"{floor.exact} on (published as {floor.published}), so {case.head_dim} misses some"
        )
    else:
        verdict = Verdict.DOES_NOT_APPLY if beyond else Verdict.OK
        first = f"Every attention pattern over {covered} independent tokens is reachable"
    if beyond:
        first += (
            f", and the theorem ends there: {case.context} tokens of width {case.d_model} cannot "
            "be independent"
        )
    second = (
        f"memorization is at least of the order {case.heads}·min({covered}, {case.head_dim}) = "
        f"{memory.order} examples, and wider heads {'raise' if memory.width_helps else 'leave'} it"
    )
    return View("theory", numbers, verdict, f"{first}; {second}.")


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
        "train both this plan and the fitted one: a fit predicts cutting, not training",
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
