"""Two claims that are formulas: where the error bound is lowest, and the exact allocation.

bound-curve: at total width 128 the bound is lowest at 8 heads. The number 8 is 128/16: the
narrow-head term falls to 0, with a vertical tangent, where a head is as wide as a token, and the
few-heads term is too slow to win from there on. The same curve for other token widths shows whether
8 is a fact about heads or about the ratio.

allocation-256: at total width 256 the problem is solved by 4 lags with 8 heads of width 8 each. It
is solved exactly over all M, H_m and d_m, and for other token widths too. The solution stays on the
corner d_m = d as long as d < D/M; above that, where real models are, the bound is vacuous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.papers.harness.charts import Axes, curves, series
from headwise.papers.harness.claim import Claim, Finding, Results, ResultTable, Size, Trial, Values
from headwise.papers.harness.judging import listed

if TYPE_CHECKING:
    from headwise.reporting.charts import Chart

BOUND = {"width": 128, "token_dims": (4, 8, 16, 32, 64, 128), "most_heads": 80}
BOUND_WIDTH, BOUND_TOKEN_DIM = 128, 16
PAPER = {1: 1.326, 8: 0.166, 9: 0.481, 80: 0.965}  # read off the figure, three decimals
ALLOCATION = {"width": 256, "lags": 4, "token_dims": (2, 4, 8, 16, 32, 64, 128)}
ALLOCATION_WIDTH, ALLOCATION_TOKEN_DIM, LAGS = 256, 8, 4


def bound_trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """One computation without randomness."""
    return [Trial("bound-curve", "bound", 0, BOUND)]


def run_bound(trial: Trial) -> Values:
    """The curve for every token width, and its lowest point."""
    from headwise.theory.allocation import bound_curve

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


def judge_bound(results: Results) -> Finding:
    """It holds if the lowest point is at 8 and the values of the paper's figure come out."""
    found = {c["token_dim"]: c for c in results.items[0].values["curves"]}
    ours = found[BOUND_TOKEN_DIM]
    same = all(abs(ours["bound"][heads - 1] - bound) < 6e-4 for heads, bound in PAPER.items())
    corners = [d for d, c in found.items() if c["best_heads"] == BOUND_WIDTH // d]
    vacuous = [d for d, c in found.items() if c["best_bound"] >= c["zero_error"]]
    reasons = [
        "The lowest point is where a head is exactly as wide as a token "
        f"({BOUND_WIDTH}/d heads) for d = {listed(corners)}: 8 is the ratio "
        f"{BOUND_WIDTH}/{BOUND_TOKEN_DIM}, not a property of heads.",
    ]
    if vacuous:
        reasons.append(
            f"For d = {listed(vacuous)} even the lowest point promises no more than predicting "
            "zero."
        )
    values = ", ".join(f"{ours['bound'][h - 1]:.3f} at {h}" for h in PAPER)
    columns = (
        "token width d", "heads at the lowest point", f"{BOUND_WIDTH}/d", "bound", "non-vacuous",
    )  # fmt: skip
    rows = tuple(
        (d, c["best_heads"], BOUND_WIDTH // d, c["best_bound"], _yes(d not in vacuous))
        for d, c in found.items()
    )
    return Finding(
        "holds" if ours["best_heads"] == 8 and same else "does not hold",
        f"Lowest at {ours['best_heads']} heads; {values}.",
        tuple(reasons),
        ResultTable(columns, rows),
    )


def draw_bound(results: Results) -> Chart:
    """The bound by heads for three token widths."""
    points = [
        point
        for c in results.items[0].values["curves"]
        if c["token_dim"] in (8, 16, 32)
        for point in series(
            {heads: [bound] for heads, bound in enumerate(c["bound"], 1)},
            f"tokens {c['token_dim']} wide",
        )
    ]
    return curves(points, Axes(f"Error bound at total width {BOUND_WIDTH}", "heads", "bound"))


BOUND_CURVE = Claim(
    id="bound-curve",
    statement="The error bound at total width 128 has its minimum at 8 heads.",
    expected="1.326 at 1 head, 0.166 at 8 (a cusp), 0.481 at 9, 0.965 at 80.",
    source="arXiv 2510.03784, figure of E_128",
    setting="A formula: nothing is trained, nothing is random.",
    version=1,
    trials=bound_trials,
    run=run_bound,
    judge=judge_bound,
    figure=draw_bound,
    quick_verdicts=("holds",),
)


def allocation_trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """One computation without randomness."""
    return [Trial("allocation-256", "allocation", 0, ALLOCATION)]


def run_allocation(trial: Trial) -> Values:
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


def judge_allocation(results: Results) -> Finding:
    """It holds if the exact solution is the paper's."""
    found = {s["token_dim"]: s for s in results.items[0].values["solutions"]}
    ours = found[ALLOCATION_TOKEN_DIM]
    corner = [d for d, s in found.items() if s["on_corner"]]
    vacuous = [d for d, s in found.items() if s["vacuous"]]
    reasons = [
        f"For d = {listed(corner)} the solution is the corner where every head is as wide as a "
        "token: the problem does not weigh width against heads there.",
    ]
    if vacuous:
        reasons.append(f"For d = {listed(vacuous)} the best bound is that of predicting zero.")
    columns = (
        "token width d", "lags used", "heads × width per lag", "bound", "on the corner",
        "non-vacuous",
    )  # fmt: skip
    rows = tuple(
        (d, len(s["groups"]), _groups(s["groups"]), s["bound"], _yes(s["on_corner"]),
         _yes(not s["vacuous"]))
        for d, s in found.items()
    )  # fmt: skip
    return Finding(
        "holds" if ours["groups"] == [[8, 8]] * LAGS else "does not hold",
        f"M = {len(ours['groups'])}, {_groups(ours['groups'])}; bound {ours['bound']:.3f}.",
        tuple(reasons),
        ResultTable(columns, rows),
    )


def draw_allocation(results: Results) -> Chart:
    """The least bound by token width, and the error of predicting zero."""
    solutions = results.items[0].values["solutions"]
    names = {"bound": "best allocation", "zero_error": "predicting zero"}
    points = [
        point
        for s in solutions
        for value, name in names.items()
        for point in series({s["token_dim"]: [s[value]]}, name)
    ]
    title = f"Least error bound at total width {ALLOCATION_WIDTH}, {LAGS} equal lags"
    ticks = tuple(s["token_dim"] for s in solutions)
    return curves(points, Axes(title, "token width", "bound", log_x=True, x_values=ticks))


def _groups(groups: list[list[int]]) -> str:
    """`8 × 8` once if all groups are equal, else each."""
    texts = [f"{heads} × {width}" for heads, width in groups]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


ALLOCATION_256 = Claim(
    id="allocation-256",
    statement="The allocation problem at total width 256 gives 4 lags with 8 heads of width 8.",
    expected="M = 4, d_m = 8, H_m = 8 for tokens 8 wide.",
    source="arXiv 2510.03784, 4-gram experiment",
    setting="A formula, minimised over all plans: nothing is trained, nothing is random.",
    version=1,
    trials=allocation_trials,
    run=run_allocation,
    judge=judge_allocation,
    figure=draw_allocation,
    quick_verdicts=("holds",),
)
