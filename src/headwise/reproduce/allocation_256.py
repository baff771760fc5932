"""Claim: the allocation problem at total width 256 is solved by 4 lags with 8 heads of width 8.

Solved exactly over all M, H_m and d_m. Beside it the same problem for other token widths: the
solution stays on the corner d_m = d as long as d < D/M, and says nothing from there on, which is
where real models live.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.reproduce.charting import Axes, Point, curves
from headwise.reproduce.claim import Claim, Finding, Results, Size, Table, Trial, Values
from headwise.reproduce.statistics import summary

if TYPE_CHECKING:
    from headwise.report.charts import Chart

WIDTH, TOKEN_DIM, LAGS = 256, 8, 4
TOKEN_DIMS = (2, 4, 8, 16, 32, 64, 128)


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """One computation; the problem holds no randomness."""
    parameters = {"width": WIDTH, "lags": LAGS, "token_dims": TOKEN_DIMS}
    return [Trial("allocation-256", "allocation", 0, parameters)]


def run(trial: Trial) -> Values:
    """The exact solution for every token width."""
    from headwise.theory.allocation import allocate

    wanted: dict[str, Any] = dict(trial.parameters)
    solutions = []
    for dim in wanted["token_dims"]:
        found = allocate(wanted["width"], dim, (1.0,) * wanted["lags"])
        solutions.append(
            {
                "token_dim": dim,
                "groups": [[g.heads, int(g.head_dim)] for g in found.groups],
                "bound": found.bound,
                "zero_error": found.zero_error,
                "on_corner": found.on_corner,
                "vacuous": found.vacuous,
            }
        )
    return {"solutions": solutions}


def judge(results: Results) -> Finding:
    """It holds if the exact solution is the paper's."""
    found = {s["token_dim"]: s for s in results.items[0].values["solutions"]}
    ours = found[TOKEN_DIM]
    holds = ours["groups"] == [[8, 8]] * LAGS
    corner = [d for d, s in found.items() if s["on_corner"]]
    empty = [d for d, s in found.items() if s["vacuous"]]
    reasons = [
        f"For d = {_listed(corner)} the solution is the corner where every head is as wide as a "
        "token: the problem does not weigh width against heads there.",
    ]
    if empty:
        reasons.append(f"For d = {_listed(empty)} the best bound is that of predicting zero.")
    return Finding(
        "holds" if holds else "does not hold",
        f"M = {len(ours['groups'])}, {_shown(ours['groups'])}; bound {ours['bound']:.3f}.",
        tuple(reasons),
        Table(
            ("token width d", "lags used", "heads × width per lag", "bound", "on the corner",
             "says something"),
            tuple(
                (d, len(s["groups"]), _shown(s["groups"]), s["bound"],
                 "yes" if s["on_corner"] else "no", "no" if s["vacuous"] else "yes")
                for d, s in found.items()
            ),
        ),
    )  # fmt: skip


def figure(results: Results) -> Chart:
    """The least bound by token width, and what predicting zero costs."""
    points = []
    for s in results.items[0].values["solutions"]:
        points.append(Point(s["token_dim"], summary([s["bound"]]), "best allocation"))
        points.append(Point(s["token_dim"], summary([s["zero_error"]]), "predicting zero"))
    title = f"Least error bound at total width {WIDTH}, {LAGS} equal lags"
    return curves(points, Axes(title, "token width", "bound", log_x=True, x_values=TOKEN_DIMS))


def _shown(groups: list[list[int]]) -> str:
    """`8 × 8` once if all groups are equal, else each."""
    texts = [f"{heads} × {width}" for heads, width in groups]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) or "none"


CLAIM = Claim(
    id="allocation-256",
    statement="The allocation problem at total width 256 gives 4 lags with 8 heads of width 8.",
    expected="M = 4, d_m = 8, H_m = 8 for tokens 8 wide.",
    source="arXiv 2510.03784, 4-gram experiment",
    setting="A formula, minimised over all plans: nothing is trained, nothing is drawn.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
    quick_verdicts=("holds",),
)
