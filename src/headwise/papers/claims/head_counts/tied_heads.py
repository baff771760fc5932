"""Claim: heads with tied attention weights are one head, exactly.

If all heads share W_Q and W_K, they share their attention A, and the layer's sum over heads is one
product:

    Σ_h A·X·V_h·O_h  =  A·X·[V_1 … V_H]·[O_1; …; O_H]        one head, d_h wide in its scores,
                                                             H·d_h wide in its values

So a layer of many heads has one head of the *full value width* inside it, and more freedom: every
head may attend elsewhere. Tying the values and outputs too leaves less, one head that is d_h wide
throughout; that identity is checked beside it. Two controls must differ: one head whose queries are
not tied, and a single head with the values of only one of the heads.
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
    "tied": "attention weights tied, against one head of the full value width",
    "equal": "all weights tied, against one narrow head",
    "untied": "control: one head not tied",
    "narrow": "control: one head of a single head's value width",
}


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Random weights and tokens for several numbers of heads."""
    experiments = {f"{heads} heads": {"heads": heads, "head_dim": 7} for heads in HEADS[size]}
    return at_every_seed("single-is-tied-multi", seeds, experiments)


def run(trial: Trial) -> Values:
    """Largest differences of outputs, each relative to the largest output of the tied heads."""
    import torch

    from headwise.papers.tasks.network import FixedSizes, TaskNetwork, task_plan
    from headwise.plan import HeadSpec

    torch.set_num_threads(1)
    heads, width = trial.parameters["heads"], trial.parameters["head_dim"]
    d_model, length = 23, 19
    inputs = torch.randn(
        5, length, d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(trial.seed)
    )

    def attention(count: int, vo_dim: int, seed: int) -> Any:
        plan = task_plan([HeadSpec(qk_dim=width, vo_dim=vo_dim)] * count, d_model, length)
        sizes = FixedSizes(length, d_model, 2, continuous=True)  # only the attention is used
        network = TaskNetwork(plan, sizes, seed=seed, positions="none").double()
        return network.blocks[0].attention

    def output(module: Any) -> torch.Tensor:
        made: torch.Tensor = module(inputs, attention_mask=None)[0]
        return made

    def set_weights(module: Any, query: Any, key: Any, value: Any, out: Any) -> Any:
        for name, weight in zip(("q", "k", "v", "o"), (query, key, value, out), strict=True):
            getattr(module, f"{name}_proj").weight.copy_(weight)
        return module

    with torch.no_grad():
        layer = attention(heads, width, 1000 + trial.seed)
        spare = layer.q_proj.weight[:width].clone()
        query, key = (p.weight[-width:].clone() for p in (layer.q_proj, layer.k_proj))
        value, out = layer.v_proj.weight.clone(), layer.o_proj.weight.clone()
        tied = query.repeat(heads, 1), key.repeat(heads, 1)
        wanted = output(set_weights(layer, *tied, value, out))
        size = wanted.abs().max()
        wide = set_weights(attention(1, heads * width, 0), query, key, value, out)
        single = set_weights(attention(1, width, 0), query, key, value[:width], out[:, :width])
        made = {"tied": output(wide) - wanted, "narrow": output(single) - wanted}
        everything = value[:width].repeat(heads, 1), out[:, :width].repeat(1, heads) / heads
        made["equal"] = output(set_weights(layer, *tied, *everything)) - output(single)
        set_weights(layer, *tied, value, out).q_proj.weight[:width] = spare
        made["untied"] = output(layer) - wanted
    return {name: float(made[name].abs().max() / size) for name in KINDS}


def judge(results: Results) -> Finding:
    """It holds if heads with tied attention weights are one wide head to rounding, and controls
    differ.
    """
    worst = {kind: max(r.values[kind] for r in results) for kind in KINDS}
    least = {kind: min(r.values[kind] for r in results) for kind in KINDS}
    controls = min(least["untied"], least["narrow"]) > 1e-3
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (name, *(max(results.numbers(name, kind)) for kind in KINDS)) for name in results.names
    )
    return Finding(
        "holds" if worst["tied"] < EXACT and controls else "does not hold",
        f"Largest relative difference {worst['tied']:.1e} over {len(results.items)} random layers; "
        f"at least {least['untied']:.2g} when one head is not tied.",
        (
            "The single head has the scores of one head and the values of all of them; with the "
            f"values of only one it differs by at least {least['narrow']:.2g}.",
            "Tying the values and outputs too leaves one head as narrow as each of them "
            f"({worst['equal']:.1e}): that takes more away than the article's tie.",
        ),
        ResultTable(("heads", *KINDS.values()), rows),
    )


def figure(results: Results) -> Chart:
    """The four differences by number of heads."""
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
    statement="Heads with tied attention weights are one head of the full value width, exactly.",
    expected="Multi-head attention whose heads share their attention weights is single-head "
    "attention (equation 1.2).",
    source="the freedom view of heads",
    setting="Random layers in float64; a seed draws weights and tokens.",
    version=2,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
    quick_verdicts=("holds",),
)
