"""Claim: the trade-off between heads and width also holds for the nonlinear task.

The 4-gram task with relu on every token, y_t = Σ ρ_i·relu(x_{t−i}), and an MLP behind the
attention that can bend what the heads gather. Same widths, same head counts as the linear task.
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
HEADS: dict[Size, tuple[int, ...]] = {
    "quick": (1, 4, 8, 32, 128),
    "full": (1, 2, 4, 8, 16, 32, 64, 128),
}
TRAINING: dict[Size, dict[str, int]] = {
    "quick": {"length": 8, "steps": 150, "batch": 16},
    "full": {"length": 32, "steps": 4000, "batch": 32},
}


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Every total number of heads."""
    cost = 3.0 if size == "quick" else 45.0
    networks = {f"{heads} heads": {"heads": heads, **TRAINING[size]} for heads in HEADS[size]}
    return head_trials("nonlinear", seeds, networks, cost)


def run(trial: Trial) -> Values:
    """The error of a trained network on new sequences, beside the levels of blind predictors."""
    from headwise.data.tasks import NGram
    from headwise.reproduce.task_training import Layout, Training, network, train

    p = trial.parameters
    task = NGram.random(LAGS, TOKEN_DIM, p["length"], activation="relu", seed=trial.seed)
    layout = Layout(p["heads"], WIDTH // p["heads"], 48)
    model = network(layout, task, mlp=True, seed=trial.seed)
    score = train(model, task, Training(p["steps"], p["batch"], lr=5e-3), seed=trial.seed)
    return {"error": score.metric, "chance": task.chance, "affine": task.affine_error()}


def judge(results: Results) -> Finding:
    """Both readings of "heads", each against 8."""
    total, group = curve_of(results), curve_of(results, LAGS)
    judgements = (
        judged_curve(total, CLAIMED, "in total"),
        judged_curve(group, CLAIMED, "per group"),
    )
    first = results.items[0].values
    rows = tuple(
        (h, WIDTH // h, h // LAGS if h >= LAGS else None, str(summary(e))) for h, e in total.items()
    )
    more = (
        f"A constant has an error of {first['chance']:.3f}, the best affine predictor "
        f"{first['affine']:.3f}: below that the network bends what it gathers.",
        solved(total, first["chance"]),
    )
    columns = ("heads in total", "width", "heads per group", "measured error")
    return finding([judgements], more, Table(columns, rows))


def figure(results: Results) -> Chart:
    """Measured errors by number of heads, beside the affine level."""
    points = [Point(h, summary(e), "measured") for h, e in curve_of(results).items()]
    points += [
        Point(h, summary(e), "best affine predictor")
        for h, e in curve_of(results, value="affine").items()
    ]
    title = f"Nonlinear 4-gram task at total width {WIDTH}"
    heads = tuple(curve_of(results))
    return curves(points, Axes(title, "heads in total", "error", True, True, heads))


CLAIM = Claim(
    id="nonlinear",
    statement="The trade-off between heads and width, lowest at 8 heads, also holds for the "
    "nonlinear task.",
    expected="The same allocation works for a nonlinear extension of the task.",
    source="arXiv 2510.03784",
    setting="One attention layer with an MLP behind it, white-noise tokens; a seed draws the "
    "task, the weights and the batches.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
