"""Claim: the error bound at a total width of 128 is lowest at 8 heads.

The number 8 is 128/16: the narrow-head term falls to 0 where a head is as wide as a token, with a
vertical tangent, and the few-heads term is too slow to win from there on. The same curve for other
token widths shows whether 8 is a fact about heads or about the ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.reproduce.charting import Axes, Point, curves
from headwise.reproduce.claim import Claim, Finding, Results, Size, Table, Trial, Values
from headwise.reproduce.statistics import summary

if TYPE_CHECKING:
    from headwise.report.charts import Chart

WIDTH, TOKEN_DIM, MOST_HEADS = 128, 16, 80
TOKEN_DIMS = (4, 8, 16, 32, 64, 128)
PAPER = {1: 1.326, 8: 0.166, 9: 0.481, 80: 0.965}  # read off the figure, three decimals


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """One computation; the bound holds no randomness."""
    parameters = {"width": WIDTH, "token_dims": TOKEN_DIMS, "most_heads": MOST_HEADS}
    return [Trial("bound-curve", "bound", 0, parameters)]


def run(trial: Trial) -> Values:
    """The curve for every token width, and its lowest point."""
    from headwise.theory.bounds import bound_curve

    wanted: dict[str, Any] = dict(trial.parameters)
    heads = range(1, wanted["most_heads"] + 1)
    found = [bound_curve(wanted["width"], dim, heads) for dim in wanted["token_dims"]]
    return {
        "curves": [
            {
                "token_dim": dim,
                "bound": list(curve.bound),
                "best_heads": curve.best.heads,
                "best_bound": curve.best.bound,
                "zero_error": curve.zero_error,
            }
            for dim, curve in zip(wanted["token_dims"], found, strict=True)
        ]
    }


def judge(results: Results) -> Finding:
    """It holds if the lowest point is at 8 and the figure's values come out."""
    found = {c["token_dim"]: c for c in results.items[0].values["curves"]}
    ours = found[TOKEN_DIM]
    same = all(abs(ours["bound"][heads - 1] - bound) < 6e-4 for heads, bound in PAPER.items())
    corners = [d for d, c in found.items() if c["best_heads"] == WIDTH // d]
    empty = [d for d, c in found.items() if c["best_bound"] >= c["zero_error"]]
    reasons = [
        f"The lowest point is where a head is exactly as wide as a token ({WIDTH}/d heads) for "
        f"d = {', '.join(map(str, corners))}: 8 is the ratio {WIDTH}/{TOKEN_DIM}, not a property "
        "of heads.",
    ]
    if empty:
        reasons.append(
            f"For d = {', '.join(map(str, empty))} even the lowest point promises no more than "
            "predicting zero."
        )
    values = ", ".join(f"{ours['bound'][h - 1]:.3f} at {h}" for h in PAPER)
    holds = ours["best_heads"] == 8 and same
    return Finding(
        "holds" if holds else "does not hold",
        f"Lowest at {ours['best_heads']} heads; {values}.",
        tuple(reasons),
        Table(
            ("token width d", "heads at the lowest point", f"{WIDTH}/d", "bound", "says something"),
            tuple(
                (d, c["best_heads"], WIDTH // d, c["best_bound"],
                 "yes" if c["best_bound"] < c["zero_error"] else "no")
                for d, c in found.items()
            ),
        ),
    )  # fmt: skip


def figure(results: Results) -> Chart:
    """The bound by heads for three token widths."""
    points = [
        Point(heads, summary([bound]), f"tokens {c['token_dim']} wide")
        for c in results.items[0].values["curves"]
        if c["token_dim"] in (8, 16, 32)
        for heads, bound in enumerate(c["bound"], 1)
    ]
    return curves(points, Axes(f"Error bound at total width {WIDTH}", "heads", "bound"))


CLAIM = Claim(
    id="bound-curve",
    statement="The error bound at total width 128 has its minimum at 8 heads.",
    expected="1.326 at 1 head, 0.166 at 8 (a cusp), 0.481 at 9, 0.965 at 80.",
    source="arXiv 2510.03784, figure of E_128",
    setting="A formula: nothing is trained, nothing is drawn.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
    quick_verdicts=("holds",),
)
