"""Claim: an allocation should adapt to sequence length and task.

Every plan of a small family (equal parameters) is trained in every condition. The plan fitted to a
condition is the one with the lowest loss there; adapting is worth what it costs to use the plan
fitted to another condition instead:

              plan A   plan B              worth of adapting = loss(here, their plan)
    here       1.00     1.10                                 − loss(here, own plan)
    there      0.90     0.80                               = 1.10 − 1.00

Choosing the lowest of several noisy losses flatters the choice, so plans are chosen by the other
seeds and scored on the seed left out. The paper's bound itself can only adapt to the task: the
sequence length does not occur in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headwise.reproduce.adaptive_conditions import (
    CONDITIONS,
    COST,
    COURSE,
    D_MODEL,
    PLANS,
    TOKENS_PER_STEP,
    condition_plan,
    condition_task,
)
from headwise.reproduce.charting import Axes, Point, curves, panels
from headwise.reproduce.claim import Claim, Finding, Results, Size, Table, Trial, Values, Verdict
from headwise.reproduce.statistics import CONFIDENCE, Difference, paired_difference, summary

if TYPE_CHECKING:
    from headwise.report.charts import Chart


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Every plan in every condition."""
    made = []
    for seed in seeds:
        for condition, data in CONDITIONS[size].items():
            kind = "text" if data["kind"] == "text" else "task"
            length = data["context"] if kind == "text" else data["length"]
            course = {**COURSE[size][kind], "batch": TOKENS_PER_STEP[size] // length}
            shared = {"condition": condition, "data": data, "course": course}
            made += [
                Trial(
                    "adaptive", f"{condition}: {plan}", seed,
                    {**shared, "plan": plan, "layers": layers, "d_model": D_MODEL[size]},
                    COST[size][kind],
                )
                for plan, layers in PLANS[size].items()
            ]  # fmt: skip
    return made


def run(trial: Trial) -> Values:
    """The held-out loss of one plan in one condition."""
    from headwise.reproduce import scratch_training as scratch

    p = trial.parameters
    course, seed = scratch.Course(**p["course"]), trial.seed
    if p["data"]["kind"] == "text":
        sizes = {name: value for name, value in p["data"].items() if name != "kind"}
        source = scratch.Source(**sizes)
        model = scratch.text_model(condition_plan(p, source.context, source.vocab_size), seed)
        learned = scratch.learned_text(model, source, course, seed)
        return {"loss": learned.finished().losses[-1]}
    from headwise.nn.one_layer import TaskNetwork

    task = condition_task(p["data"], seed)
    network = TaskNetwork(condition_plan(p, task.length, 0), task, norm=True, seed=seed)
    learned = scratch.learned_task(network, task, course, seed)
    return {"loss": learned.finished().losses[-1], "chance": task.chance_loss}


def chosen_plans(losses: Mapping[str, Sequence[float]]) -> list[str]:
    """For every seed, the plan with the lowest mean loss over the other seeds."""
    n = len(next(iter(losses.values())))

    def others(values: Sequence[float], left_out: int) -> float:
        kept = [v for i, v in enumerate(values) if i != left_out or n == 1]
        return summary(kept).mean

    return [min(losses, key=lambda plan: others(losses[plan], i)) for i in range(n)]


def worth(
    here: Mapping[str, Sequence[float]], there: Mapping[str, Sequence[float]], confidence: float
) -> Difference:
    """What the plan fitted to `there` costs more than one's own, here; seed by seed."""
    own, theirs = chosen_plans(here), chosen_plans(there)
    seeds = range(len(own))
    return paired_difference(
        [here[theirs[i]][i] for i in seeds], [here[own[i]][i] for i in seeds], confidence=confidence
    )


def judge(results: Results) -> Finding:
    """Holds: adapting pays by more than the spread to some length and to some task; in part: one.

    Pairs of one kind of data at two lengths ask about length, pairs of two kinds at their longest
    about the task.
    """
    losses = _losses(results)
    pairs = _pairs(results.size)
    level = 1 - (1 - CONFIDENCE) / sum(map(len, pairs.values()))
    found = {
        axis: {pair: worth(losses[pair[0]], losses[pair[1]], level) for pair in some}
        for axis, some in pairs.items()
    }
    pays = {axis: [pair for pair, gap in of.items() if gap.positive] for axis, of in found.items()}
    n_paying = sum(bool(some) for some in pays.values())
    verdict: Verdict = ("does not hold", "holds in part", "holds")[n_paying]
    sentences = []
    for axis, of in found.items():
        largest = max(of, key=lambda pair: of[pair].mean)
        own = summary([min(v) for v in zip(*losses[largest[0]].values(), strict=True)]).mean
        sentences.append(
            f"{axis}: adapting pays in {len(pays[axis])} of {len(of)} pairs; at most "
            f"{of[largest].mean:+.3g} ({of[largest].mean / own:+.1%}) in {largest[0]} against the "
            f"plan for {largest[1]}"
        )
    rows = tuple(
        (
            axis,
            here,
            _usual(losses[here]),
            there,
            _usual(losses[there]),
            gap.mean,
            gap.low,
            gap.high,
        )
        for axis, of in found.items()
        for (here, there), gap in of.items()
    )
    columns = (
        "adapting to", "here", "own plan", "fitted to", "its plan",
        "worth of adapting (loss)", "low", "high",
    )  # fmt: skip
    return Finding(verdict, "; ".join(sentences) + ".", _reasons(losses), Table(columns, rows))


def _reasons(losses: Mapping[str, Mapping[str, Sequence[float]]]) -> tuple[str, ...]:
    steady = [c for c, of in losses.items() if len(set(chosen_plans(of))) == 1]
    return (
        "Plans are chosen by the other seeds and scored on the one left out; intervals are made "
        "for all pairs at once.",
        f"The choice is the same whichever seed is left out in {len(steady)} of {len(losses)} "
        f"conditions{': ' + '; '.join(steady) if steady else ''}.",
        "The bound of the paper adapts to the width of tokens and to lags; the sequence length "
        "does not occur in it.",
    )


def _losses(results: Results) -> dict[str, dict[str, tuple[float, ...]]]:
    return {
        condition: {
            plan: results.numbers(f"{condition}: {plan}", "loss") for plan in PLANS[results.size]
        }
        for condition in CONDITIONS[results.size]
    }


def _pairs(size: Size) -> dict[str, list[tuple[str, str]]]:
    kinds: dict[str, list[str]] = {}
    for condition, data in CONDITIONS[size].items():
        kinds.setdefault(data["kind"], []).append(condition)
    longest = [some[-1] for some in kinds.values()]
    return {
        "length": [(a, b) for some in kinds.values() for a in some for b in some if a != b],
        "task": [(a, b) for a in longest for b in longest if a != b],
    }


def _usual(losses: Mapping[str, Sequence[float]]) -> str:
    """The plan chosen most often."""
    picked = chosen_plans(losses)
    return max(dict.fromkeys(picked), key=picked.count)


def figure(results: Results) -> Chart:
    """How far every plan's loss is above the condition's best, in percent."""
    losses = _losses(results)
    groups = {
        axis: {c for pair in some for c in pair} for axis, some in _pairs(results.size).items()
    }
    drawn = []
    for axis, members in groups.items():
        points = []
        for condition in (c for c in losses if c in members):
            best = min(summary(v).mean for v in losses[condition].values())
            for i, values in enumerate(losses[condition].values()):
                relative = summary([100 * (value / best - 1) for value in values])
                points.append(Point(i + 1, relative, condition))
        places = tuple(range(1, len(PLANS[results.size]) + 1))
        names = ", ".join(f"{i} = {p}" for i, p in enumerate(PLANS[results.size], start=1))
        axes = Axes(f"Plans by {axis}", names, "loss above the best, %", x_values=places)
        drawn.append(curves(points, axes))
    return panels(drawn)


CLAIM = Claim(
    id="adaptive",
    statement="The best allocation depends on sequence length and task, so adapting it pays.",
    expected="Asked for by the paper's readers; the paper plans once.",
    source="arXiv 2510.03784, open questions",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
