"""Claim: planned heads train better than uniform ones at equal parameters, or as well with less.

Everything but the attention is shared, all plans but the dense one have equal parameters and equal
FLOPs, and all models of a seed see the same batches. Three settings: language modelling (Llama
blocks), the same without MLPs, and classification of sequences.

The learning rate is constant after its rise, so that one run gives its whole curve of loss
against compute. A saving is measured against the dense model, and the uniform plan is asked the
same: what it saves too is due to being smaller, not to being planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headwise.reproduce.charting import Axes, Point, curves, panels
from headwise.reproduce.claim import Claim, Finding, Results, Size, Table, Trial, Values, Verdict
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

SHARE, CLAIMED = 0.75, (0.15, 0.25)


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
    """Holds: better than uniform in every setting, and a saving of at least 15% that uniform lacks.

    In part: better in some setting, worse in none. A tie everywhere is no gain, so it does not.
    """
    gaps = {s: {r: _gap(results, s, r) for r in RIVALS} for s in SETTINGS}
    better = [s for s in SETTINGS if gaps[s]["uniform"].negative]
    worse = [s for s in SETTINGS if gaps[s]["uniform"].positive]
    savings = {s: {p: _savings(results, s, p) for p in ("theory", "uniform")} for s in SETTINGS}
    saves = [s for s in SETTINGS if _saves(savings[s]["theory"], savings[s]["uniform"])]
    verdict: Verdict = "does not hold"
    if better and not worse:
        all_of = len(better) == len(saves) == len(SETTINGS)
        verdict = "holds" if all_of else "holds in part"
    measured = "; ".join(
        f"{s}: {summary(_finals(results, s, 'theory'))} planned, "
        f"{summary(_finals(results, s, 'uniform'))} uniform "
        f"({_word(gaps[s]['uniform'])}), {_percent(savings[s]['theory'])} less compute than dense "
        f"(uniform {_percent(savings[s]['uniform'])})"
        for s in SETTINGS
    )
    rows = tuple(
        (
            s, p, str(summary(_finals(results, s, p))),
            _interval(gaps[s][p]) if p in RIVALS else None,
            _percent(_savings(results, s, p)) if p != "dense" else None,
            int(results.numbers(f"{s}: {p}", "attn_params")[0]),
        )
        for s in SETTINGS
        for p in POLICIES
    )  # fmt: skip
    columns = (
        "setting", "plan", "held-out loss", "planned minus this, 95% interval",
        "compute saved against dense at equal loss", "attention parameters",
    )  # fmt: skip
    return Finding(
        verdict,
        f"Held-out loss at {SHARE:.0%} of the attention parameters: {measured}.",
        _reasons(results, gaps, saves),
        Table(columns, rows),
    )


def _reasons(
    results: Results, gaps: dict[str, dict[str, Difference]], saves: list[str]
) -> tuple[str, ...]:
    beaten = {r: [s for s in SETTINGS if gaps[s][r].negative] for r in RIVALS}
    lost = {r: [s for s in SETTINGS if gaps[s][r].positive] for r in RIVALS}
    cheaper = []
    for s in SETTINGS:
        dense, planned = (
            Spent.of(results.named(f"{s}: {p}")[0].values) for p in ("dense", "theory")
        )
        cheaper.append(f"{1 - planned.flops_per_step / dense.flops_per_step:.1%} ({s})")
    sentences = [
        f"Against {r}, planned is better in {_listed(beaten[r])} and worse in {_listed(lost[r])} "
        "by more than the spread."
        for r in RIVALS
    ]
    return (
        *sentences,
        f"A saving of {CLAIMED[0]:.0%} or more that exceeds the uniform plan's: "
        f"{_listed(saves)}. A token costs {', '.join(cheaper)} fewer FLOPs than in the dense "
        "model; a larger saving has to come from learning faster.",
        f"Intervals are made for {len(RIVALS)} rivals at once; random plans are drawn anew at each "
        "seed; reversed has theory's widths in the opposite order.",
    )


def _gap(results: Results, setting: str, rival: str) -> Difference:
    level = 1 - (1 - CONFIDENCE) / len(RIVALS)
    mine, theirs = (_finals(results, setting, p) for p in ("theory", rival))
    return paired_difference(mine, theirs, confidence=level)


def _runs(results: Results, setting: str, policy: str) -> list[Spent]:
    return [Spent.of(r.values) for r in results.named(f"{setting}: {policy}")]


def _finals(results: Results, setting: str, policy: str) -> list[float]:
    return [run.final for run in _runs(results, setting, policy)]


def _savings(results: Results, setting: str, policy: str) -> list[float]:
    pairs = zip(_runs(results, setting, policy), _runs(results, setting, "dense"), strict=True)
    return [saving(mine, dense) for mine, dense in pairs]


def _saves(planned: list[float], uniform: list[float]) -> bool:
    enough = summary(planned).mean >= CLAIMED[0]
    return enough and paired_difference(planned, uniform).positive


def _percent(shares: list[float]) -> str:
    found = summary(shares)
    spread = f" ± {100 * found.sd:.1f}" if found.n > 1 else ""
    return f"{100 * found.mean:.1f}{spread}%"


def _interval(gap: Difference) -> str:
    return f"{gap.mean:+.3g} [{gap.low:+.2g}, {gap.high:+.2g}]"


def _word(gap: Difference) -> str:
    return "better" if gap.negative else "worse" if gap.positive else "within the spread"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def figure(results: Results) -> Chart:
    """The loss against the dense model's after the same compute and at the same seed, in percent.

    Below 0 is better at equal compute. The curves themselves lie too close to be told apart.
    """
    drawn = []
    for setting in SETTINGS:
        dense = _runs(results, setting, "dense")
        points = []
        for policy in POLICIES:
            runs = _runs(results, setting, policy)
            for i, step in enumerate(runs[0].steps):
                flops = runs[0].flops_per_step * step
                there = [run.loss_at(flops) for run in dense]
                pairs = [(r.losses[i], d) for r, d in zip(runs, there, strict=True) if d]
                if pairs:
                    percent = summary([100 * (mine / theirs - 1) for mine, theirs in pairs])
                    points.append(Point(flops / 1e9, percent, policy))
        words = "held-out loss against dense, %"
        drawn.append(curves(points, Axes(setting, "training GFLOPs", words, log_x=True)))
    return panels(drawn)


CLAIM = Claim(
    id="planned-vs-uniform",
    statement="At equal parameters, models with planned heads train better than uniform ones, and "
    "reach the same quality with 15–25% less compute.",
    expected="15–25% less compute at the same accuracy (in a summary only; no uniform baseline and "
    "no FLOPs are given).",
    source="arXiv 2510.03784, summary",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
