"""Claim: an allocation should adapt to sequence length and task.

Every plan of a small family (equal parameters) is trained in every condition; `fitted_plans` says
what adapting is then worth. The paper's bound itself can only adapt to the task: the sequence
length does not occur in it.
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
from headwise.reproduce.answers import Answer, counted, verdict
from headwise.reproduce.charting import Axes, Point, curves, panels
from headwise.reproduce.claim import Claim, Finding, Results, Size, Table, Trial, Values
from headwise.reproduce.fitted_plans import (
    ENOUGH,
    LEARNED,
    Fitted,
    Losses,
    Regret,
    chosen_plans,
    fitted,
    regrets,
)
from headwise.reproduce.statistics import summary

if TYPE_CHECKING:
    from headwise.report.charts import Chart

Pair = tuple[str, str]  # conditions: here, there


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Every plan in every condition."""
    made = []
    for seed in seeds:
        for condition, data in CONDITIONS[size].items():
            kind = "text" if data["kind"] == "text" else "task"
            length = data["context"] if kind == "text" else data["length"]
            named = condition if condition in COURSE[size] else kind
            course = {**COURSE[size][named], "batch": TOKENS_PER_STEP[size] // length}
            shared = {"condition": condition, "data": data, "course": course}
            made += [
                Trial(
                    "adaptive", f"{condition}: {plan}", seed,
                    {**shared, "plan": plan, "layers": layers, "d_model": D_MODEL[size]},
                    COST[size][named],
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
    # What is lost by one who answers without looking at the order of the tokens, if that is less.
    blind = getattr(task, "order_blind_loss", task.chance_loss)
    found = {"chance": task.chance_loss, "blind": blind}
    return {"loss": learned.finished().losses[-1], **found}


def judge(results: Results) -> Finding:
    """Two questions: does adapting pay to the length, and does it pay to the task?

    Yes: in some pair of conditions, by more than the spread and by a hundredth or more: of the
    loss on text, of a guess's loss on a task. No: in no pair, for certain. A task that no plan
    learned is open. Pairs of one kind of data at two lengths ask about length, pairs of two kinds
    at their longest about the task.
    """
    losses = _losses(results)
    chances, blinds = (_given(results, name) for name in ("chance", "blind"))
    found: dict[str, dict[Pair, Fitted]] = {
        axis: {(a, b): fitted(losses[a], losses[b]) for a, b in some}
        for axis, some in _pairs(results.size).items()
    }
    pays = {
        axis: {
            pair: one.pays(len(of), chances.get(pair[0]), blinds.get(pair[0]))
            for pair, one in of.items()
        }
        for axis, of in found.items()
    }
    answers = {axis: _some(list(of.values())) for axis, of in pays.items()}
    unlearned = _unlearned(losses, blinds)
    sentences = []
    for axis, of in found.items():
        shares = {
            pair: one.share(chances.get(pair[0]))
            for pair, one in of.items()
            if pair[0] not in unlearned  # text always remains
        }
        most = max(shares, key=shares.__getitem__)
        sentences.append(
            f"{axis} ({answers[axis]}): adapting pays in {counted(list(pays[axis].values()))} of "
            f"{len(of)} pairs; at most {shares[most]:+.1%} of "
            f"{'a guess’s loss' if most[0] in chances else 'the loss'}, in {most[0]} against the "
            f"plan for {most[1]}"
        )
    rows = tuple(
        (
            axis, here, _usual(losses[here]), there, _usual(losses[there]),
            str(summary(one.own)), one.interval(len(of)), pays[axis][here, there],
        )
        for axis, of in found.items()
        for (here, there), one in of.items()
    )  # fmt: skip
    columns = (
        "adapting to", "here", "own plan", "fitted to", "its plan", "loss of the own plan",
        "that of the other minus it, 95% interval", "pays",
    )  # fmt: skip
    return Finding(
        verdict(list(answers.values())),
        "; ".join(sentences) + ".",
        _reasons(losses, chances, unlearned),
        Table(columns, rows),
    )


def _some(answers: Sequence[Answer]) -> Answer:
    """Whether it is so in some pair."""
    if "yes" in answers:
        return "yes"
    return "no" if all(a == "no" for a in answers) else "open"


def _unlearned(losses: Mapping[str, Losses], blinds: Mapping[str, float]) -> list[str]:
    """The tasks on which no plan got past a blind guess."""
    return [
        condition
        for condition, blind in blinds.items()
        if min(summary(v).mean for v in losses[condition].values()) > LEARNED * blind
    ]


def _reasons(
    losses: Mapping[str, Losses], chances: Mapping[str, float], unlearned: Sequence[str]
) -> tuple[str, ...]:
    learned = {condition: of for condition, of in losses.items() if condition not in unlearned}
    worst = regrets(learned, chances)
    safest, riskiest = (pick(worst, key=lambda p: worst[p].share) for pick in (min, max))
    steady = [c for c, of in losses.items() if len(set(chosen_plans(of))) == 1]
    return (
        "Plans are chosen by the other seeds and scored on the one left out; intervals are made "
        "for all pairs of a question at once.",
        f"To pay means at least {ENOUGH:.0%}: of the loss on text, of what a guess loses on a "
        f"task; a task is open where both plans stay above {LEARNED:g} of a blind guess.",
        *(
            f"No plan learned {condition} in its steps: differences there say nothing about plans."
            for condition in unlearned
        ),
        f"The choice is the same whichever seed is left out in {len(steady)} of {len(losses)} "
        f"conditions{': ' + '; '.join(steady) if steady else ''}.",
        f"One plan for all, in hindsight: {safest} is on average at most "
        f"{_percent(worst[safest])} above the best plan ({worst[safest].condition}), {riskiest} up "
        f"to {_percent(worst[riskiest])} ({worst[riskiest].condition}), in the measure of what "
        "pays.",
        "The bound of the paper adapts to the width of tokens and to lags; the sequence length "
        "does not occur in it.",
    )


def _percent(regret: Regret) -> str:
    return f"{100 * regret.share:.2g}%"


def _given(results: Results, name: str) -> dict[str, float]:
    """What a guess loses, by condition; text has no such number."""
    return {
        r.trial.parameters["condition"]: float(r.values[name]) for r in results if name in r.values
    }


def _losses(results: Results) -> dict[str, Losses]:
    return {
        condition: {
            plan: results.numbers(f"{condition}: {plan}", "loss") for plan in PLANS[results.size]
        }
        for condition in CONDITIONS[results.size]
    }


def _pairs(size: Size) -> dict[str, list[Pair]]:
    kinds: dict[str, list[str]] = {}
    for condition, data in CONDITIONS[size].items():
        kinds.setdefault(data["kind"], []).append(condition)
    longest = [some[-1] for some in kinds.values()]
    return {
        "length": [(a, b) for some in kinds.values() for a in some for b in some if a != b],
        "task": [(a, b) for a in longest for b in longest if a != b],
    }


def _usual(losses: Losses) -> str:
    """The plan chosen most often."""
    picked = chosen_plans(losses)
    return max(dict.fromkeys(picked), key=picked.count)


def figure(results: Results) -> Chart:
    """How far every plan's loss is above the condition's best; a panel each."""
    plans, chances = PLANS[results.size], _given(results, "chance")
    names = ", ".join(f"{i} = {p}" for i, p in enumerate(plans, start=1))
    places = tuple(range(1, len(plans) + 1))
    drawn = []
    for condition, of in _losses(results).items():
        best = min(summary(values).mean for values in of.values())
        # The yardstick of what pays: the best loss of a task may be next to nothing.
        whole, word = (
            (best, "it") if condition not in chances else (chances[condition], "a guess’s")
        )
        points = [
            Point(i, summary([100 * (value - best) / whole for value in values]), "measured")
            for i, values in enumerate(of.values(), start=1)
        ]
        words = f"loss above the best, % of {word}"
        drawn.append(curves(points, Axes(f"Plans for {condition}", names, words, x_values=places)))
    return panels(drawn)


CLAIM = Claim(
    id="adaptive",
    statement="The best allocation depends on sequence length and task, so adapting it pays.",
    expected="Asked for by the paper's readers; the paper plans once.",
    source="arXiv 2510.03784, open questions",
    setting="Two-layer models trained here on Python’s documentation and source and on synthetic "
    "tasks; a seed draws the weights, the batches and the task.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
