"""Question of the paper's readers: are planned and cut models as robust as uniform ones?

Trained here, at equal attention parameters (a share of the dense model's): heads of one width
everywhere (uniform), the theory's plan (planned), and a dense model cut afterwards by sensitivity
(cut). In full also the pretrained model, cut uniformly and by sensitivity. All see the same shifted
text, the same noise, and each its own worst tokens. How much the loss rises favours models that
have little to lose, how high it ends favours those that were better before: both count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headwise.reproduce.answers import MARGIN, NOT, Answer, larger, verdict
from headwise.reproduce.charting import Axes, Point, curves, panels
from headwise.reproduce.claim import Claim, Finding, Results, Size, Table, Trial, Values
from headwise.reproduce.pretrained import NAME, TEXT
from headwise.reproduce.statistics import summary

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
        "characters": 450_000, "steps": 600, "batch": 16, "lr": 1.5e-3, "windows": 64, "scored": 48,
        "attacked": 24, "swaps": 6, "proposals": 8,
    },
}  # fmt: skip
PRETRAINED = {
    "length": 128, "windows": 48, "scored": 16, "attacked": 4, "swaps": 4, "proposals": 6,
}  # fmt: skip
# The model, and what it is compared with.
PAIRS = (
    ("planned", "uniform"),
    ("cut", "uniform"),
    ("pretrained, planned cut", "pretrained, uniform cut"),
)
ONE_SEED = "One seed shows no spread, so every comparison counts as within it."
Outcome = Literal["as robust", "weaker", "mixed", "within the spread"]
OUTCOMES: tuple[Outcome, ...] = ("as robust", "weaker", "mixed", "within the spread")


@dataclass(frozen=True, slots=True)
class Disturbed:
    """One model under one disturbance, seed by seed."""

    clean: list[float]
    losses: list[float]
    rises: list[float]  # over the clean loss of the same windows


Seen = dict[str, dict[str, Disturbed]]  # by model and disturbance


@dataclass(frozen=True, slots=True)
class Compared:
    """One model against its baseline under one disturbance."""

    model: str
    condition: str
    rise: float  # how much larger on average
    loss: float
    more: Answer  # is the rise larger
    higher: Answer  # is the loss

    @property
    def outcome(self) -> Outcome:
        """Both answers in one word."""
        if "open" in (self.more, self.higher):
            return "within the spread"
        if self.more != self.higher:
            return "mixed"
        return "weaker" if self.more == "yes" else "as robust"

    def __str__(self) -> str:
        return f"{self.model} under {self.condition} (rise {self.rise:+.2g}, loss {self.loss:+.2g})"


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Uniform, planned, and dense with its cut; in full also the pretrained model's cuts."""
    cost = 4.0 if size == "quick" else 270.0
    made = [
        Trial("robustness", kind, seed, {"kind": kind, "share": SHARE, **TRAINED[size]}, cost)
        for seed in seeds
        for kind in ("uniform", "planned", "dense and cut")
    ]
    if size == "full":
        given = {"kind": "pretrained", "share": SHARE, "model": NAME, "text": TEXT, **PRETRAINED}
        made += [Trial("robustness", "pretrained", seed, given, 550.0) for seed in seeds]
    return made


def run(trial: Trial) -> Values:
    """Every model of a trial under every disturbance."""
    from headwise.reproduce.robust_models import pretrained_models, trained_models

    made = pretrained_models if trial.parameters["kind"] == "pretrained" else trained_models
    return {"models": made(trial)}


def judge(results: Results) -> Finding:
    """Two questions of each pair and disturbance: is the rise larger, is the disturbed loss higher?

    Both as in `answers`, and less than a tenth of the rise is no difference in either. Weaker: yes
    to both. As robust: no to both. Mixed: once yes, once no. Otherwise it lies within the spread.
    Does not hold: most are weaker. Else the verdict of `answers`, where every "no" to one of the
    questions counts for the claim and every "yes" against it.
    """
    seen = _seen(results)
    found = compared(seen)
    which = {o: [c for c in found if c.outcome == o] for o in OUTCOMES}
    judged = verdict([NOT[answer] for c in found for answer in (c.more, c.higher)])
    if len(which["weaker"]) > len(found) / 2:
        judged = "does not hold"
    return Finding(
        judged,
        f"Of {len(found)} comparisons at {100 * SHARE:g}% of the attention parameters, "
        f"{len(which['as robust'])} are as robust as uniform, {len(which['weaker'])} weaker, "
        f"{len(which['mixed'])} mixed, {len(which['within the spread'])} within the spread.",
        (
            f"Weaker: {_listed(which['weaker'])}. Mixed: {_listed(which['mixed'])}.",
            "Weaker means that the loss rises more over the model's own clean loss and also ends "
            "higher, as robust neither, mixed one of the two. Paired over seeds; less than "
            f"{100 * MARGIN:g}% of the rise is no difference.",
            "Greedy swaps are a search: a better one could hurt more.",
            "Seeds draw the models and the windows; the trained models' windows are most of one "
            "short held-out text, the end of the documentation.",
            *((ONE_SEED,) if len(results.seeds) == 1 else ()),
        ),
        _table(results, seen, found),
    )


def compared(seen: Seen) -> list[Compared]:
    """Every model against its baseline, disturbance by disturbance."""
    found = []
    for model, baseline in PAIRS:
        if model not in seen or baseline not in seen:
            continue
        for condition, ours in seen[model].items():
            theirs = seen[baseline][condition]
            rise = summary(ours.rises).mean - summary(theirs.rises).mean
            loss = summary(ours.losses).mean - summary(theirs.losses).mean
            # The same room in nats for both: a tenth of the loss itself would hide whole rises.
            room = MARGIN * abs(summary(ours.rises).mean) / abs(summary(ours.losses).mean)
            more = larger(ours.rises, theirs.rises)
            higher = larger(ours.losses, theirs.losses, margin=room)
            found.append(Compared(model, condition, rise, loss, more, higher))
    return found


def _seen(results: Results) -> Seen:
    found: Seen = {}
    for name in results.names:
        for result in results.named(name):
            for model, values in result.values["models"].items():
                for condition, both in values["disturbed"].items():
                    one = found.setdefault(model, {}).setdefault(condition, Disturbed([], [], []))
                    one.clean.append(float(values["clean"]))
                    one.losses.append(float(both["loss"]))
                    one.rises.append(float(both["rise"]))
    return found


def _listed(found: Sequence[Compared]) -> str:
    return "; ".join(map(str, found)) or "none"


def _table(results: Results, seen: Seen, found: Sequence[Compared]) -> Table:
    params = {m: int(v["params"]) for r in results for m, v in r.values["models"].items()}
    outcomes = {(c.model, c.condition): c.outcome for c in found}
    rows = tuple(
        (
            model,
            params[model],
            str(summary(one.clean)),
            condition,
            str(summary(one.rises)),
            str(summary(one.losses)),
            outcomes.get((model, condition)),
        )
        for model, by_condition in seen.items()
        for condition, one in by_condition.items()
    )
    columns = (
        "model", "attention parameters", "clean loss", "disturbance", "rise of the loss",
        "disturbed loss", "against uniform",
    )  # fmt: skip
    return Table(columns, rows)


def figure(results: Results) -> Chart:
    """Rises by disturbance: the models side by side, a panel per family of models."""
    seen = _seen(results)
    parts = []
    for family in ("trained here", "pretrained"):
        mine = {
            m: r for m, r in seen.items() if m.startswith("pretrained") == (family == "pretrained")
        }
        if not mine:
            continue
        names = list(next(iter(mine.values())))
        points = [
            Point(i + 1, summary(one.rises), model)
            for model, by_condition in mine.items()
            for i, one in enumerate(by_condition.values())
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
    setting="Small Llama models trained here on Python’s documentation, and "
    "SmolLM2-135M-Instruct; shifted text is Python’s source. A seed draws the weights, "
    "the batches and the windows.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
