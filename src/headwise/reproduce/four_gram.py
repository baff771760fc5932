"""Claim: trained one-layer models of total width 256 do the 4-gram task best with 8 heads.

White-noise tokens 8 wide, y_t = Σ ρ_i·x_{t−i} over 4 lags with ρ_i random rotations (scalar ρ_i of
one sign would need a single head). The network is one attention layer without a skip, so the
heads alone carry the tokens. The paper's numbers are errors of its own, unstated scale of y; ours
has variance 1, so curves compare by shape and not by height.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headwise.reproduce.charting import Axes, Point, curves
from headwise.reproduce.claim import Claim, Finding, Results, Size, Table, Trial, Values
from headwise.reproduce.heads_curve import curve_of, finding, head_trials, judged_curve, solved
from headwise.reproduce.statistics import summary

if TYPE_CHECKING:
    from headwise.report.charts import Chart

WIDTH, TOKEN_DIM, LAGS, CLAIMED = 256, 8, 4, 8
PAPER = {1: 0.3197, 2: 0.3174, 4: 0.1129, 8: 0.0167, 16: 0.0234, 32: 0.0559}
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
TRAINING: dict[Size, dict[str, int]] = {
    "quick": {"length": 8, "steps": 100, "batch": 16},
    "full": {"length": 32, "steps": 3000, "batch": 32},
}


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Every total number of heads; both readings lie on this curve."""
    cost = 2.0 if size == "quick" else 30.0
    networks = {f"{heads} heads": {"heads": heads, **TRAINING[size]} for heads in HEADS}
    return head_trials("four-gram", seeds, networks, cost)


def run(trial: Trial) -> Values:
    """The error of a trained network on new sequences, beside the exact levels of the task."""
    from headwise.data.tasks import NGram
    from headwise.reproduce.task_training import Layout, Training, network, train

    p = trial.parameters
    task = NGram.random(LAGS, TOKEN_DIM, p["length"], seed=trial.seed)
    model = network(Layout(p["heads"], WIDTH // p["heads"], 32), task, seed=trial.seed)
    score = train(model, task, Training(p["steps"], p["batch"]), seed=trial.seed)
    return {
        "error": score.metric,
        "chance": task.chance,
        "pattern_floor": task.pattern_error(min(p["heads"], LAGS)),
    }


def judge(results: Results) -> Finding:
    """Both readings of "heads", each against 8."""
    total, group = curve_of(results), curve_of(results, LAGS)
    bound = _bound()
    rows = tuple(
        (
            heads,
            WIDTH // heads,
            heads // LAGS if heads >= LAGS else None,
            str(summary(errors)),
            PAPER.get(heads),
            PAPER.get(heads // LAGS) if heads >= LAGS else None,
            bound.get(heads // LAGS) if heads >= LAGS else None,
            str(summary(results.numbers(f"{heads} heads", "pattern_floor"))),
        )
        for heads, errors in total.items()
    )
    columns = (
        "heads in total", "width", "heads per group", "measured error", "paper, heads in total",
        "paper, heads per group", "bound ÷ predicting zero", "floor of attention by position",
    )  # fmt: skip
    judgements = (
        judged_curve(total, CLAIMED, "in total"),
        judged_curve(group, CLAIMED, "per group"),
    )
    more = (
        "The bound is lowest at 8 heads per group, where a head is as wide as a token.",
        f"Heads that attend by position alone need one pattern per lag: with fewer than {LAGS} "
        "heads their error cannot vanish, from there on it can. Trained heads may stay below that "
        "floor, since they can attend by content as well.",
        solved(total, results.items[0].values["chance"]),
        "The variance of y is 1 here and not stated in the paper: compare shapes, not heights.",
    )
    return finding([judgements], more, Table(columns, rows))


def figure(results: Results) -> Chart:
    """Measured errors, the paper's in both readings, and the bound."""
    points = [Point(h, summary(e), "measured") for h, e in curve_of(results).items()]
    points += [Point(h, summary([e]), "paper, heads in total") for h, e in PAPER.items()]
    points += [Point(h * LAGS, summary([e]), "paper, heads per group") for h, e in PAPER.items()]
    words = "bound ÷ predicting zero, heads per group"
    points += [Point(h * LAGS, summary([b]), words) for h, b in _bound().items()]
    title = f"4-gram task at total width {WIDTH}"
    axes = Axes(title, "heads in total", "error", log_x=True, log_y=True, x_values=HEADS)
    return curves(points, axes)


def _bound() -> dict[int, float]:
    from headwise.theory.bounds import bound_curve

    curve = bound_curve(WIDTH, TOKEN_DIM, PAPER, lags=LAGS)
    return {h: b / curve.zero_error for h, b in zip(curve.heads, curve.bound, strict=True)}


CLAIM = Claim(
    id="four-gram",
    statement="Trained one-layer models of total width 256 have their lowest 4-gram error at 8 "
    "heads.",
    expected="Errors 0.3197, 0.3174, 0.1129, 0.0167, 0.0234, 0.0559 at 1, 2, 4, 8, 16, 32 heads.",
    source="arXiv 2510.03784, 4-gram figure",
    setting="One attention layer without a skip, white-noise tokens; a seed draws the task, the "
    "weights and the batches.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
