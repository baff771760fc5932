"""Claim: planned heads train better than uniform ones at equal parameters, or as well with less.

Everything but the attention is shared, all plans but the dense one have equal parameters and equal
FLOPs, and all models of a seed see the same batches. Three settings: language modelling (Llama
blocks), the same without MLPs, and classification of sequences.

The learning rate is constant after its rise, so that one run gives its whole curve of loss
against compute. The saving that counts is the one against the uniform plan: what both save against
the dense model is due to being smaller, not to being planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headwise.reproduce.answers import Answer, larger, verdict
from headwise.reproduce.charting import Axes, Point, curves, panels
from headwise.reproduce.claim import Claim, Finding, Results, Size, Table, Trial, Values
from headwise.reproduce.equal_quality import Spent, saving
from headwise.reproduce.planned_settings import (
    COST,
    COURSE,
    SETTINGS,
    SHAPE,
    TASK,
    TEXT,
    trained_plan,
)
from headwise.reproduce.rival_plans import POLICIES, RIVALS
from headwise.reproduce.statistics import CONFIDENCE, Difference, paired_difference, summary

if TYPE_CHECKING:
    from headwise.report.charts import Chart

PLANNED = "theory"  # the policy that plans
SHARE, CLAIMED = 0.75, (0.15, 0.25)
ENOUGH = 0.005  # of the loss: less is called equal


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Every policy in every setting."""
    made = []
    for seed in seeds:
        for setting in SETTINGS:
            task = setting == "classification"
            parameters = {
                "setting": setting,
                "share": SHARE,
                "shape": SHAPE[size],
                "data": TASK[size] if task else TEXT[size],
                "course": {**COURSE[size]["task" if task else "text"], "falling": False},
            }
            made += [
                Trial(
                    "planned-vs-uniform", f"{setting}: {policy}", seed,
                    {**parameters, "policy": policy}, COST[size][setting],
                )
                for policy in POLICIES
            ]  # fmt: skip
    return made


def run(trial: Trial) -> Values:
    """The curve of held-out losses, and what the plan costs."""
    return trained_plan(trial.parameters, trial.seed)


def judge(results: Results) -> Finding:
    """Two questions in every setting, about planned against uniform at equal parameters.

    Is its loss lower (by half a percent or more), and does it save more than 15% of the compute at
    equal loss? All yes: holds; some: in part; else it depends on whether the spread allows a no.
    """
    better = {s: larger(_finals(results, s, "uniform"), _finals(results, s, PLANNED), ENOUGH)
              for s in SETTINGS}  # fmt: skip
    gained = {s: _savings(results, s, PLANNED, "uniform") for s in SETTINGS}
    saves = {s: larger(gained[s], [CLAIMED[0]] * len(gained[s]), 0.0) for s in SETTINGS}
    measured = "; ".join(
        f"{s}: {summary(_finals(results, s, PLANNED))} planned, "
        f"{summary(_finals(results, s, 'uniform'))} uniform, {_percent(gained[s])} less compute "
        "at equal loss"
        for s in SETTINGS
    )
    rows = tuple(
        (
            s, _shown(p), str(summary(_finals(results, s, p))),
            str(_gap(results, s, p)) if p in RIVALS else None,
            _percent(_savings(results, s, p, "dense")) if p != "dense" else None,
            int(results.numbers(f"{s}: {p}", "attn_params")[0]),
        )
        for s in SETTINGS
        for p in POLICIES
    )  # fmt: skip
    columns = (
        "setting", "plan", "held-out loss", f"planned minus this, {_level():.4g}% interval",
        "compute saved against dense at equal loss", "attention parameters",
    )  # fmt: skip
    asked = (
        f"A loss lower than uniform's by at least {ENOUGH:.1%}: {_told(better)}. More than "
        f"{CLAIMED[0]:.0%} of its compute saved: {_told(saves)}.",
    )
    return Finding(
        verdict([*better.values(), *saves.values()]),
        f"Held-out loss at {SHARE:.0%} of the attention parameters: {measured}.",
        (*asked, *_reasons(results)),
        Table(columns, rows),
    )


def _reasons(results: Results) -> tuple[str, ...]:
    gaps = {r: {s: _gap(results, s, r) for s in SETTINGS} for r in RIVALS}
    cheaper = []
    for s in SETTINGS:
        dense, planned = (
            Spent.of(results.named(f"{s}: {p}")[0].values) for p in ("dense", PLANNED)
        )
        cheaper.append(f"{1 - planned.flops_per_step / dense.flops_per_step:.1%} ({s})")
    return (
        *(
            f"Against {r}, planned is better in {_listed([s for s in SETTINGS if of[s].negative])} "
            f"and worse in {_listed([s for s in SETTINGS if of[s].positive])} by more than the "
            "spread."
            for r, of in gaps.items()
        ),
        f"A token costs {', '.join(cheaper)} fewer FLOPs than in the dense model; a larger saving "
        "against it has to come from learning faster.",
        f"Intervals against rivals are made for {len(RIVALS)} at once; random plans are drawn anew "
        "at each seed; reversed has the planned widths in the opposite order.",
    )


def _gap(results: Results, setting: str, rival: str) -> Difference:
    mine, theirs = (_finals(results, setting, p) for p in (PLANNED, rival))
    return paired_difference(mine, theirs, confidence=_level() / 100)


def _level() -> float:
    """In percent: of each of the intervals that are made at once."""
    return 100 * (1 - (1 - CONFIDENCE) / len(RIVALS))


def _runs(results: Results, setting: str, policy: str) -> list[Spent]:
    return [Spent.of(r.values) for r in results.named(f"{setting}: {policy}")]


def _finals(results: Results, setting: str, policy: str) -> list[float]:
    return [run.final for run in _runs(results, setting, policy)]


def _savings(results: Results, setting: str, policy: str, reference: str) -> list[float]:
    pairs = zip(_runs(results, setting, policy), _runs(results, setting, reference), strict=True)
    return [saving(mine, theirs) for mine, theirs in pairs]


def _shown(policy: str) -> str:
    return "planned" if policy == PLANNED else policy


def _percent(shares: list[float]) -> str:
    found = summary(shares)
    spread = f" ± {100 * found.sd:.1f}" if found.n > 1 else ""
    return f"{100 * found.mean:.1f}{spread}%"


def _told(answers: Mapping[str, Answer]) -> str:
    return ", ".join(f"{setting} {answer}" for setting, answer in answers.items())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def figure(results: Results) -> Chart:
    """The loss against the uniform model's after the same compute and seed, in percent.

    Below 0 is better at equal compute. The curves themselves lie too close to be told apart.
    """
    drawn = []
    for setting in SETTINGS:
        uniform = _runs(results, setting, "uniform")
        points = []
        for policy in (p for p in POLICIES if p != "uniform"):
            runs = _runs(results, setting, policy)
            for i, step in enumerate(runs[0].steps):
                flops = runs[0].flops_per_step * step
                there = [run.loss_at(flops) for run in uniform]
                pairs = [(r.losses[i], d) for r, d in zip(runs, there, strict=True) if d]
                if pairs:
                    percent = summary([100 * (mine / theirs - 1) for mine, theirs in pairs])
                    points.append(Point(flops / 1e9, percent, _shown(policy)))
        words = "held-out loss against uniform, %"
        drawn.append(curves(points, Axes(setting, "training GFLOPs", words, log_x=True)))
    return panels(drawn)


CLAIM = Claim(
    id="planned-vs-uniform",
    statement="At equal parameters, models with planned heads train better than uniform ones, and "
    "reach the same quality with 15–25% less compute.",
    expected="15–25% less compute at the same accuracy (in a summary only; no uniform baseline and "
    "no FLOPs are given).",
    source="arXiv 2510.03784, summary",
    setting="Small models trained here on Python’s documentation and source, and on sequences to "
    "classify; a seed draws the weights and the batches.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
