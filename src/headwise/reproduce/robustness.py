"""Question of the paper's readers: are planned and cut models as robust as uniform ones?

Trained here, at equal attention parameters (a share of the dense model's): heads of one width
everywhere (uniform), the theory's plan (planned), and a dense model cut afterwards by sensitivity
(cut). In full also the pretrained model, cut uniformly and by sensitivity. All see the same shifted
text, the same noise, and each its own worst tokens. What counts is how much the loss rises: the
clean loss is another claim's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headwise.reproduce.answers import MARGIN
from headwise.reproduce.charting import Axes, Point, curves, panels
from headwise.reproduce.claim import Claim, Finding, Results, Size, Table, Trial, Values, Verdict
from headwise.reproduce.pretrained import NAME, TEXT
from headwise.reproduce.statistics import paired_difference, summary

if TYPE_CHECKING:
    from headwise.report.charts import Chart

SHARE = 0.75  # of the dense model's attention parameters
TRAINED: dict[Size, dict[str, Any]] = {
    "quick": {
        "d_model": 32, "heads": 4, "layers": 2, "context": 32, "vocab": 400,
        "characters": 200_000, "steps": 120, "batch": 16, "lr": 1e-2, "windows": 16, "scored": 24,
        "attacked": 4, "swaps": 2, "proposals": 4,
    },
    "full": {
        "d_model": 128, "heads": 8, "layers": 6, "context": 128, "vocab": 1024,
        "characters": 450_000, "steps": 600, "batch": 16, "lr": 3e-3, "windows": 64, "scored": 96,
        "attacked": 24, "swaps": 6, "proposals": 8,
    },
}  # fmt: skip
PRETRAINED = {
    "length": 128, "windows": 64, "scored": 32, "attacked": 6, "swaps": 6, "proposals": 6,
}  # fmt: skip
# The model, what it is compared with, and the words for the pair.
PAIRS = (
    ("planned", "uniform"),
    ("cut", "uniform"),
    ("pretrained, planned cut", "pretrained, uniform cut"),
)
Answer = Literal["as robust", "weaker", "undecided"]


@dataclass(frozen=True, slots=True)
class Compared:
    """One model against its baseline under one disturbance."""

    model: str
    baseline: str
    condition: str
    difference: float
    answer: Answer


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Uniform, planned, and dense with its cut; in full also the pretrained model's cuts."""
    cost = 4.0 if size == "quick" else 400.0
    made = [
        Trial("robustness", kind, seed, {"kind": kind, "share": SHARE, **TRAINED[size]}, cost)
        for seed in seeds
        for kind in ("uniform", "planned", "dense and cut")
    ]
    if size == "full":
        given = {"kind": "pretrained", "share": SHARE, "model": NAME, "text": TEXT, **PRETRAINED}
        made += [Trial("robustness", "pretrained", seed, given, 900.0) for seed in seeds]
    return made


def run(trial: Trial) -> Values:
    """Every model of a trial under every disturbance."""
    from headwise.reproduce.robust_models import pretrained_models, trained_models

    made = pretrained_models if trial.parameters["kind"] == "pretrained" else trained_models
    return {"models": made(trial)}


def judge(results: Results) -> Finding:
    """As robust: the 95% interval of the difference lies below a tenth of the baseline's rise.

    Weaker: above 0 by more than the spread, and by more than that tenth. Holds when all are as
    robust, does not hold when most are weaker, cannot be tested when all lie within the spread.
    """
    rises = _rises(results)
    found = compared(rises)
    count = {a: sum(c.answer == a for c in found) for a in ("as robust", "weaker", "undecided")}
    verdict: Verdict = "holds in part"
    if count["as robust"] == len(found):
        verdict = "holds"
    elif count["weaker"] > len(found) / 2:
        verdict = "does not hold"
    elif count["undecided"] == len(found):
        verdict = "cannot be tested here"
    weak = [
        f"{c.model} under {c.condition} ({c.difference:+.2g})"
        for c in found
        if c.answer == "weaker"
    ]
    return Finding(
        verdict,
        f"Of {len(found)} comparisons at {100 * SHARE:g}% of the attention parameters, "
        f"{count['as robust']} are as robust as uniform, {count['weaker']} weaker, "
        f"{count['undecided']} within the spread.",
        (
            f"Weaker: {'; '.join(weak) if weak else 'none'}.",
            "Compared are rises of the loss over each model's own clean loss, paired over seeds; "
            f"equal means within {100 * MARGIN:g}% of the baseline's rise.",
            "Greedy swaps are a search: a better one could hurt more.",
        ),
        _table(results, rises),
    )


def compared(rises: dict[str, dict[str, list[float]]]) -> list[Compared]:
    """Every model against its baseline, disturbance by disturbance."""
    found = []
    for model, baseline in PAIRS:
        if model not in rises or baseline not in rises:
            continue
        for condition, ours in rises[model].items():
            theirs = rises[baseline][condition]
            gap = paired_difference(ours, theirs)
            room = MARGIN * abs(summary(theirs).mean)
            answer: Answer = "undecided"
            if gap.high <= room:
                answer = "as robust"
            elif gap.positive and gap.mean > room:
                answer = "weaker"
            found.append(Compared(model, baseline, condition, gap.mean, answer))
    return found


def _rises(results: Results) -> dict[str, dict[str, list[float]]]:
    """By model and disturbance, one rise per seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in results.names:
        for result in results.named(name):
            for model, values in result.values["models"].items():
                for condition, rise in values["rises"].items():
                    found.setdefault(model, {}).setdefault(condition, []).append(float(rise))
    return found


def _table(results: Results, rises: dict[str, dict[str, list[float]]]) -> Table:
    clean: dict[str, list[float]] = {}
    params: dict[str, int] = {}
    for result in results:
        for model, values in result.values["models"].items():
            clean.setdefault(model, []).append(float(values["clean"]))
            params[model] = int(values["params"])
    answers = {(c.model, c.condition): c.answer for c in compared(rises)}
    rows = tuple(
        (
            model,
            params[model],
            str(summary(clean[model])),
            condition,
            str(summary(numbers)),
            answers.get((model, condition)),
        )
        for model, by_condition in rises.items()
        for condition, numbers in by_condition.items()
    )
    columns = (
        "model", "attention parameters", "clean loss", "disturbance", "rise of the loss",
        "against uniform",
    )  # fmt: skip
    return Table(columns, rows)


def figure(results: Results) -> Chart:
    """Rises by disturbance: the models side by side, a panel per family of models."""
    rises = _rises(results)
    parts = []
    for family in ("trained here", "pretrained"):
        mine = {
            m: r for m, r in rises.items() if m.startswith("pretrained") == (family == "pretrained")
        }
        if not mine:
            continue
        names = list(next(iter(mine.values())))
        points = [
            Point(i + 1, summary(numbers), model)
            for model, by_condition in mine.items()
            for i, numbers in enumerate(by_condition.values())
        ]
        words = ", ".join(f"{i + 1} {name}" for i, name in enumerate(names))
        places = tuple(range(1, len(names) + 1))
        axes = Axes(f"Disturbed input: {family}", words, "rise of the loss", x_values=places)
        parts.append(curves(points, axes))
    return panels(parts)


CLAIM = Claim(
    id="robustness",
    statement="Planned and cut models are as robust to shifted, noisy and adversarial input as "
    "uniform ones of equal attention parameters.",
    expected="Not measured by the paper; its readers asked for it.",
    source="arXiv 2510.03784, its readers' question",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
