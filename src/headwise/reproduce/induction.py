"""Claim: the trade-off between heads and width also holds for the first step of an induction head.

The first step lets every position know the token before it. On vectors the layer must put the
last two tokens side by side (2 lags of tokens 8 wide, total width 128: the allocation problem says
8 heads of 8 for each lag); on tokens it must name the previous one of 16 (1 lag, tokens 16 wide,
total width 128: 8 heads of 16).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.reproduce.charting import Axes, Point, curves, panels
from headwise.reproduce.claim import Claim, Finding, Results, Size, Table, Trial, Values
from headwise.reproduce.heads_curve import curve_of, finding, head_trials, judged_curve, solved
from headwise.reproduce.statistics import summary

if TYPE_CHECKING:
    from headwise.report.charts import Chart

WIDTH, CLAIMED = 128, 8
KINDS = {"vectors": "squared error", "tokens": "cross-entropy"}
HEADS: dict[Size, dict[str, tuple[int, ...]]] = {
    "quick": {"vectors": (1, 2, 8, 16, 64), "tokens": (1, 8, 32)},
    "full": {"vectors": (1, 2, 4, 8, 16, 32, 64), "tokens": (1, 2, 4, 8, 16, 32)},
}
TRAINING: dict[Size, dict[str, int]] = {
    "quick": {"length": 8, "steps": 80, "batch": 16},
    "full": {"length": 32, "steps": 2000, "batch": 32},
}


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Both kinds of tokens at every total number of heads."""
    cost = 1.5 if size == "quick" else 13.0
    networks = {
        f"{kind}, {heads} heads": {"kind": kind, "heads": heads, **TRAINING[size]}
        for kind in KINDS
        for heads in HEADS[size][kind]
    }
    return head_trials("induction", seeds, networks, cost)


def run(trial: Trial) -> Values:
    """The loss of a trained network on new sequences."""
    from headwise.data.tasks import NGram, PreviousToken
    from headwise.reproduce.task_training import Layout, Training, network, train

    p = trial.parameters
    task: Any
    if p["kind"] == "vectors":
        task = NGram.copying(2, 8, p["length"])
    else:
        task = PreviousToken(p["length"], 16)
    model = network(Layout(p["heads"], WIDTH // p["heads"], 32), task, seed=trial.seed)
    score = train(model, task, Training(p["steps"], p["batch"]), seed=trial.seed)
    return {"error": score.loss, "metric": score.metric, "chance": task.chance_loss}


def judge(results: Results) -> Finding:
    """Vectors in both readings of "heads", tokens in their only one, each against 8."""
    vectors, tokens = (results.where(kind=kind) for kind in KINDS)
    total = curve_of(vectors)
    on_vectors = (
        judged_curve(total, CLAIMED, "in total, on vectors"),
        judged_curve(curve_of(vectors, 2), CLAIMED, "per group, on vectors"),
    )
    on_tokens = (judged_curve(curve_of(tokens), CLAIMED, "on tokens", "cross-entropy"),)
    rows = tuple(
        (kind, h, WIDTH // h, str(summary(e)))
        for kind in KINDS
        for h, e in curve_of(results.where(kind=kind)).items()
    )
    more = (
        "On vectors two lags take two attention patterns; a single head cannot tell which of "
        "the two tokens it carries.",
        *(
            solved(curve_of(some), some.items[0].values["chance"], f" on {kind}")
            for kind, some in zip(KINDS, (vectors, tokens), strict=True)
        ),
    )
    return finding([on_vectors, on_tokens], more, Table(("kind", "heads", "width", "loss"), rows))


def figure(results: Results) -> Chart:
    """The loss by number of heads, vectors above tokens."""
    drawn = []
    for kind, unit in KINDS.items():
        curve = curve_of(results.where(kind=kind))
        points = [Point(h, summary(e), kind) for h, e in curve.items()]
        title = f"Copying the previous token, {kind}, total width {WIDTH}"
        drawn.append(curves(points, Axes(title, "heads in total", unit, True, True, tuple(curve))))
    return panels(drawn)


CLAIM = Claim(
    id="induction",
    statement="The trade-off between heads and width, lowest at 8 heads, also holds for the "
    "first step of an induction head.",
    expected="The same allocation works for the first step of an induction head.",
    source="arXiv 2510.03784",
    setting="One attention layer without a skip, random tokens; a seed draws the task, the "
    "weights and the batches.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
