"""Claim: heads are an ensemble of small models, each of which must stay good enough.

After training, every head is scored alone: the best linear readout of its output (ridge regression
on fresh sequences) gives its own error. As the number of heads grows, either the total width stays
(heads get narrower) or the head width stays (the layer gets wider).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from headwise.papers.harness.charts import Axes, curves, series
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
    joint_confidence,
    larger,
    larger_by_factor,
    lowest,
    summary,
    verdict,
)

if TYPE_CHECKING:
    from torch import Tensor

    from headwise.reporting.charts import Chart


TOTAL, HEAD, TOKEN_DIM, LAGS = 64, 8, 8, 4
WEAKER = 0.05  # of a head's own error, which lies between 0.75 (one lag of four) and 1
FIXED = {"total": f"total width {TOTAL}", "head": f"head width {HEAD}"}
HEADS: dict[Size, tuple[int, ...]] = {"quick": (1, 4, 16, 32), "full": (1, 2, 4, 8, 16, 32)}
TRAINING: dict[Size, dict[str, int]] = {
    "quick": {"length": 8, "steps": 100, "batch": 16},
    "full": {"length": 32, "steps": 2000, "batch": 32},
}


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Both ways of fixing a width, at every number of heads."""
    seconds = 1.5 if size == "quick" else 8.0
    networks = {
        f"{FIXED[fixed]}, {heads} heads": {"fixed": fixed, "heads": heads, **TRAINING[size]}
        for fixed in FIXED
        for heads in HEADS[size]
    }
    # 32 heads take twice the time of few.
    return at_every_seed("ensemble", seeds, networks, lambda p: seconds * (1 + p["heads"] / 32))


def run(trial: Trial) -> Values:
    """The error of all heads together, and of each head alone."""
    from headwise.papers.tasks.ngram import NGram
    from headwise.papers.tasks.training import (
        HELD_OUT_SEED,
        Layout,
        ShortTraining,
        equal_heads,
        train_network,
    )

    p = trial.parameters
    heads = p["heads"]
    width = TOTAL // heads if p["fixed"] == "total" else HEAD
    task = NGram.random(LAGS, TOKEN_DIM, p["length"], seed=trial.seed)
    model = equal_heads(Layout(heads, width, 32), task, seed=trial.seed)
    score = train_network(model, task, ShortTraining(p["steps"], p["batch"]), seed=trial.seed)
    fit, held = task.sample(256, HELD_OUT_SEED + 1), task.sample(256, HELD_OUT_SEED + 2)
    outputs = [_head_outputs(model, batch.inputs) for batch in (fit, held)]
    alone = []
    for h in range(heads):
        mine = [z[..., h * width : (h + 1) * width] for z in outputs]
        alone.append(_readout_error(mine, [fit, held]))
    return {
        "joint": score.metric,
        "alone": sum(alone) / heads,
        "best": min(alone),
        "chance": task.chance,
    }


def _head_outputs(model: Any, inputs: Tensor) -> Tensor:
    """What enters the output projection: all heads side by side."""
    import torch

    seen: list[Tensor] = []
    projection = model.blocks[0].attention.o_proj
    hook = projection.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        hook.remove()
    return seen[0].double()


def _readout_error(outputs: list[Tensor], batches: list[Any]) -> float:
    """The error on held-out sequences of the best linear readout of one head."""
    import torch

    x, held_x = (
        torch.cat([z[b.scored], torch.ones(int(b.scored.sum()), 1, dtype=torch.float64)], dim=1)
        for z, b in zip(outputs, batches, strict=True)
    )
    y, held_y = (b.targets[b.scored].double() for b in batches)
    moment = x.mT @ x
    ridge = 1e-6 * moment.diagonal().mean() * torch.eye(len(moment), dtype=torch.float64)
    weights = torch.linalg.solve(moment + ridge, x.mT @ y)
    return float((held_x @ weights - held_y).square().mean())


def judge(results: Results) -> Finding:
    """Three questions at fixed total width. All yes: holds; some: in part.

    Do more heads help at first, do too many hurt, and is each of many weaker alone than each of one
    per lag? With fewer heads than lags each must carry several, so heads alone are compared from
    one per lag on.
    """
    joint = {f: results.where(fixed=f).by("heads", "joint") for f in FIXED}
    alone = {f: results.where(fixed=f).by("heads", "alone") for f in FIXED}
    together, most, fewest = joint["total"], max(joint["total"]), min(joint["total"])
    low = lowest(together)
    best = cast("int", low.at)
    level = joint_confidence(len(together) - 1)  # the best was chosen among all of them
    answers = {
        "more heads help at first": larger_by_factor(
            together[fewest], together[best], confidence=level
        ),
        f"{most} heads are too many": larger_by_factor(
            together[most], together[best], confidence=level
        ),
        "each is weaker": larger(alone["total"][most], alone["total"][LAGS], WEAKER),
    }
    rows = tuple(
        (FIXED[f], h, str(summary(joint[f][h])), str(summary(alone[f][h])))
        for f in FIXED
        for h in joint[f]
    )
    return Finding(
        verdict(list(answers.values())),
        f"At {FIXED['total']} all heads together are best at {best} ({summary(together[best])}, "
        f"{low}), {summary(together[most])} at {most}; the error of a head alone is "
        f"{summary(alone['total'][LAGS])} at {LAGS} and {summary(alone['total'][most])} at {most}.",
        (
            "At fixed total width: "
            + "; ".join(f"{question}: {answer}" for question, answer in answers.items())
            + ".",
            f"At {FIXED['head']}, where heads do not get narrower, from {LAGS} to {most} heads the "
            f"joint error goes from {summary(joint['head'][LAGS])} to "
            f"{summary(joint['head'][most])} and that of a head alone from "
            f"{summary(alone['head'][LAGS])} to {summary(alone['head'][most])}.",
            "A head alone is scored with its own best linear readout; a constant scores 1.",
        ),
        ResultTable(("fixed", "heads", "joint error", "error of a head alone"), rows),
    )


def figure(results: Results) -> Chart:
    """Joint and single-head errors by number of heads."""
    points = []
    for fixed, words in FIXED.items():
        for value, what in (("joint", "all heads"), ("alone", "a head alone")):
            points += series(results.where(fixed=fixed).by("heads", value), f"{what}, {words}")
    heads = HEADS[results.size]
    return curves(points, Axes("Heads as an ensemble", "heads", "error", True, True, heads))


CLAIM = Claim(
    id="ensemble",
    statement="Heads are an ensemble of small models: more of them help only while each stays "
    "good enough.",
    expected="Too many heads at a fixed width are each too weak.",
    source="the ensemble view of heads",
    setting="One attention layer without a skip on the 4-gram task; a seed draws the task, the "
    "weights and the batches.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
