"""Claim: W_Q can be folded away exactly in three cases, and not in the fourth.

Random stacks are folded and both versions run in float64. Where folding is not allowed it is
forced, to see how wrong it would be; a norm is the same kind of obstacle.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from headwise.reproduce.charting import Axes, Point, curves
from headwise.reproduce.claim import Claim, Finding, Results, Size, Table, Trial, Values, Verdict
from headwise.reproduce.statistics import summary

if TYPE_CHECKING:
    from headwise.report.charts import Chart
    from headwise.theory.attention_stack import AttentionStack

# name: arguments of the stack, and whether the paper says that folding is exact
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "one layer": ({"n_layers": 1}, True),
    "skip around attention only": ({"skip": "attention"}, True),
    "shared weights": ({"shared": True}, True),
    "both skips, own weights": ({}, False),
    "norm, one layer": ({"n_layers": 1, "norm": "rms"}, False),
}
WHICH = ("query", "key", "value")
DEPTHS: dict[Size, tuple[int, ...]] = {"quick": (2, 3), "full": (2, 3, 6, 12)}
NEXT_DRAW = 1 << 20  # between the seeds of a trial's draws; the trials' own seeds are small
EXACT = 1e-9  # relative; rounding times the condition number of the folded weight
FAR = 1e-3  # relative; more than any rounding


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """A random stack for every case and depth."""
    made = []
    for seed in seeds:
        for name, (arguments, _) in CASES.items():
            depths = (1,) if arguments.get("n_layers") == 1 else DEPTHS[size]
            for depth in depths:
                parameters = {"case": name, **arguments, "n_layers": depth}
                made.append(Trial("fold-exact", f"{name}, depth {depth}", seed, parameters))
    return made


def run(trial: Trial) -> Values:
    """The largest relative change of the logits when query, key or value is folded."""
    import numpy as np

    from headwise.errors import TheoryError
    from headwise.theory.attention_stack import logits
    from headwise.theory.reparametrization import fold, forced_fold, saved_share

    stack, redrawn = _invertible_stack(trial)
    tokens = np.random.default_rng(trial.seed).integers(13, size=(7, 11))
    wanted = logits(stack, tokens)
    values: Values = {"refused": 0, "redrawn": redrawn}
    for which in WHICH:
        try:
            folded = fold(stack, which)  # type: ignore[arg-type]
        except TheoryError:
            values["refused"] += 1
            folded = forced_fold(stack, which)  # type: ignore[arg-type]
        change = np.abs(logits(folded, tokens) - wanted).max() / np.abs(wanted).max()
        values[which] = float(change)
    share = saved_share(stack)
    return {**values, "saved_attention": share.attention, "saved_block": share.block}


def _invertible_stack(trial: Trial) -> tuple[AttentionStack, int]:
    """The seed's first random stack whose weights can be inverted, and how many came before it.

    The theorem is about invertible weights; of many random square ones a few nearly are not.
    """
    import numpy as np

    from headwise.theory.attention_stack import random_stack
    from headwise.theory.reparametrization import CONDITION_LIMIT

    arguments = {k: v for k, v in trial.parameters.items() if k != "case"}
    for draw in count():
        stack = random_stack(trial.seed + draw * NEXT_DRAW, **arguments)
        weights = [w for layer in stack.layers for w in (layer.W_Q, layer.W_K, layer.W_V)]
        if np.linalg.cond(np.stack(weights)).max() <= CONDITION_LIMIT:
            return stack, draw
    raise AssertionError  # the count has no end


def judge(results: Results) -> Finding:
    """It holds if folding W_Q is exact to rounding in the three cases and off by far in the others.

    In part: exact in the three, not off by far in each of the others. Keys and values are told.
    """
    worst, least = _changes(results, ("query",))
    others, _ = _changes(results, ("key", "value"))
    three = [case for case, (_, says) in CASES.items() if says]
    near = [case for case in CASES if case not in three and least[case] <= FAR]
    exact = all(worst[case] < EXACT for case in three)
    verdict: Verdict = "does not hold" if not exact else "holds in part" if near else "holds"
    too = max(others[case] for case in three)
    share = results.items[0].values
    redrawn = sum(result.values["redrawn"] for result in results)
    return Finding(
        verdict,
        f"Largest relative change {max(worst[case] for case in three):.1e} in the three cases; at "
        f"least {least['both skips, own weights']:.2g} in the fourth.",
        (
            *(
                [f"Changed by no more than {FAR:g} in some stack: {'; '.join(near)}."]
                if near
                else []
            ),
            f"Keys and values {'fold as well' if too < EXACT else 'do not fold exactly'} in the "
            f"three cases: largest change {too:.1e}.",
            f"Stacks drawn again because a weight was all but singular: {redrawn}.",
            f"One projection is {share['saved_attention']:.1%} of the attention's and "
            f"{share['saved_block']:.1%} of a block's parameters (MLP of four times the width).",
        ),
        Table(
            ("case", "the paper says", "least change", "largest change"),
            tuple(
                (case, "exact" if says else "not exact", least[case], worst[case])
                for case, (_, says) in CASES.items()
            ),
        ),
    )


def _changes(results: Results, folded: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """The largest and the least change in every case, whatever of `folded` was folded."""
    found: dict[str, list[float]] = {case: [] for case in CASES}
    for result in results:
        found[result.trial.parameters["case"]] += [result.values[which] for which in folded]
    return {c: max(v) for c, v in found.items()}, {c: min(v) for c, v in found.items()}


def figure(results: Results) -> Chart:
    """The change of the logits when W_Q is folded, by depth."""
    points = [
        Point(
            results.named(name)[0].trial.parameters["n_layers"],
            summary(results.numbers(name, "query")),
            results.named(name)[0].trial.parameters["case"],
        )
        for name in results.names
    ]
    axes = Axes("What folding W_Q changes", "layers", "relative change of the logits", log_y=True)
    return curves(points, axes)


CLAIM = Claim(
    id="fold-exact",
    statement="Folding W_Q into what precedes it is exact in three cases and not in the fourth.",
    expected="Exact for a single layer, for skips around the attention only and for shared "
    "weights, all without norms; −25% of attention, −8.3% of block parameters.",
    source="arXiv 2510.23912",
    setting="Random attention stacks in float64; a seed draws the weights.",
    version=2,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
    quick_verdicts=("holds",),
)
