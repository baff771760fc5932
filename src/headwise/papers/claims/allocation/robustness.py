"""A question of the paper's readers: are planned and cut models as robust as uniform ones?

Trained here, at equal attention parameters (a share of the dense model's): heads of one width
everywhere (uniform), the theory's plan (planned), and a dense model cut afterwards by sensitivity
(cut). At full size also the pretrained model, cut uniformly and by sensitivity. All see the same
shifted text and the same noise, and each its own worst tokens (`disturbed_models`). The rise of the
loss favours models that have little to lose, the loss itself those that were better before: both
count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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
from headwise.papers.harness.judging import (
    MARGIN,
    NOT,
    Answer,
    larger,
    listed,
    summary,
    verdict,
)
from headwise.papers.tasks.pretrained import NAME, TEXT

if TYPE_CHECKING:
    from headwise.reporting.charts import Chart

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
COST: dict[Size, float] = {"quick": 4.0, "full": 270.0}
# The model, and what it is compared with.
PAIRS = (
    ("planned", "uniform"),
    ("cut", "uniform"),
    ("pretrained, planned cut", "pretrained, uniform cut"),
)
ONE_SEED = "One seed shows no spread, so every comparison counts as within it."
Robust = Literal["as robust", "weaker", "mixed", "within the spread"]
ANSWERS: tuple[Robust, ...] = ("as robust", "weaker", "mixed", "within the spread")


@dataclass(frozen=True, slots=True)
class DisturbedLosses:
    """One model under one disturbance, seed by seed."""

    clean: list[float]
    losses: list[float]
    rises: list[float]  # over the clean loss of the same windows


Seen = dict[str, dict[str, DisturbedLosses]]  # by model and disturbance


@dataclass(frozen=True, slots=True)
class AgainstBaseline:
    """One model against its baseline under one disturbance."""

    model: str
    condition: str
    rise: float  # how much larger on average
    loss: float
    more: Answer  # is the rise larger
    higher: Answer  # is the loss higher

    @property
    def robust(self) -> Robust:
        """Both answers in one."""
        if "open" in (self.more, self.higher):
            return "within the spread"
        if self.more != self.higher:
            return "mixed"
        return "weaker" if self.more == "yes" else "as robust"

    def __str__(self) -> str:
        return f"{self.model} under {self.condition} (rise {self.rise:+.2g}, loss {self.loss:+.2g})"


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Uniform, planned, and dense with its cut; at full size also the pretrained model's cuts."""
    experiments = {
        kind: {"kind": kind, "share": SHARE, **TRAINED[size]}
        for kind in ("uniform", "planned", "dense and cut")
    }
    if size == "full":
        given = {"kind": "pretrained", "share": SHARE, "model": NAME, "text": TEXT, **PRETRAINED}
        experiments["pretrained"] = given
    return at_every_seed(
        "robustness", seeds, experiments, lambda p: 550.0 if "model" in p else COST[size]
    )


def run(trial: Trial) -> Values:
    """Every model of a trial under every disturbance."""
    from headwise.papers.claims.allocation.disturbed_models import measure_models

    return {"models": measure_models(trial)}


def judge(results: Results) -> Finding:
    """Two questions of each pair and disturbance: is the rise larger, is the disturbed loss higher?

    Both as in `judging`, and less than a tenth of the rise is no difference in either. Weaker: yes
    to both. As robust: no to both. Mixed: one yes, one no. Otherwise it lies within the spread.
    Does not hold: most are weaker. Otherwise the verdict of `judging`, where every "no" to one of
    the questions counts for the claim and every "yes" against it.
    """
    seen = _seen(results)
    found = compare(seen)
    which = {a: [c for c in found if c.robust == a] for a in ANSWERS}
    ends = verdict([NOT[answer] for c in found for answer in (c.more, c.higher)])
    if len(which["weaker"]) > len(found) / 2:
        ends = "does not hold"
    return Finding(
        ends,
        f"Of {len(found)} comparisons at {100 * SHARE:g}% of the attention parameters, "
        f"{len(which['as robust'])} are as robust as uniform, {len(which['weaker'])} weaker, "
        f"{len(which['mixed'])} mixed, {len(which['within the spread'])} within the spread.",
        (
            f"Weaker: {listed(which['weaker'], '; ')}. Mixed: {listed(which['mixed'], '; ')}.",
            "Weaker means that the loss rises more over the model's own clean loss and also ends "
            "higher, as robust means neither, mixed one of the two. Paired over seeds; less than "
            f"{100 * MARGIN:g}% of the rise is no difference.",
            "Greedy swaps are a search: a better search could do more harm.",
            "Seeds draw the models and the windows; the trained models' windows are most of one "
            "short held-out text, the end of the documentation.",
            *((ONE_SEED,) if len(results.seeds) == 1 else ()),
        ),
        _table(results, seen, found),
    )


def compare(seen: Seen) -> list[AgainstBaseline]:
    """Every model against its baseline, disturbance by disturbance."""
    found = []
    for model, baseline in PAIRS:
        if model not in seen or baseline not in seen:
            continue
        for condition, ours in seen[model].items():
            theirs = seen[baseline][condition]
            rise = summary(ours.rises).mean - summary(theirs.rises).mean
            loss = summary(ours.losses).mean - summary(theirs.losses).mean
            # The same margin in nats for both: a tenth of the loss itself would hide whole rises.
            margin = MARGIN * abs(summary(ours.rises).mean) / abs(summary(ours.losses).mean)
            more = larger(ours.rises, theirs.rises)
            higher = larger(ours.losses, theirs.losses, margin=margin)
            found.append(AgainstBaseline(model, condition, rise, loss, more, higher))
    return found


def _seen(results: Results) -> Seen:
    found: Seen = {}
    for name in results.names:
        for result in results.named(name):
            for model, values in result.values["models"].items():
                for condition, both in values["disturbed"].items():
                    one = found.setdefault(model, {}).setdefault(
                        condition, DisturbedLosses([], [], [])
                    )
                    one.clean.append(float(values["clean"]))
                    one.losses.append(float(both["loss"]))
                    one.rises.append(float(both["rise"]))
    return found


def _table(results: Results, seen: Seen, found: Sequence[AgainstBaseline]) -> ResultTable:
    params = {m: int(v["params"]) for r in results for m, v in r.values["models"].items()}
    against = {(c.model, c.condition): c.robust for c in found}
    rows = tuple(
        (
            model,
            params[model],
            str(summary(one.clean)),
            condition,
            str(summary(one.rises)),
            str(summary(one.losses)),
            against.get((model, condition)),
        )
        for model, by_condition in seen.items()
        for condition, one in by_condition.items()
    )
    columns = (
        "model", "attention parameters", "clean loss", "disturbance", "rise of the loss",
        "disturbed loss", "against uniform",
    )  # fmt: skip
    return ResultTable(columns, rows)


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
