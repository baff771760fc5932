"""Claim: planned heads train better than uniform ones at equal parameters, or as well with less.

Everything but the attention is shared, all plans but the dense one have equal parameters and equal
FLOPs, and all models of a seed see the same batches:

    theory      the planner's `narrower-late`: the early third whole, later layers narrower
    uniform     every head equally wide
    linear      more heads with depth
    random      widths by layer drawn anew at each seed
    reversed    theory's layers in reverse order: its widths without its reason
    dense       all parameters, the model that shares refer to

in two settings, and in a third that is a claim of its own:

    language         Llama blocks on the built-in text
    attention-only   the same without MLPs
    classification   sequences with one noisy bit to tell, blocks with MLPs; scored by the rule, in
                     expectation over its noise

Compute is compared at equal quality: two curves of loss against FLOPs, cut at the same loss.

    loss │ ╲╲
      L* ┤──╲─╲──        L* is the worse of the two final losses, so that both curves reach it
         │   ╲  ╲        saving = 1 − a/b
         └────a──b──── FLOPs (log)

The learning rate is constant after its warmup, so that every point of a curve is the end of a
shorter run. The saving that counts is the one against the uniform plan: what both save against the
dense model comes from being smaller, not from being planned.

This stays in the record: 4 seeds, where about 84 would have been needed to see half a percent. What
decides about design are `two-layers`, `three-tokens` and `six-layers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
from headwise.papers.harness.judging import (
    Answer,
    Difference,
    joint_confidence,
    larger,
    listed,
    paired_difference,
    summary,
    verdict,
)
from headwise.plan import Budget, HeadSpec, Limit, ModelShape, Plan
from headwise.planning.design import DesignRules, new_plan

if TYPE_CHECKING:
    from headwise.reporting.charts import Chart

# --- plans -------------------------------------------------------------------------------------

RIVALS = ("uniform", "linear", "random", "reversed")
POLICIES = ("theory", *RIVALS, "dense")
# What the planner calls them; the results keep the names they were made with.
RULES = {"theory": "narrower-late", "uniform": "uniform", "linear": "more-heads-late"}
STEP = 2  # widths are even, as rotary planes need


def rival_plan(policy: str, shape: ModelShape, share: float, seed: int) -> Plan:
    """One of `POLICIES` with this share of the dense model's attention parameters."""
    assert policy in POLICIES, policy
    budget, rules = Budget(attn_params=Limit(share=share)), DesignRules(multiple_of=STEP)
    if policy == "dense":
        return Plan.uniform(shape)
    if policy == "reversed":
        plan = new_plan(shape, budget, RULES["theory"], rules)
        return plan.model_copy(update={"layers": plan.layers[::-1]})
    if policy == "random":
        return _random(new_plan(shape, budget, "uniform", rules), seed)
    return new_plan(shape, budget, RULES[policy], rules)


def _random(uniform: Plan, seed: int) -> Plan:
    """Width moved between random layers, often enough to make the start unrecognisable."""
    rng = np.random.default_rng(seed)
    full, n = uniform.shape.qk_dim, uniform.shape.n_layers
    widths = np.array([layer.heads[0].qk_dim for layer in uniform.layers])
    for _ in range(20 * n):
        narrower, wider = rng.permutation(n)[:2]
        if widths[narrower] > STEP and widths[wider] < full:
            widths[narrower] -= STEP
            widths[wider] += STEP
    layers = tuple(
        layer.model_copy(
            update={"heads": (HeadSpec(qk_dim=int(w), vo_dim=int(w)),) * len(layer.heads)}
        )
        for layer, w in zip(uniform.layers, widths, strict=True)
    )
    return uniform.model_copy(update={"layers": layers})


# --- compute at equal quality ------------------------------------------------------------------

TAIL = 3  # evaluations that the final loss averages, since a constant rate leaves it noisy


@dataclass(frozen=True, slots=True)
class ComputeCurve:
    """A run: FLOPs of one step, and its held-out losses by step."""

    flops_per_step: float
    steps: tuple[int, ...]
    losses: tuple[float, ...]

    @classmethod
    def of(cls, values: Values) -> ComputeCurve:
        """The run in the values of a trial."""
        return cls(float(values["flops_per_step"]), tuple(values["steps"]), tuple(values["losses"]))

    @property
    def final(self) -> float:
        """The loss at the end."""
        return final_loss(self.losses)

    def flops_to(self, loss: float) -> float:
        """FLOPs until the loss is first reached, between evaluations on a logarithmic scale."""
        if self.losses[0] <= loss:
            return self.flops_per_step * self.steps[0]
        for i in range(1, len(self.losses)):
            before, after = self.losses[i - 1], self.losses[i]
            if after <= loss:
                part = (before - loss) / (before - after)
                first, last = math.log(self.steps[i - 1]), math.log(self.steps[i])
                return self.flops_per_step * math.exp(first + part * (last - first))
        # No single evaluation is as low as the mean of the last few.
        return self.flops_per_step * self.steps[-1]

    def loss_at(self, flops: float) -> float | None:
        """The loss after so many FLOPs, interpolated likewise; None outside the evaluations."""
        x = [math.log(self.flops_per_step * step) for step in self.steps]
        at = math.log(flops)
        if not x[0] - 1e-9 <= at <= x[-1] + 1e-9:
            return None
        return float(np.interp(at, x, self.losses))


def final_loss(losses: Sequence[float]) -> float:
    """The mean of the last evaluations."""
    tail = losses[-TAIL:]
    return sum(tail) / len(tail)


def saving(mine: ComputeCurve, reference: ComputeCurve) -> float:
    """The share of the reference's compute that is not needed for the same loss."""
    target = max(mine.final, reference.final)
    return 1 - mine.flops_to(target) / reference.flops_to(target)


# --- settings ----------------------------------------------------------------------------------

SETTINGS = ("language", "attention-only")
CLASSES = ("classification",)
SHAPE: dict[Size, dict[str, int]] = {
    "quick": {"n_layers": 3, "d_model": 32, "heads": 4, "width": 8, "ffn_dim": 64},
    "full": {"n_layers": 6, "d_model": 96, "heads": 6, "width": 16, "ffn_dim": 256},
}
TEXT: dict[Size, dict[str, int]] = {
    "quick": {"characters": 150_000, "vocab_size": 300, "context": 32},
    "full": {"characters": 8_000_000, "vocab_size": 1024, "context": 128},
}
TASK: dict[Size, dict[str, Any]] = {
    "quick": {"length": 16, "vocab_size": 8, "marks": 3, "rule": "first", "noise": 0.05},
    "full": {"length": 64, "vocab_size": 16, "marks": 5, "rule": "first", "noise": 0.05},
}
COURSE: dict[Size, dict[str, dict[str, Any]]] = {
    "quick": {
        "text": {"steps": 30, "batch": 4, "lr": 1e-2, "evaluations": 10, "scored": 16},
        "task": {"steps": 30, "batch": 16, "lr": 3e-3, "evaluations": 10, "scored": 128},
    },
    "full": {
        "text": {"steps": 800, "batch": 8, "lr": 2e-3, "evaluations": 25, "scored": 128},
        "task": {"steps": 1000, "batch": 32, "lr": 1e-3, "evaluations": 25, "scored": 1024},
    },
}
COST: dict[Size, dict[str, float]] = {
    "quick": {"language": 0.6, "attention-only": 0.4, "classification": 0.4},
    "full": {"language": 120.0, "attention-only": 55.0, "classification": 180.0},
}


def train_plan(p: Mapping[str, Any], seed: int) -> Values:
    """The curve of held-out losses, and what the plan costs."""
    from headwise.papers.tasks import training
    from headwise.papers.tasks.discrete import SequenceClassification
    from headwise.papers.tasks.network import TaskNetwork
    from headwise.planning.cost import cost

    shape = _shape(p)
    plan = rival_plan(p["policy"], shape, p["share"], seed)
    course = training.Course(**p["course"])
    if p["setting"] == "classification":
        task = SequenceClassification(**p["data"])
        network = TaskNetwork(plan, task, mlp=True, norm=True, seed=seed)
        curve = training.train_on_task(network, task, course, seed)
    else:
        model = training.text_model(plan, seed)
        curve = training.train_on_text(model, training.TextSizes(**p["data"]), course, seed)
    spent = cost(plan, context=(shape.context + 1) // 2)  # a token attends to half on average
    return {
        **curve.finished().values(),
        "attn_params": spent.attn_params,
        "flops_per_step": 3 * spent.flops * course.batch * shape.context,  # forward, backward twice
    }


def _shape(p: Mapping[str, Any]) -> ModelShape:
    sizes, data, setting = p["shape"], p["data"], p["setting"]
    return ModelShape(
        n_layers=sizes["n_layers"],
        d_model=sizes["d_model"],
        context=data["length"] if setting == "classification" else data["context"],
        n_heads=sizes["heads"],
        n_kv_heads=sizes["heads"],
        qk_dim=sizes["width"],
        vo_dim=sizes["width"],
        vocab_size=data["vocab_size"],
        ffn_dim=0 if setting == "attention-only" else sizes["ffn_dim"],
        # The classifier's head has two outputs: too little to count.
        lm_head=setting != "classification",
        ffn_gated=setting != "classification",
    )


# --- the claim ---------------------------------------------------------------------------------

PLANNED = "theory"  # the policy that plans
SHARE, CLAIMED = 0.75, (0.15, 0.25)
ENOUGH = 0.005  # of the loss: less is called equal
LEVEL = joint_confidence(len(RIVALS))  # of each of the intervals that are made at once


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Every policy in both settings of text."""
    return _trials("planned-vs-uniform", SETTINGS, size, seeds)


def class_trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Every policy on sequences to classify."""
    return _trials("planned-classification", CLASSES, size, seeds)


def _trials(claim: str, settings: Sequence[str], size: Size, seeds: Sequence[int]) -> list[Trial]:
    experiments: dict[str, dict[str, Any]] = {}
    for setting in settings:
        task = setting == "classification"
        parameters = {
            "setting": setting,
            "share": SHARE,
            "shape": SHAPE[size],
            "data": TASK[size] if task else TEXT[size],
            "course": {**COURSE[size]["task" if task else "text"], "falling": False},
        }
        experiments |= {f"{setting}: {p}": {**parameters, "policy": p} for p in POLICIES}
    return at_every_seed(claim, seeds, experiments, lambda p: COST[size][p["setting"]])


def _settings(results: Results) -> tuple[str, ...]:
    return tuple(dict.fromkeys(r.trial.parameters["setting"] for r in results))


def run(trial: Trial) -> Values:
    """The curve of held-out losses, and what the plan costs."""
    return train_plan(trial.parameters, trial.seed)


def judge(results: Results) -> Finding:
    """Two questions in every setting, about planned against uniform at equal parameters.

    Is its loss lower (by half a percent or more), and does it save more than 15% of the compute at
    equal loss? All yes: holds; some: in part; otherwise it depends on what the spread allows.
    """
    settings = _settings(results)
    better = {s: larger(_finals(results, s, "uniform"), _finals(results, s, PLANNED), ENOUGH)
              for s in settings}  # fmt: skip
    gained = {s: _savings(results, s, PLANNED, "uniform") for s in settings}
    saves = {s: larger(gained[s], [CLAIMED[0]] * len(gained[s]), 0.0) for s in settings}
    measured = "; ".join(
        f"{s}: {summary(_finals(results, s, PLANNED))} planned, "
        f"{summary(_finals(results, s, 'uniform'))} uniform, {_percent(gained[s])} less compute "
        "at equal loss"
        for s in settings
    )
    rows = tuple(
        (
            s, _shown(p), str(summary(_finals(results, s, p))),
            str(_gap(results, s, p)) if p in RIVALS else None,
            _each(_savings(results, s, p, "dense")) if p != "dense" else None,
            int(results.numbers(f"{s}: {p}", "attn_params")[0]),
        )
        for s in settings
        for p in POLICIES
    )  # fmt: skip
    columns = (
        "setting", "plan", "held-out loss", f"planned minus this, {100 * LEVEL:.4g}% interval",
        "compute saved against dense at equal loss, seed by seed", "attention parameters",
    )  # fmt: skip
    asked = (
        f"A loss lower than uniform's by at least {ENOUGH:.1%}: {_told(better)}. More than "
        f"{CLAIMED[0]:.0%} of its compute saved: {_told(saves)}.",
    )
    return Finding(
        verdict([*better.values(), *saves.values()]),
        f"Held-out loss at {SHARE:.0%} of the attention parameters: {measured}.",
        (*asked, *_reasons(results)),
        ResultTable(columns, rows),
    )


def _reasons(results: Results) -> tuple[str, ...]:
    settings = _settings(results)
    gaps = {r: {s: _gap(results, s, r) for s in settings} for r in RIVALS}
    cheaper = []
    for s in settings:
        dense, planned = (
            ComputeCurve.of(results.named(f"{s}: {p}")[0].values) for p in ("dense", PLANNED)
        )
        cheaper.append(f"{1 - planned.flops_per_step / dense.flops_per_step:.1%} ({s})")
    return (
        *(
            f"Against {r}, planned is better in {listed(s for s in settings if of[s].negative)} "
            f"and worse in {listed(s for s in settings if of[s].positive)} by more than the "
            "spread."
            for r, of in gaps.items()
        ),
        f"A token costs {', '.join(cheaper)} fewer FLOPs than in the dense model. A larger saving "
        "against it comes from seeds at which the dense model learned late, not from the plan: "
        "the uniform plan shows it at the same seeds.",
        f"Intervals hold for all {len(RIVALS)} rivals at once; random plans are drawn anew at each "
        "seed; reversed has the planned widths in the opposite order.",
    )


def _gap(results: Results, setting: str, rival: str) -> Difference:
    mine, theirs = (_finals(results, setting, p) for p in (PLANNED, rival))
    return paired_difference(mine, theirs, confidence=LEVEL)


def _runs(results: Results, setting: str, policy: str) -> list[ComputeCurve]:
    return [ComputeCurve.of(r.values) for r in results.named(f"{setting}: {policy}")]


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


def _each(shares: list[float]) -> str:
    return ", ".join(f"{100 * share:.0f}%" for share in shares)


def _told(answers: Mapping[str, Answer]) -> str:
    return ", ".join(f"{setting} {answer}" for setting, answer in answers.items())


def figure(results: Results) -> Chart:
    """The loss against the uniform model's after the same compute and seed, in percent.

    Below 0 is better at equal compute. The curves themselves lie too close to be told apart.
    """
    drawn = []
    for setting in _settings(results):
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
    setting="Small models trained here on Python’s documentation and source; a seed draws the "
    "weights and the batches.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
CLASSIFICATION = replace(
    CLAIM,
    id="planned-classification",
    statement="On sequence classification, planned heads train better than uniform ones at equal "
    "parameters.",
    expected="Asked for by the paper's readers.",
    setting="Small models trained here on sequences with one noisy bit to tell, scored by the "
    "rule in expectation over the noise; a seed draws the weights and the batches.",
    trials=class_trials,
)
