"""Claim: 4-wide queries and keys follow a 64-wide head well, and the better the longer the context.

One query head is replaced at a time, by queries and keys that are narrower; its values stay whole
and the rest of the model stays dense (`students` does the work). Two teachers:

    without rotary positions   small Llamas trained here, whose heads rotate nothing: there the
                               truncated SVD of W_Q·W_Kᵀ exists
    SmolLM2                    a pretrained model with rotary positions, early and late layers

The error of a row is the *misplaced attention*, half the sum of |p̃ − p| (total variation): 0 for
equal rows, 1 for rows that share no token. Corollary 2 is about the 2-norm of the row, so that is
measured too, beside its bound Λ·min(½, e^{2C}/L) with the Λ and C of every row itself.

The pass mark must be within reach of a 4-wide head. Its floor was looked at beforehand, on one head
each of layers 12 and 20 of SmolLM2 (which are not part of the claim) with 256 tokens: 0.12 and
0.14. A tenth, an earlier mark, is below that floor; the mark is a fifth. Where a floor turns out
not to be below the mark, the question stays open. What the fitted students reached there was seen
too: 0.47 and 0.35 after 60 steps, at the largest of three rates; both were raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.papers.claims.allocation.saturation import LEARNED, doubled
from headwise.papers.harness.charts import Axes, Point, curves, panels, series
from headwise.papers.harness.claim import (
    Cell,
    Claim,
    Finding,
    Results,
    ResultTable,
    Size,
    Trial,
    Values,
)
from headwise.papers.harness.judging import (
    Answer,
    larger,
    line,
    logs,
    summary,
    verdict,
    why_open,
)
from headwise.papers.tasks.pretrained import NAME, TEXT

if TYPE_CHECKING:
    from headwise.plan import Plan
    from headwise.reporting.charts import Chart

START, TUNED = METHODS = ("SVD or planes", "fine-tuned")
TRAINED, PRETRAINED = TEACHERS = ("without rotary positions", "SmolLM2")
LAYERS: dict[Size, dict[str, tuple[int, ...]]] = {
    "quick": {TRAINED: (1,), PRETRAINED: (24,)},
    "full": {TRAINED: (2, 3), PRETRAINED: (2, 7, 22, 27)},
}
STUDENTS: dict[Size, dict[str, Any]] = {
    "quick": {
        "widths": [8, 4], "rates": [0.03, 0.1], "fit_steps": 20, "fit_batch": 3, "windows": 12,
        "scored": 2, "floor_steps": 20, "floor_windows": 1, "from": 8,
    },
    "full": {
        "widths": [16, 4], "rates": [0.03, 0.1, 0.3], "fit_steps": 150, "fit_batch": 4,
        "windows": 16, "scored": 4, "floor_steps": 200, "floor_windows": 2, "from": 32,
    },
}  # fmt: skip
LENGTH: dict[Size, int] = {"quick": 64, "full": 512}
MODEL: dict[Size, dict[str, float]] = {
    "quick": {
        "d_model": 32, "head": 16, "layers": 2, "context": 64, "vocab": 400,
        "characters": 200_000, "steps": 100, "batch": 8, "lr": 1e-2,
    },
    "full": {
        "d_model": 128, "head": 64, "layers": 4, "context": 256, "vocab": 1024,
        "characters": 450_000, "steps": 600, "batch": 8, "lr": 3e-3,
    },
}  # fmt: skip
FOLLOWS = 0.2  # of a row's attention may be misplaced: what "follows it well" is taken to mean


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """A trained teacher with all its layers per seed, and one trial per layer of SmolLM2."""
    layers, students = LAYERS[size], STUDENTS[size]
    here = {"teacher": TRAINED, "at": list(layers[TRAINED]), **MODEL[size], **students}
    costs = (10.0, 5.0) if size == "quick" else (240.0, 120.0)
    made = []
    for seed in seeds:
        made.append(Trial("student-head", TRAINED, seed, here, costs[0]))
        for layer in layers[PRETRAINED]:
            p = {
                "teacher": PRETRAINED, "at": [layer], "model": NAME, "text": TEXT,
                "length": LENGTH[size], **students,
            }  # fmt: skip
            made.append(Trial("student-head", f"{PRETRAINED}, layer {layer}", seed, p, costs[1]))
    return made


def run(trial: Trial) -> Values:
    """Errors of all students of one head in every layer of the trial."""
    from headwise.papers.claims.allocation.students import Lesson, StudentFit, measure_head
    from headwise.papers.tasks.pretrained import documents, pretrained_model, trial_windows

    p = trial.parameters
    if p["teacher"] == PRETRAINED:
        model, length = pretrained_model().model, p["length"]
        calibration, scored = trial_windows(p, trial.seed)
        learned: Values = {"text_sha256": documents(p["text"]).sha256}
    else:
        model, calibration, scored, learned = _trained_teacher(trial)
        length = p["context"]
    lesson = Lesson(model, calibration, scored, doubled(length))
    fit = StudentFit(
        tuple(p["widths"]), p["fit_steps"], p["fit_batch"], tuple(p["rates"]), trial.seed,
        p["floor_steps"], p["floor_windows"],
    )  # fmt: skip
    heads = [measure_head(lesson, layer, METHODS, fit) for layer in p["at"]]
    return {"lengths": list(lesson.lengths), "heads": heads, **learned}


def _trained_teacher(trial: Trial) -> tuple[Any, np.ndarray, np.ndarray, Values]:
    """A small language model without rotary positions, and windows of its text."""
    from headwise.papers.tasks.training import (
        corpus,
        llama_shape,
        random_windows,
        text_model,
        train_llama,
    )
    from headwise.plan import Plan

    p = trial.parameters
    plan = unrotated(Plan.uniform(llama_shape(p, p["d_model"] // p["head"])))
    model = text_model(plan, trial.seed)
    curve = train_llama(model, p, p["lr"], trial.seed).finished()
    text = corpus(p["characters"], p["vocab"])
    windows = [
        random_windows(stream, p["context"], p[count], trial.seed)
        for stream, count in ((text.train, "windows"), (text.held_out, "scored"))
    ]
    learned = {"trained_loss": curve.losses[-1], "pair_loss": text.pair_loss(p["vocab"])}
    return model, windows[0], windows[1], learned


def unrotated(plan: Plan) -> Plan:
    """The plan with heads that rotate no plane: only the causal mask tells positions apart."""
    layers = tuple(
        layer.model_copy(
            update={"heads": tuple(h.model_copy(update={"rotary_planes": ()}) for h in layer.heads)}
        )
        for layer in plan.layers
    )
    return plan.model_copy(update={"layers": layers})


# --- the rule ----------------------------------------------------------------------------------


def judge(results: Results) -> Finding:
    """Two questions of each teacher, about its fine-tuned students of the least width.

    Follows: at the longest context they misplace less than a fifth of the attention. Better with
    length: they misplace less there than at the length `from`, below which rows are so short that
    there is little to misplace. A mark that nobody can miss, or nobody can meet, decides nothing:
    a student above it is open where the floor is not below it, and both questions are where heads
    without queries and keys are not above it, or where the trained teachers did not learn more
    than pairs of tokens. The four answers decide as in `judging.verdict`. Corollary 2's bound,
    exponents, other widths and losses are reported.
    """
    narrow, start = min(results.parameters["widths"]), results.parameters["from"]
    answers: list[Answer] = []
    shown, reasons = [], []
    for teacher in TEACHERS:
        lengths = _lengths(results, teacher)
        first, last = lengths.index(start), len(lengths) - 1
        curve = _curve(results, teacher, TUNED, narrow, "misplaced")
        ends = [[row[i] for row in curve] for i in (first, last)]
        floor, uniform = (
            [row[last] for row in _per_seed(results, teacher, name)]
            for name in ("floor", "uniform")
        )
        mark = [FOLLOWS] * len(curve)
        follows, better = larger(mark, ends[1], margin=0.0), larger(ends[0], ends[1])
        why = _undecided(results, teacher)
        missed = larger(uniform, mark, margin=0.0)
        if missed != "yes" and not why:
            none = "a head without queries and keys is not above the mark"
            why = none if missed == "no" else why_open(len(results.seeds))
        if why:
            follows = better = "open"
        elif follows == "no" and larger(mark, floor, margin=0.0) != "yes":
            follows, why = "open", "the floor is not below the mark"
        answers += [follows, better]
        if "open" in (follows, better):
            why = f" Open: {why or why_open(len(results.seeds))}."
        shown.append(
            f"{teacher}: {summary(ends[0])} at {start} tokens, {summary(ends[1])} at {lengths[-1]} "
            f"(floor {summary(floor)}, a head without queries and keys {summary(uniform)})"
        )
        reasons += [
            f"Teacher {teacher}: does the {narrow}-wide student follow: {follows}; is it better "
            f"with length: {better}.{why}",
            _corollary(results, teacher, narrow),
            _losses(results, teacher, narrow),
        ]
    return Finding(
        verdict(answers),
        f"Attention misplaced by the fine-tuned {narrow}-wide student: {'; '.join(shown)}.",
        (
            "Misplaced attention is half the sum of |p̃ − p| over a row (total variation); a "
            f"student follows well when that is at most {FOLLOWS:g}. The floor is what is left "
            f"when the scores of a window may be any matrix of rank {narrow}, found for that "
            "window alone by gradient descent: a head cannot do better, and may do worse.",
            *reasons,
            _rates(results),
            "A “head” is one query head with the keys it reads, and its values stay whole. Where "
            "several query heads share keys, the student has its own: narrowing a whole group "
            "together is harder. Heads with rotary positions have no SVD, because each plane "
            f"rotates at its own speed; the {narrow // 2} strongest planes are their start.",
        ),
        _table(results),
    )


def _undecided(results: Results, teacher: str) -> str:
    """Why a trained teacher says nothing: it does not know more than which token follows which."""
    mine = [r.values for r in results.where(teacher=teacher)]
    if "trained_loss" not in mine[0]:
        return ""
    gap = summary([v["pair_loss"] - v["trained_loss"] for v in mine]).mean
    return "" if gap >= LEARNED else "the teachers did not learn more than pairs of tokens"


def _corollary(results: Results, teacher: str, width: int) -> str:
    """Corollary 2 beside what was measured."""
    lengths = _lengths(results, teacher)
    start = lengths.index(results.parameters["from"])
    found = {
        value: np.asarray(_curve(results, teacher, TUNED, width, value))
        for value in ("error", "bound", "score_error", "score_bound", "misplaced")
    }
    x = logs(lengths[start:])
    powers = {
        value: summary([line(x, logs(row[start:].tolist())).slope for row in rows])
        for value, rows in found.items()
    }
    last = {value: summary(rows[:, -1].tolist()) for value, rows in found.items()}
    return (
        f"Corollary 2, {teacher}: at {lengths[-1]} tokens the 2-norm of the error is "
        f"{last['error']} and its bound {last['bound']} (Λ = {last['score_error']}, scores within "
        f"±{last['score_bound']}); no two rows are further apart than √2. From {lengths[start]} "
        f"tokens on Λ goes as L^({powers['score_error']}), the 2-norm as L^({powers['error']}), "
        f"the misplaced attention as L^({powers['misplaced']}); Λ/L with bounded scores and equal "
        "errors would be 0.5, −0.5 and 0."
    )


def _losses(results: Results, teacher: str, width: int) -> str:
    rise = [
        float(np.mean([_row(h, TUNED, width)["rise"] for h in hs]))
        for hs in _heads(results, teacher)
    ]
    gone = [float(np.mean([h["removed"] for h in hs])) for hs in _heads(results, teacher)]
    told = (
        f"Teacher {teacher}: the loss rises by {summary(rise)} with the {width}-wide student "
        f"in the head’s place, and by {summary(gone)} without the head."
    )
    mine = [r.values for r in results.where(teacher=teacher)]
    if "trained_loss" in mine[0]:
        gap = summary([v["pair_loss"] - v["trained_loss"] for v in mine])
        told += f" The teachers’ loss is {gap} nats below that of token pairs."
    return told


def _rates(results: Results) -> str:
    """Whether fits would have used a larger rate than there was."""
    most = max(results.parameters["rates"])
    rows = [row for r in results for h in r.values["heads"] for row in h["students"]]
    chosen = [row["rate"] for row in rows if row["method"] == TUNED]
    return (
        f"Fits choose their learning rate on windows set aside; the largest, {most:g}, was best "
        f"for {chosen.count(most)} of {len(chosen)}, and the start was kept in {chosen.count(0.0)}."
    )


def _table(results: Results) -> ResultTable:
    rows: list[tuple[Cell, ...]] = []
    for teacher in TEACHERS:
        lengths = _lengths(results, teacher)
        for width in results.parameters["widths"]:
            for method in METHODS:
                cells = []
                for value in ("misplaced", "misplaced_bound", "error", "bound"):
                    curve = _curve(results, teacher, method, width, value)
                    cells.append(str(summary([row[-1] for row in curve])))
                curve = _curve(results, teacher, method, width, "misplaced")
                first = lengths.index(results.parameters["from"])
                early = str(summary([row[first] for row in curve]))
                rows.append((teacher, width, method, lengths[-1], early, *cells))
    columns = (
        "teacher", "width", "student", "longest L", f"misplaced at {results.parameters['from']}",
        "misplaced at L", "its bound tanh(w/4)", "2-norm at L", "its bound (Corollary 2)",
    )  # fmt: skip
    return ResultTable(columns, tuple(rows))


def figure(results: Results) -> Chart:
    """By context length: the misplaced attention, and the 2-norm with Corollary 2's bound."""
    narrow = min(results.parameters["widths"])
    parts = []
    for teacher in TEACHERS:
        lengths = tuple(_lengths(results, teacher))

        def points(rows: Sequence[Sequence[float]], name: str, at: tuple[int, ...]) -> list[Point]:
            return series(dict(zip(at, zip(*rows, strict=True), strict=True)), name)

        shown: list[Point] = []
        for width in results.parameters["widths"]:
            for method in METHODS:
                rows = _curve(results, teacher, method, width, "misplaced")
                shown += points(rows, f"{width} wide, {method}", lengths)
        shown += points(_per_seed(results, teacher, "floor"), f"floor of {narrow} wide", lengths)
        shown += points(_per_seed(results, teacher, "uniform"), "no queries and keys", lengths)
        title = f"Attention misplaced by narrower queries and keys, {teacher}"
        parts.append(
            curves(shown, Axes(title, "context L", "misplaced", log_x=True, x_values=lengths))
        )
        norms: list[Point] = []
        names = {"error": "2-norm", "bound": "Corollary 2’s bound", "score_error": "Λ"}
        for value, name in names.items():
            norms += points(_curve(results, teacher, TUNED, narrow, value), name, lengths)
        begin = summary([row[0] for row in _curve(results, teacher, TUNED, narrow, "error")]).mean
        norms += series({L: [begin * lengths[0] / L] for L in lengths}, "1/L")
        title = f"Error of {narrow}-wide students in the 2-norm, {teacher}"
        parts.append(curves(norms, Axes(title, "context L", "2-norm", True, True, lengths)))
    return panels(parts)


def _lengths(results: Results, teacher: str) -> list[int]:
    found: list[int] = results.where(teacher=teacher).items[0].values["lengths"]
    return found


def _heads(results: Results, teacher: str) -> Iterator[list[Values]]:
    """The heads of a teacher, seed by seed."""
    mine = results.where(teacher=teacher)
    for seed in results.seeds:
        yield [h for r in mine if r.trial.seed == seed for h in r.values["heads"]]


def _row(head: Values, method: str, width: int) -> Values:
    (row,) = (r for r in head["students"] if (r["method"], r["width"]) == (method, width))
    return dict(row)


def _curve(
    results: Results, teacher: str, method: str, width: int, value: str
) -> list[list[float]]:
    """By length, the mean over a seed's heads."""
    heads = _heads(results, teacher)
    return [np.mean([_row(h, method, width)[value] for h in hs], axis=0).tolist() for hs in heads]


def _per_seed(results: Results, teacher: str, value: str) -> list[list[float]]:
    return [np.mean([h[value] for h in hs], axis=0).tolist() for hs in _heads(results, teacher)]


CLAIM = Claim(
    id="student-head",
    statement="A 64-wide head’s queries and keys can be replaced by 4-wide ones (truncated-SVD "
    "start, then fine-tuned) that follow its attention well, and the better the longer the "
    "context.",
    expected="The 4-wide student follows the 64-wide head well; its error in the attention is of "
    "order Λ/L (Corollary 2); one head was replaced.",
    source="arXiv 2510.03784, saturation experiments and Corollary 2",
    setting="Single heads of small Llamas without rotary positions, trained here on Python’s "
    "documentation, and of SmolLM2-135M-Instruct; a seed draws the trained model, the head and the "
    "windows.",
    version=2,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
