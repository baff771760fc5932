"""Claim: wider heads bring diminishing returns, and the more so the longer the sequence.

One attention layer learns a task at several widths of its queries and keys and at several lengths;
values are equally wide everywhere, because saturation is about scores. The error is the loss as a
share of what a blind guess leaves (0: perfect, 1: blind), so that tasks and lengths compare. What
width brings lies between three widths:

    error │•  narrow
          │   ╲   early gain
          │     • middle
          │        ╲____  late gain
          │             • wide
          └──────────────── width of queries and keys

tasks    copy       one head learns the previous token by learned positions
         4-gram     four heads learn four lags of white noise, one pattern each

Saturation speaks of bounded scores, and these tasks want sharp attention at any length. Tasks that
only average would be its home ground, but there is nothing to see on them: counting marks among
fillers was solved by heads one wide (looked at beforehand with one seed that is not used here, as
were single runs of both tasks, to choose the training).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.papers.harness.charts import Axes, curves, panels, series
from headwise.papers.harness.claim import (
    Cell,
    Claim,
    Finding,
    Results,
    ResultTable,
    Size,
    Trial,
    Values,
    at_every_seed,
)
from headwise.papers.harness.judging import (
    Answer,
    answer,
    paired_difference,
    summary,
    verdict,
    why_open,
)

if TYPE_CHECKING:
    from headwise.papers.tasks.task import SyntheticTask
    from headwise.reporting.charts import Chart

TASKS = {"copy": 1, "4-gram": 4}  # heads
SIZES: dict[Size, dict[str, tuple[int, ...]]] = {
    "quick": {"lengths": (8, 16), "widths": (1, 4, 8)},
    "full": {"lengths": (8, 32, 128), "widths": (1, 2, 4, 8, 16)},
}
MIDDLE = 4  # between the narrowest and the widest
TRAINING: dict[Size, dict[str, Any]] = {
    "quick": {"steps": 60, "batch": 16, "lr": 1e-2, "d_model": 16},
    "full": {"steps": 800, "batch": 32, "lr": 5e-3, "d_model": 32},
}
VO_DIM, VOCAB = 8, 16
NOTHING = 0.01  # of a blind guess's error: less than that is no gain


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Every width at every length of every task."""
    experiments = {
        f"{task}, {length} tokens, {width} wide": {
            "task": task, "length": length, "width": width, **TRAINING[size],
        }
        for task in TASKS
        for length in SIZES[size]["lengths"]
        for width in SIZES[size]["widths"]
    }  # fmt: skip
    scale = 0.02 if size == "quick" else 0.15
    return at_every_seed("width-returns", seeds, experiments, lambda p: scale * (20 + p["length"]))


def run(trial: Trial) -> Values:
    """The loss on new sequences, as a share of a blind guess's."""
    from headwise.papers.tasks.network import TaskNetwork, task_plan
    from headwise.papers.tasks.training import ShortTraining, train_network
    from headwise.plan import HeadSpec

    p = trial.parameters
    task = _task(p["task"], p["length"], trial.seed)
    heads = [HeadSpec(qk_dim=p["width"], vo_dim=VO_DIM)] * TASKS[p["task"]]
    plan = task_plan(heads, p["d_model"], p["length"])
    # No skip: it would carry lag 0, and the heads alone are to be seen.
    model = TaskNetwork(plan, task, skip=False, seed=trial.seed)
    training = ShortTraining(p["steps"], p["batch"], p["lr"])
    score = train_network(model, task, training, seed=trial.seed)
    room = task.chance_loss - task.optimum_loss
    return {"error": (score.loss - task.optimum_loss) / room, "metric": score.metric}


def _task(name: str, length: int, seed: int) -> SyntheticTask:
    from headwise.papers.tasks.discrete import PreviousToken
    from headwise.papers.tasks.ngram import NGram

    if name == "copy":
        return PreviousToken(length, VOCAB)
    return NGram.random(TASKS[name], VO_DIM, length, seed=seed)


def judge(results: Results) -> Finding:
    """Two questions of each task. Gains below a hundredth of a blind guess's error are none.

    Diminishing: at the longest sequences the doublings up to the middle width bring more than
    those after it. More so for long: those after it bring less at the longest sequences than at
    the shortest. Where no width brings anything at the length asked about (the late gain at the
    shortest, or any gain at the longest), the question is open. Answers decide as in
    `judging.verdict`.
    """
    lengths, widths = SIZES[results.size]["lengths"], SIZES[results.size]["widths"]
    short, long = min(lengths), max(lengths)
    answers: list[Answer] = []
    told, reasons = [], []
    for task in TASKS:
        early, late = _gains(results, task, long)
        soon = _gains(results, task, short)[1]
        diminishing = _more(early, late) if "yes" in (_any(early), _any(late)) else "open"
        stronger = _more(soon, late) if "yes" in (_any(soon), _any(late)) else "open"
        answers += [diminishing, stronger]
        told.append(
            f"{task}: {summary(early)} up to {MIDDLE} wide and {summary(late)} from there to "
            f"{max(widths)} at {long} tokens, {summary(soon)} from there at {short}"
        )
        opened = "open" in (diminishing, stronger)
        nothing = {_any(early), _any(late), _any(soon)} == {"no"}
        why = "no width brings anything" if nothing else why_open(len(results.seeds))
        reasons.append(
            f"{task.capitalize()}: are the returns diminishing: {diminishing}; more so for long "
            f"sequences: {stronger}.{f' Open: {why}.' if opened else ''}"
        )
    return Finding(
        verdict(answers),
        f"What wider queries and keys bring, as a share of a blind guess’s error: "
        f"{'; '.join(told)}.",
        (
            *reasons,
            "Both tasks need attention that is as sharp at any length; saturation is proven for "
            "scores that stay bounded.",
        ),
        _table(results),
    )


def _any(gain: Sequence[float]) -> Answer:
    """Whether there is a gain."""
    return _more(gain, [0.0] * len(gain))


def _more(a: Sequence[float], b: Sequence[float]) -> Answer:
    return answer(paired_difference(a, b), NOTHING)


def _gains(results: Results, task: str, length: int) -> tuple[list[float], list[float]]:
    """What widths bring up to the middle one, and after it, at every seed."""
    curve = results.where(task=task, length=length).by("width", "error")
    first, middle, last = curve[min(curve)], curve[MIDDLE], curve[max(curve)]
    return (
        [a - b for a, b in zip(first, middle, strict=True)],
        [a - b for a, b in zip(middle, last, strict=True)],
    )


def _table(results: Results) -> ResultTable:
    lengths, widths = SIZES[results.size]["lengths"], SIZES[results.size]["widths"]
    rows: list[tuple[Cell, ...]] = []
    for task in TASKS:
        for length in lengths:
            curve = results.where(task=task, length=length).by("width", "error")
            rows.append((task, length, *(str(summary(errors)) for errors in curve.values())))
    return ResultTable(("task", "length", *(f"error, {w} wide" for w in widths)), tuple(rows))


def figure(results: Results) -> Chart:
    """The error by width at every length, a panel per task."""
    widths = SIZES[results.size]["widths"]
    drawn = []
    for task in TASKS:
        points = [
            point
            for length in SIZES[results.size]["lengths"]
            for point in series(
                results.where(task=task, length=length).by("width", "error"), f"{length} tokens"
            )
        ]
        axes = Axes(f"Error by width of queries and keys, {task}", "width", "error", log_x=True,
                    x_values=widths)  # fmt: skip
        drawn.append(curves(points, axes))
    return panels(drawn)


CLAIM = Claim(
    id="width-returns",
    statement="Wider queries and keys bring diminishing returns in the learning error, the more so "
    "the longer the sequence.",
    expected="Continuously increasing head dimensions leads to diminishing returns in learning "
    "errors, particularly for long sequences.",
    source="arXiv 2510.03784, saturation",
    setting="One attention layer on two synthetic tasks with known optima; a seed "
    "draws the task, the weights and the batches.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
