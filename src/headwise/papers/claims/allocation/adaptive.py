"""Claim: an allocation should adapt to sequence length and task.

All plans of a size have equal parameters; they differ in how many heads share a layer's width, and
in which layer has more of it. Every plan is trained in every condition, a kind of data at a length;
a step sees the same number of tokens in every condition.

The plan fitted to a condition is the one with the lowest loss there. Adapting is worth what it
costs to use the plan fitted to another condition instead:

              plan A   plan B              worth of adapting = loss(here, their plan)
    here       1.00     1.10                                 − loss(here, own plan)
    there      0.90     0.80                               = 1.10 − 1.00

Choosing the lowest of several noisy losses flatters the choice, so plans are chosen by the other
seeds and scored on the seed left out. The paper's bound itself can only adapt to the task: the
sequence length does not occur in it.

This stays in the record. What decides about design are `two-layers`, `three-tokens` and
`six-layers`, which compare with the best uniform plan over 12 to 20 seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.papers.harness.charts import Axes, curves, panels, series
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
    Answer,
    counted,
    joint_confidence,
    larger,
    paired_difference,
    summary,
    verdict,
)

if TYPE_CHECKING:
    from headwise.papers.tasks.task import SyntheticTask
    from headwise.plan import Plan
    from headwise.reporting.charts import Chart

# --- plans and conditions ----------------------------------------------------------------------

# Heads and head width by layer; every layer pair has the same sum of heads × width.
PLANS: dict[Size, dict[str, list[list[int]]]] = {
    "quick": {
        "2 × 16": [[2, 16], [2, 16]],
        "8 × 4": [[8, 4], [8, 4]],
        "wide first": [[4, 12], [4, 4]],
    },
    "full": {
        "2 × 32": [[2, 32], [2, 32]],
        "4 × 16": [[4, 16], [4, 16]],
        "8 × 8": [[8, 8], [8, 8]],
        "16 × 4": [[16, 4], [16, 4]],
        "wide first": [[8, 12], [8, 4]],
        "wide last": [[8, 4], [8, 12]],
    },
}
D_MODEL: dict[Size, int] = {"quick": 32, "full": 64}
# Scored by the rule itself, in expectation over its noise; named, since it decides the numbers.
_LABELS = {"kind": "classification", "scored_by": "rule"}
TEXT: dict[Size, dict[str, Any]] = {
    "quick": {"kind": "text", "characters": 150_000, "vocab_size": 300},
    "full": {"kind": "text", "characters": 8_000_000, "vocab_size": 1024},
}
CONDITIONS: dict[Size, dict[str, dict[str, Any]]] = {
    "quick": {
        "text, 8 tokens": {**TEXT["quick"], "context": 8},
        "text, 32 tokens": {**TEXT["quick"], "context": 32},
        "4-gram": {"kind": "4-gram", "length": 8},
        "classification": {**_LABELS, "length": 16, "vocab_size": 8, "marks": 3},
    },
    "full": {
        "text, 16 tokens": {**TEXT["full"], "context": 16},
        "text, 256 tokens": {**TEXT["full"], "context": 256},
        "induction, 15 tokens": {"kind": "induction", "length": 15, "vocab_size": 64, "prefix": 8},
        "induction, 63 tokens": {"kind": "induction", "length": 63, "vocab_size": 64, "prefix": 32},
        "4-gram": {"kind": "4-gram", "length": 32},
        "classification": {**_LABELS, "length": 64, "vocab_size": 16, "marks": 5},
    },
}
TOKENS_PER_STEP: dict[Size, int] = {"quick": 128, "full": 1024}
# By condition, or else by kind: a step sees few long sequences, so the long task needs more steps.
COURSE: dict[Size, dict[str, dict[str, Any]]] = {
    "quick": {
        "text": {"steps": 30, "lr": 1e-2, "evaluations": 5, "scored": 16},
        "task": {"steps": 30, "lr": 3e-3, "evaluations": 5, "scored": 128},
    },
    "full": {
        "text": {"steps": 800, "lr": 3e-3, "evaluations": 1, "scored": 256},
        "task": {"steps": 1000, "lr": 2e-3, "evaluations": 1, "scored": 1024},
        "induction, 63 tokens": {"steps": 2500, "lr": 2e-3, "evaluations": 1, "scored": 1024},
    },
}
COST: dict[Size, dict[str, float]] = {
    "quick": {"text": 0.4, "task": 0.4},
    "full": {"text": 40.0, "task": 12.0, "induction, 63 tokens": 60.0},
}


def condition_plan(p: Mapping[str, Any], context: int, vocab_size: int) -> Plan:
    """The trial's layers; a language model has MLPs, a task network has none."""
    from headwise.plan import HeadSpec, LayerPlan, ModelShape, Plan

    biases = tuple(p.get("biases", ()))
    layers = tuple(
        LayerPlan(heads=(HeadSpec(qk_dim=width, vo_dim=width),) * heads, biases=biases)
        for heads, width in p["layers"]
    )
    width = max(w for _, w in p["layers"])
    heads = p["d_model"] // width if p["d_model"] % width == 0 else 1
    shape = ModelShape(
        n_layers=len(layers),
        d_model=p["d_model"],
        context=context,
        n_heads=heads,
        n_kv_heads=heads,
        qk_dim=width,
        vo_dim=width,
        vocab_size=vocab_size,
        ffn_dim=3 * p["d_model"] if vocab_size else 0,
        attention_biases=biases,
    )
    return Plan(shape=shape, layers=layers)


def condition_task(data: Mapping[str, Any], seed: int) -> SyntheticTask:
    """The task of a condition; the seed draws the weights of an n-gram."""
    from headwise.papers.tasks.discrete import InductionHead, SequenceClassification
    from headwise.papers.tasks.ngram import NGram

    sizes = {name: value for name, value in data.items() if name not in ("kind", "scored_by")}
    if data["kind"] == "4-gram":
        return NGram.random(4, 8, sizes["length"], seed=seed)
    if data["kind"] == "induction":
        return InductionHead(**sizes)
    return SequenceClassification(**sizes, rule="first", noise=0.05)


# --- what adapting is worth --------------------------------------------------------------------

ENOUGH = 0.01  # of the yardstick: less does not pay
LEARNED = 0.9  # of a blind guess: above it nothing was learned that a plan could help with
Losses = Mapping[str, Sequence[float]]  # at every seed, by plan
Pair = tuple[str, str]  # conditions: here, there


@dataclass(frozen=True, slots=True)
class Condition:
    """The losses of every plan in one condition, beside those of guesses; text has no guesses."""

    losses: Losses
    chance: float | None = None  # of a guess
    blind: float | None = None  # of one that does not look at the order of the tokens

    def yardstick(self, loss: float) -> float:
        """What differences are a share of: the loss itself on text, the loss of a guess on a task.

        The best loss of a task may be next to nothing.
        """
        return loss if self.chance is None else self.chance

    def is_learned(self, losses: Sequence[float]) -> bool:
        """Whether one of these mean losses is better than a blind guess."""
        return self.blind is None or min(losses) <= LEARNED * self.blind

    def means(self) -> dict[str, float]:
        """The mean loss of every plan."""
        return {plan: summary(values).mean for plan, values in self.losses.items()}


@dataclass(frozen=True, slots=True)
class Adaptation:
    """Losses in one condition, at every seed: of the plan fitted to another, and of its own."""

    here: Condition
    other: Sequence[float]
    own: Sequence[float]

    @property
    def share(self) -> float:
        """What adapting is worth, by the yardstick."""
        own = summary(self.own).mean
        return (summary(self.other).mean - own) / self.here.yardstick(own)

    def pays(self, n_pairs: int) -> Answer:
        """Whether the other plan's loss is larger by more than is called equal.

        Where neither plan is better than a blind guess, there is nothing to tell.
        """
        own, other = summary(self.own).mean, summary(self.other).mean
        if not self.here.is_learned((own, other)):
            return "open"
        margin = ENOUGH * self.here.yardstick(own) / other
        return larger(self.other, self.own, margin, joint_confidence(n_pairs))

    def interval(self, n_pairs: int) -> str:
        """The mean difference with its interval."""
        confidence = joint_confidence(n_pairs)
        return str(paired_difference(self.other, self.own, confidence=confidence))


@dataclass(frozen=True, slots=True)
class Regret:
    """How far a plan is above the best one, by the yardstick, and where."""

    share: float
    condition: str


def chosen_plans(losses: Losses) -> list[str]:
    """For every seed, the plan with the lowest mean loss over the other seeds."""
    n = len(next(iter(losses.values())))

    def others(values: Sequence[float], left_out: int) -> float:
        kept = [v for i, v in enumerate(values) if i != left_out or n == 1]
        return summary(kept).mean

    return [min(losses, key=lambda plan: others(losses[plan], i)) for i in range(n)]


def adaptation(here: Condition, there: Condition) -> Adaptation:
    """The losses here of the plan fitted to `there` and of its own, seed by seed."""
    own, theirs = chosen_plans(here.losses), chosen_plans(there.losses)
    seeds = range(len(own))
    return Adaptation(
        here,
        [here.losses[theirs[i]][i] for i in seeds],
        [here.losses[own[i]][i] for i in seeds],
    )


def regrets(conditions: Mapping[str, Condition]) -> dict[str, Regret]:
    """For every plan, where it is furthest above the best plan, by mean losses in hindsight."""
    found: dict[str, Regret] = {}
    for name, condition in conditions.items():
        means = condition.means()
        best = min(means.values())
        for plan, mean in means.items():
            share = (mean - best) / condition.yardstick(best)
            if plan not in found or share > found[plan].share:
                found[plan] = Regret(share, name)
    return found


# --- the claim ---------------------------------------------------------------------------------


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Every plan in every condition."""
    experiments = {}
    for condition, data in CONDITIONS[size].items():
        length = data["context"] if data["kind"] == "text" else data["length"]
        course = {
            **COURSE[size][_course(size, condition)],
            "batch": TOKENS_PER_STEP[size] // length,
        }
        shared = {"condition": condition, "data": data, "course": course}
        for plan, layers in PLANS[size].items():
            parameters = {**shared, "plan": plan, "layers": layers, "d_model": D_MODEL[size]}
            experiments[f"{condition}: {plan}"] = parameters
    return at_every_seed(
        "adaptive", seeds, experiments, lambda p: COST[size][_course(size, p["condition"])]
    )


def _course(size: Size, condition: str) -> str:
    """The name of a condition's training course: its own, or that of its kind."""
    if condition in COURSE[size]:
        return condition
    return "text" if CONDITIONS[size][condition]["kind"] == "text" else "task"


def run(trial: Trial) -> Values:
    """The held-out loss of one plan in one condition."""
    from headwise.papers.tasks import training
    from headwise.papers.tasks.network import TaskNetwork

    p, seed = trial.parameters, trial.seed
    course = training.Course(**p["course"])
    if p["data"]["kind"] == "text":
        sizes = {name: value for name, value in p["data"].items() if name != "kind"}
        text = training.TextSizes(**sizes)
        model = training.text_model(condition_plan(p, text.context, text.vocab_size), seed)
        curve = training.train_on_text(model, text, course, seed)
        return {"loss": curve.finished().losses[-1]}
    task = condition_task(p["data"], seed)
    network = TaskNetwork(condition_plan(p, task.length, 0), task, norm=True, seed=seed)
    curve = training.train_on_task(network, task, course, seed)
    # The loss of a guess that does not look at the order of the tokens, where that is less.
    blind = getattr(task, "order_blind_loss", task.chance_loss)
    found = {"chance": task.chance_loss, "blind": blind}
    return {"loss": curve.finished().losses[-1], **found}


def judge(results: Results) -> Finding:
    """Two questions: does adapting to the length pay, and does adapting to the task pay?

    Yes: in some pair of conditions, by more than the spread and by a hundredth or more: of the
    loss on text, of a guess's loss on a task. No: in no pair, for certain. A task that no plan
    learned is open. Pairs of one kind of data at two lengths ask about length, pairs of two kinds
    at their longest about the task.
    """
    conditions = _conditions(results)
    unlearned = [n for n, c in conditions.items() if not c.is_learned(list(c.means().values()))]
    answers, sentences, rows = [], [], []
    for axis, pairs in _pairs(results.size).items():
        found = {(a, b): adaptation(conditions[a], conditions[b]) for a, b in pairs}
        pays = {pair: one.pays(len(pairs)) for pair, one in found.items()}
        answers.append(_some(list(pays.values())))
        shares = {p: one.share for p, one in found.items() if p[0] not in unlearned}  # text remains
        most = max(shares, key=shares.__getitem__)
        of = "the loss" if conditions[most[0]].chance is None else "a guess’s loss"
        sentences.append(
            f"{axis} ({answers[-1]}): does adapting pay in {len(pairs)} pairs: "
            f"{counted(list(pays.values()))}; at most {shares[most]:+.1%} of {of}, in {most[0]} "
            f"against the plan for {most[1]}"
        )
        rows += [
            (
                axis, here, _usual(conditions[here]), there, _usual(conditions[there]),
                str(summary(one.own)), one.interval(len(pairs)), pays[here, there],
            )
            for (here, there), one in found.items()
        ]  # fmt: skip
    columns = (
        "adapting to", "here", "own plan", "fitted to", "its plan", "loss of the own plan",
        "that of the other minus it, 95% interval", "pays",
    )  # fmt: skip
    return Finding(
        verdict(answers),
        "; ".join(sentences) + ".",
        _reasons(conditions, unlearned),
        ResultTable(columns, tuple(rows)),
    )


def _some(answers: Sequence[Answer]) -> Answer:
    """Whether it is so in some pair."""
    if "yes" in answers:
        return "yes"
    return "no" if all(a == "no" for a in answers) else "open"


def _reasons(conditions: Mapping[str, Condition], unlearned: Sequence[str]) -> tuple[str, ...]:
    worst = regrets({n: c for n, c in conditions.items() if n not in unlearned})
    safest, riskiest = (pick(worst, key=lambda p: worst[p].share) for pick in (min, max))
    steady = [n for n, c in conditions.items() if len(set(chosen_plans(c.losses))) == 1]
    return (
        "Plans are chosen by the other seeds and scored on the one left out; intervals hold for "
        "all pairs of a question at once.",
        f"To pay means at least {ENOUGH:.0%}: of the loss on text, of a guess's loss on a task; a "
        f"task is open where both plans stay above {LEARNED:g} of a blind guess.",
        *(
            f"No plan learned {name} in its steps: differences there say nothing about plans."
            for name in unlearned
        ),
        f"The choice is the same whichever seed is left out in {len(steady)} of {len(conditions)} "
        f"conditions{': ' + '; '.join(steady) if steady else ''}.",
        f"One plan for all, in hindsight: {safest} is on average at most "
        f"{_percent(worst[safest])} above the best plan ({worst[safest].condition}), {riskiest} up "
        f"to {_percent(worst[riskiest])} ({worst[riskiest].condition}), in the same measure.",
        "The bound of the paper adapts to the width of tokens and to lags; the sequence length "
        "does not occur in it.",
    )


def _percent(regret: Regret) -> str:
    return f"{100 * regret.share:.2g}%"


def _conditions(results: Results) -> dict[str, Condition]:
    found = {}
    for name in CONDITIONS[results.size]:
        plans = PLANS[results.size]
        losses = {plan: results.numbers(f"{name}: {plan}", "loss") for plan in plans}
        last = results.where(condition=name).items[-1].values
        found[name] = Condition(losses, last.get("chance"), last.get("blind"))
    return found


def _pairs(size: Size) -> dict[str, list[Pair]]:
    kinds: dict[str, list[str]] = {}
    for condition, data in CONDITIONS[size].items():
        kinds.setdefault(data["kind"], []).append(condition)
    longest = [some[-1] for some in kinds.values()]
    return {
        "length": [(a, b) for some in kinds.values() for a in some for b in some if a != b],
        "task": [(a, b) for a in longest for b in longest if a != b],
    }


BASES = ("8 × 8", "4 × 16")  # the uniform plan of as many heads, and the one that was best
MOVED = ("wide first", "wide last")


def contrasts(results: Results) -> tuple[str, ...]:
    """Width moved between the layers against uniform plans, on the longest text."""
    texts = [n for n, data in CONDITIONS[results.size].items() if data["kind"] == "text"]
    found = []
    for plan in MOVED:
        for base in BASES:
            pairs = [
                {r.trial.seed: float(r.values["loss"]) for r in results.named(f"{texts[-1]}: {p}")}
                for p in (plan, base)
            ]
            seeds = sorted(set.intersection(*map(set, pairs)))
            if not seeds:
                continue
            mine, theirs = ([losses[seed] for seed in seeds] for losses in pairs)
            gap = paired_difference(mine, theirs)
            worse = sum(a > b for a, b in zip(mine, theirs, strict=True))
            found.append(
                f"On {texts[-1]}, {plan} minus {base}: {gap}, "
                f"{gap.mean / summary(theirs).mean:+.1%} of the loss, above it at {worse} of "
                f"{len(seeds)} seeds. This was not asked beforehand; `two-layers` asks it."
            )
    return tuple(found)


def _usual(condition: Condition) -> str:
    """The plan chosen most often."""
    picked = chosen_plans(condition.losses)
    return max(dict.fromkeys(picked), key=picked.count)


def figure(results: Results) -> Chart:
    """How far every plan's loss is above the condition's best; a panel each."""
    plans = PLANS[results.size]
    names = ", ".join(f"{i} = {p}" for i, p in enumerate(plans, start=1))
    places = tuple(range(1, len(plans) + 1))
    drawn = []
    for name, condition in _conditions(results).items():
        best = min(condition.means().values())
        above = {
            i: [100 * (value - best) / condition.yardstick(best) for value in values]
            for i, values in enumerate(condition.losses.values(), start=1)
        }
        words = f"loss above the best, % of {'it' if condition.chance is None else 'a guess’s'}"
        axes = Axes(f"Plans for {name}", names, words, x_values=places)
        drawn.append(curves(series(above, "measured"), axes))
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
    contrasts=contrasts,
)
