"""Claim: tying all heads' weights gives single-head attention, exactly.

H equal heads compute the same output H times. With the output weights divided by H (or with their
sum in one head) nothing distinguishes them from one head. That head is d_h wide: tying removes
freedom, and what is left is a *narrow* single head, not one of the layer's whole width. Two
controls must differ: heads of which all but one are tied, and the single head of width H·d_h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.papers.harness.charts import Axes, Point, curves
from headwise.papers.harness.claim import (
    Cell,
    Claim,
    Finding,
    Results,
    ResultTable,
    Size,
    Trial,
    Values,
    at_every_seed,
)
from headwise.papers.harness.judging import summary

if TYPE_CHECKING:
    from headwise.reporting.charts import Chart


HEADS: dict[Size, tuple[int, ...]] = {"quick": (2, 3, 5), "full": (2, 3, 5, 8, 16, 32)}
EXACT = 1e-12  # relative; float64 sums of some dozens of terms in another order
KINDS = {
    "tied": "all heads tied",
    "untied": "one head not tied",
    "wide": "one head of the total width",
}


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Random weights and tokens for several numbers of heads."""
    experiments = {f"{heads} heads": {"heads": heads, "head_dim": 7} for heads in HEADS[size]}
    return at_every_seed("single-is-tied-multi", seeds, experiments)


def run(trial: Trial) -> Values:
    """Largest differences of outputs from the single head's, relative to its largest output."""
    import torch

    from headwise.papers.tasks.network import FixedSizes, TaskNetwork, task_plan
    from headwise.plan import HeadSpec

    torch.set_num_threads(1)
    heads, width = trial.parameters["heads"], trial.parameters["head_dim"]
    d_model, length = 23, 19
    inputs = torch.randn(
        5, length, d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(trial.seed)
    )

    def attention(count: int, head_dim: int, seed: int) -> Any:
        plan = task_plan([HeadSpec(qk_dim=head_dim, vo_dim=head_dim)] * count, d_model, length)
        sizes = FixedSizes(length, d_model, 2, continuous=True)  # only the attention is used
        network = TaskNetwork(plan, sizes, seed=seed, positions="none").double()
        return network.blocks[0].attention

    def output(module: Any) -> torch.Tensor:
        made: torch.Tensor = module(inputs, attention_mask=None)[0]
        return made

    with torch.no_grad():
        single = attention(1, width, 1000 + trial.seed)
        wanted = output(single)
        tied = attention(heads, width, 2000 + trial.seed)
        spare = tied.q_proj.weight[:width].clone()
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(tied, name).weight.copy_(getattr(single, name).weight.repeat(heads, 1))
        tied.o_proj.weight.copy_(single.o_proj.weight.repeat(1, heads) / heads)
        made = {"tied": output(tied), "wide": output(attention(1, heads * width, trial.seed))}
        tied.q_proj.weight[:width] = spare
        made["untied"] = output(tied)
    size = wanted.abs().max()
    return {name: float((out - wanted).abs().max() / size) for name, out in made.items()}


def judge(results: Results) -> Finding:
    """It holds if tied heads are equal to rounding and the controls are not."""
    worst = {kind: max(r.values[kind] for r in results) for kind in KINDS}
    least = {kind: min(r.values[kind] for r in results) for kind in KINDS}
    exact = worst["tied"] < EXACT
    controls = min(least["untied"], least["wide"]) > 1e-3
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, *(max(results.numbers(name, kind)) for kind in KINDS)) for name in results.names
    )
    return Finding(
        "holds" if exact and controls else "does not hold",
        f"Largest relative difference {worst['tied']:.1e} over {len(results.items)} random layers; "
        f"at least {least['untied']:.2g} when one head is not tied.",
        (
            "The single head is as wide as one of the heads; a head of their total width differs "
            f"by at least {least['wide']:.2g}.",
        ),
        ResultTable(("heads", *KINDS.values()), rows),
    )


def figure(results: Results) -> Chart:
    """The three differences by number of heads."""
    points = [
        Point(int(name.split()[0]), summary(results.numbers(name, kind)), words)
        for name in results.names
        for kind, words in KINDS.items()
    ]
    axes = Axes(
        "Distance from single-head attention", "heads", "relative difference",
        log_x=True, log_y=True,
    )  # fmt: skip
    return curves(points, axes)


CLAIM = Claim(
    id="single-is-tied-multi",
    statement="Tying the weights of all heads gives single-head attention exactly.",
    expected="Multi-head attention with equal heads is single-head attention.",
    source="the freedom view of heads",
    setting="Random layers in float64; a seed draws weights and tokens.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
    quick_verdicts=("holds",),
)
