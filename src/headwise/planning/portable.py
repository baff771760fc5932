"""Plans that an engine can run: widths that its model class needs equal are tied before solving.

    way                 keys and queries                    values                     targets
    free                as the rules say                    as the rules say           onnx, padded
    values only         whole, plain rotary positions       one width in the model     stock, gguf
    one width each      the same planes for all heads       one width in the model     stock, gguf
    one width           the same planes for all heads       as wide as the keys        + vllm
    whole head groups   whole                               whole, fewer groups        gguf
    widths by layer     own planes, one width in a layer    as wide as the keys        vllm

`gguf-cuda` and `vllm-cpu` have the ways of `gguf` and `vllm` whose keys are as wide as values, with
the widths that their kernels support.

Of the ways that all requested targets run, the one with the smallest predicted loss within the
budget is used. Cutting only values loses least while it can reach the budget; below that, all heads
keep the same planes, those that matter most to all of them together. The plan's notes compare the
predicted loss with that of the free fit.

MLPs have one width where heads have one in the model, except for llama.cpp with keys as wide as
values; with widths by layer they stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headwise.errors import BudgetError, PlanError
from headwise.planning.fit import (
    Fit,
    FitProblem,
    HeadWorth,
    Worths,
    ranking,
    weighted_loss,
)
from headwise.planning.rules import WidthRules
from headwise.planning.targets import Kernels, kernels_of, target_of

_WHOLE = 2**20  # wider than any head: nothing of a head is cut
ANY = Kernels()


@dataclass(frozen=True, slots=True)
class Way:
    """One set of ties that gives plans a target runs."""

    name: str
    rules: Callable[[WidthRules], WidthRules]
    worths: Callable[[Worths], Worths]


def _whole_keys(worths: Worths) -> Worths:
    return tuple(tuple(replace(head, qk_whole=True) for head in layer) for layer in worths)


def _common_planes(worths: Worths) -> Worths:
    """Rank the planes in the same order for all heads, by their total worth."""
    heads = [head for layer in worths for head in layer]
    if len({len(head.planes) for head in heads}) > 1:
        raise PlanError("heads with different numbers of rotary planes cannot keep the same ones.")
    order = tuple(ranking(np.sum([head.planes for head in heads], axis=0)))

    def alike(head: HeadWorth) -> HeadWorth:
        return replace(head, plane_order=order)

    return tuple(tuple(alike(head) for head in layer) for layer in worths)


VALUES_ONLY = Way("values only", lambda r: replace(r, granularity="model"), _whole_keys)
WIDTHS = Way("one width each", lambda r: replace(r, granularity="model"), _common_planes)
WIDTH = Way(
    "one width", lambda r: replace(r, granularity="model", equal_sides=True), _common_planes
)
GROUPS = Way(
    "whole head groups",
    lambda r: replace(r, granularity="head", min_dim=_WHOLE, drop_groups=True),
    _whole_keys,
)
FREE_MLPS = Way(
    "one width, MLPs by layer",
    lambda r: replace(r, granularity="model", equal_sides=True, one_ffn_dim=False),
    _common_planes,
)
BY_LAYER = Way(
    "widths by layer",
    lambda r: replace(r, granularity="layer", equal_sides=True, cut_ffn=False),
    lambda w: w,
)
WAYS: dict[str, tuple[Way, ...]] = {
    "stock": (VALUES_ONLY, WIDTHS, WIDTH),
    "gguf": (VALUES_ONLY, WIDTHS, WIDTH, GROUPS, FREE_MLPS),
    "gguf-cuda": (WIDTH, GROUPS, FREE_MLPS),
    "vllm": (BY_LAYER, WIDTH),
    "vllm-cpu": (BY_LAYER, WIDTH),
}


def ways_for(targets: Sequence[str]) -> tuple[Way, ...]:
    """The ways that all targets run; none if nothing has to be tied."""
    for name in targets:
        target_of(name)
    tied = [WAYS[name] for name in targets if name in WAYS]
    return tuple(way for way in tied[0] if all(way in own for own in tied)) if tied else ()


def fit_for(
    problem: FitProblem,
    targets: Sequence[str],
    solve: Callable[[FitProblem], Fit],
    tie: Callable[[FitProblem, Way, Kernels], FitProblem] | None = None,
) -> Fit:
    """The best fit that every target runs; `solve` finds the best of one problem.

    `tie` is `tied`, or one that remembers its answers.
    """
    ways, kernels, tie = ways_for(targets), kernels_of(targets), tie or tied
    if targets and problem.rules.drop_groups:  # engines have as many heads in every layer
        problem = replace(problem, rules=replace(problem.rules, drop_groups=False))
    if not ways:
        return _checked(solve(problem), targets)
    found: list[tuple[Way, Fit]] = []
    problems: list[str] = []
    for way in ways:
        try:
            found.append((way, _checked(solve(tie(problem, way, kernels)), targets)))
        except (BudgetError, PlanError) as error:
            problems.append(f"{way.name}: {str(error).rstrip('.')}")
    if not found:
        raise BudgetError(
            f"no plan within the budget runs in {' and '.join(targets)} ({'; '.join(problems)}); "
            "raise the budget, or leave out --for."
        )
    way, best = min(found, key=lambda one: weighted_loss(problem, one[1].plan))
    return _noted(best, way, targets, _free_loss(problem, solve))


def tied(problem: FitProblem, way: Way, kernels: Kernels = ANY) -> FitProblem:
    """The problem with the ties of a way, and the widths that have kernels."""
    rules = way.rules(problem.rules)
    multiple = math.lcm(rules.multiple_of, kernels.multiple_of)
    return replace(
        problem,
        rules=replace(rules, multiple_of=multiple, widths=kernels.widths),
        sensitivity=way.worths(problem.sensitivity),
        worth=None if problem.worth is None else way.worths(problem.worth),
    )


def _checked(fit: Fit, targets: Sequence[str]) -> Fit:
    for name in targets:
        answer = target_of(name).runs(fit.plan)
        if not answer.yes:
            raise PlanError(f"{name} does not run it: {answer.why_not}")
    return fit


def _free_loss(problem: FitProblem, solve: Callable[[FitProblem], Fit]) -> float | None:
    try:
        return solve(problem).loss_increase
    except BudgetError:
        return None


def _noted(fit: Fit, way: Way, targets: Sequence[str], free: float | None) -> Fit:
    beside = "" if free is None else f" instead of {free:.4g} without it"
    note = (
        f"tied for {' and '.join(targets)} ({way.name}): predicted loss +{fit.loss_increase:.4g}"
        f"{beside}"
    )
    origin = fit.plan.origin.model_copy(update={"notes": (*fit.plan.origin.notes, note)})
    return replace(fit, plan=fit.plan.model_copy(update={"origin": origin}))
