"""Claim: a 64-wide head can be replaced by a 4-wide student that follows it well.

One query head of the pretrained model, with the keys and values it reads, is replaced; the rest
stays dense (`students` does the work). The seed chooses the head, the text and the random numbers.
Reported are the student's error on text it never saw (as a share of the head's own output) and the
rise of the model's loss, beside the rise without the head at all: a head that can simply be removed
says little about students.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headwise.papers.harness.charts import Axes, Point, curves, panels
from headwise.papers.harness.claim import (
    Claim,
    Finding,
    Results,
    ResultTable,
    Size,
    Trial,
    Values,
    at_every_seed,
)
from headwise.papers.harness.judging import Answer, larger, summary, verdict, why_open
from headwise.papers.tasks.pretrained import NAME, TEXT

if TYPE_CHECKING:
    from headwise.reporting.charts import Chart

METHODS = ("SVD start", "SVD start, fine-tuned", "random start, fine-tuned")
WIDTHS: dict[Size, tuple[int, ...]] = {"quick": (16, 4), "full": (32, 16, 8, 4)}
LAYERS: dict[Size, dict[str, tuple[int, ...]]] = {
    "quick": {"early": (5,), "late": (24,)},
    "full": {"early": (2, 7), "late": (22, 27)},
}
SIZES: dict[Size, dict[str, int]] = {
    "quick": {"length": 96, "windows": 16, "scored": 2, "steps": 20, "batch": 3},
    "full": {"length": 512, "windows": 32, "scored": 8, "steps": 300, "batch": 4},
}
# Both starts choose from the same rates: a random start needs steps ten times those of a good one.
RATES: dict[Size, tuple[float, ...]] = {
    "quick": (0.01, 0.1),
    "full": (0.003, 0.01, 0.03, 0.1, 0.3),
}
FOLLOWS = 0.1  # of the head's squared output: what "follows it well" is taken to mean


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """One trial per layer, with all widths and methods on the same text."""
    choices = {"widths": list(WIDTHS[size]), "rates": list(RATES[size]), **SIZES[size]}
    experiments = {
        f"layer {layer}": {"model": NAME, "text": TEXT, "depth": depth, "layer": layer, **choices}
        for depth, layers in LAYERS[size].items()
        for layer in layers
    }
    cost = 8.0 if size == "quick" else 250.0
    return at_every_seed("student-head", seeds, experiments, lambda _: cost)


def run(trial: Trial) -> Values:
    """Errors and losses of all students of one head."""
    from headwise.papers.claims.allocation.students import measure_students

    return measure_students(trial, METHODS)


def judge(results: Results) -> Finding:
    """Does the fine-tuned student at the narrowest width follow its head, early and late?

    Yes: its error lies below a tenth of the head's output by more than the spread. No: above it
    likewise. Otherwise open. The verdict is that of `judging` over the two depths. Whether
    fine-tuning helps, and whether the SVD start beats a random one, is reported.
    """
    narrowest = min(results.parameters["widths"])
    follows: list[Answer] = []
    shown, reasons, others = [], [], []
    for depth in LAYERS[results.size]:
        start, tuned, chance = (_mean_error(results, depth, m) for m in METHODS)
        last, rise = (
            _numbers(results, depth, METHODS[1], narrowest, value) for value in ("error", "rise")
        )
        follows.append(larger([FOLLOWS] * len(last), last, margin=0.0))
        helps, better = larger(start, tuned), larger(chance, tuned)
        others += [helps, better]
        shown.append(
            f"{depth} {summary(last)} (loss {_signed(rise)}, without the head "
            f"{_signed(_removed(results, depth))})"
        )
        reasons.append(
            f"{depth.capitalize()} layers, mean error over widths: {summary(start)} before "
            f"fine-tuning, {summary(tuned)} after (does it help: {helps}), {summary(chance)} from "
            f"a random start (is the SVD start better: {better})."
        )
    told = "; ".join(f"{d}: {a}" for d, a in zip(LAYERS[results.size], follows, strict=True))
    is_open = "open" in (*follows, *others)
    said = f" Open: {why_open(len(results.seeds))}." if is_open else ""
    return Finding(
        verdict(follows),
        f"Error of the fine-tuned {narrowest}-wide student: {'; '.join(shown)}.",
        (
            f"A student follows well when its squared error on new text is at most {FOLLOWS:g} of "
            f"the head's squared output. Does the fine-tuned {narrowest}-wide one follow: "
            f"{told}.{said}",
            *reasons,
            _rates(results),
            "A “head” is one query head with the keys and values it reads. Where several query "
            "heads share them, the student has its own: narrowing a whole group together is "
            "harder.",
            "“SVD start”: of values and output the directions that carry most of the head's output "
            "on the text it is fitted on, by a truncated SVD. Queries and keys have no SVD: each "
            "rotary plane rotates at its own speed, so the strongest planes stay as they are "
            f"({narrowest // 2} of them at width {narrowest}).",
        ),
        _table(results),
    )


def _rates(results: Results) -> str:
    """Whether either start would have used a larger rate than there was."""
    rows = [row for r in results for row in r.values["students"]]
    most = max(results.parameters["rates"])
    svd, chance = ([row["rate"] for row in rows if row["method"] == m] for m in METHODS[1:])
    return (
        f"Both starts choose from the same learning rates, on text set aside; the largest, "
        f"{most:g}, was best for {svd.count(most)} of {len(svd)} SVD starts and "
        f"{chance.count(most)} of {len(chance)} random ones."
    )


def _table(results: Results) -> ResultTable:
    rows = [
        (
            depth,
            method,
            width,
            str(summary(_numbers(results, depth, method, width, "error"))),
            str(summary(_numbers(results, depth, method, width, "rise"))),
            str(summary(_removed(results, depth))),
        )
        for depth in LAYERS[results.size]
        for method in METHODS
        for width in results.parameters["widths"]
    ]
    columns = ("layers", "student", "width", "error", "rise of the loss", "rise without the head")
    return ResultTable(columns, tuple(rows))


def figure(results: Results) -> Chart:
    """Error and rise of the loss by width, early and late."""
    widths = tuple(sorted(results.parameters["widths"]))
    parts = []
    for depth in LAYERS[results.size]:
        for value, what, words in (
            ("error", "Error of a 64-wide head’s students", "error ÷ the head’s output"),
            ("rise", "Loss with a student in its head’s place", "rise of the loss"),
        ):
            points = [
                Point(w, summary(_numbers(results, depth, method, w, value)), method)
                for method in METHODS
                for w in widths
            ]
            if value == "rise":
                gone = summary(_removed(results, depth))
                points += [Point(w, gone, "without the head") for w in widths]
            title = f"{what}, {depth} layers"
            parts.append(curves(points, Axes(title, "width", words, log_x=True, x_values=widths)))
    return panels(parts)


def _numbers(results: Results, depth: str, method: str, width: int, value: str) -> list[float]:
    """One value per seed: the mean over the layers of this depth."""
    found: dict[int, list[float]] = {seed: [] for seed in results.seeds}
    for r in results.where(depth=depth):
        for row in r.values["students"]:
            if (row["method"], row["width"]) == (method, width):
                found[r.trial.seed].append(row[value])
    return [float(np.mean(each)) for each in found.values()]


def _mean_error(results: Results, depth: str, method: str) -> list[float]:
    widths = results.parameters["widths"]
    each = [_numbers(results, depth, method, w, "error") for w in widths]
    return [float(x) for x in np.mean(each, axis=0)]


def _removed(results: Results, depth: str) -> list[float]:
    mine = results.where(depth=depth)
    return [
        float(np.mean([r.values["removed"] for r in mine if r.trial.seed == seed]))
        for seed in results.seeds
    ]


def _signed(numbers: Sequence[float]) -> str:
    return f"{summary(numbers).mean:+.2g}"


CLAIM = Claim(
    id="student-head",
    statement="A 64-wide head can be replaced by a 4-wide student (truncated-SVD start, then "
    "fine-tuned) that follows it well.",
    expected="The 4-wide student follows the 64-wide head well; one head was replaced.",
    source="arXiv 2510.03784, saturation experiments",
    setting="Single heads of SmolLM2-135M-Instruct on Python’s documentation and source; a seed "
    "draws the head, the windows and the random starts.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
