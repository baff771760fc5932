"""Plans that stay within an engine: what is tied, what that costs, and what is refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from headwise.errors import BudgetError
from headwise.plan import Budget, HeadSpec, LayerPlan, Limit, ModelShape, Plan
from headwise.planning.fit import FitProblem, HeadWorth, fit
from headwise.planning.portable import (
    BY_LAYER,
    GROUPS,
    VALUES_ONLY,
    WAYS,
    WIDTH,
    WIDTHS,
    fit_for,
    tied,
    ways_for,
)
from headwise.planning.rules import WidthRules
from headwise.planning.targets import CPU_WIDTHS, CUDA_WIDTHS, TARGETS, Kernels, kernels_of, runs_in

WIDE = dict.fromkeys(("gguf-cuda", "vllm", "vllm-cpu"), 128)  # heads that kernels leave a choice


def problem(seed: int = 3, width: int = 16, **shape) -> FitProblem:
    """Three layers of two head groups, whose directions matter differently."""
    rng = np.random.default_rng(seed)
    planes = width // 2
    head = HeadSpec(qk_dim=width, vo_dim=width, queries=2, rotary_planes=tuple(range(planes)))
    sizes = {"n_layers": 3, "d_model": 64, "context": 99, "n_heads": 4, "n_kv_heads": 2}
    made = ModelShape(**sizes | {"qk_dim": width, "vo_dim": width} | shape)
    layers = (LayerPlan(heads=(head, head), biases=made.attention_biases),) * 3
    worths = tuple(
        tuple(
            HeadWorth(4 * rng.exponential(size=planes), np.zeros(0), rng.exponential(size=width))
            for _ in range(2)
        )
        for _ in range(3)
    )
    return FitProblem(Plan(shape=made, layers=layers), worths, WidthRules("head", 2))


def best(given: FitProblem, share: float, *targets: str):
    budget = Budget(kv_bytes=Limit(share=share))
    return fit_for(given, targets, lambda one: fit(one, budget))


@pytest.mark.parametrize("share", [0.9, 0.75, 0.5, 0.3])
@pytest.mark.parametrize("target", TARGETS)
def test_the_plan_runs_in_the_target_it_was_made_for(share, target):
    given = problem(width=WIDE.get(target, 16))
    found = best(given, share, target)
    assert {a.target: a for a in runs_in(found.plan)}[target].yes
    assert given.allows(found.plan, Budget(kv_bytes=Limit(share=share)))
    if "whole head groups" not in str(found.plan.origin.notes):  # which a free fit does not drop
        assert found.loss_increase >= best(given, share).loss_increase - 1e-12


@pytest.mark.parametrize("share", [0.75, 0.5, 0.3])
@pytest.mark.parametrize("target", WAYS)
def test_the_best_of_the_targets_ways_is_taken(share, target):
    given = problem(width=WIDE.get(target, 16))
    budget, losses = Budget(kv_bytes=Limit(share=share)), {}
    for way in WAYS[target]:
        with contextlib.suppress(BudgetError):
            one = tied(given, way, kernels_of([target]))
            losses[way.name] = fit(one, budget).loss_increase
    found = best(given, share, target)
    assert found.loss_increase == min(losses.values())
    assert f"({min(losses, key=losses.__getitem__)})" in found.plan.origin.notes[-1]


def test_what_each_way_ties():
    def heads(way, share):
        plan = fit(tied(problem(), way), Budget(kv_bytes=Limit(share=share))).plan
        return plan, [h for x in plan.layers for h in x.heads]

    plan, found = heads(VALUES_ONLY, 0.75)
    assert {(h.qk_dim, h.vo_dim) for h in found} == {(16, 8)}
    plan, found = heads(WIDTHS, 0.4)
    assert len({(h.qk_dim, h.vo_dim, h.rotary_planes) for h in found}) == 1
    plan, found = heads(WIDTH, 0.4)
    assert {(h.qk_dim, h.vo_dim) for h in found} == {(6, 6)}
    assert len({h.rotary_planes for h in found}) == 1
    plan, found = heads(GROUPS, 0.5)
    assert {(h.qk_dim, h.vo_dim) for h in found} == {(16, 16)}
    assert len(found) == 3
    plan, found = heads(BY_LAYER, 0.5)
    assert all(h.qk_dim == h.vo_dim for h in found)
    assert all(len({h.qk_dim for h in x.heads}) == 1 for x in plan.layers)
    assert len({h.rotary_planes for h in found}) > 1


def test_the_common_planes_are_the_best_for_all_heads_together():
    given = problem()
    found = best(given, 0.4, "stock").plan.layers[0].heads[0].rotary_planes
    total = sum(head.planes for layer in given.sensitivity for head in layer)
    assert set(found) == set(np.argsort(-total)[: len(found)].tolist())


def test_the_note_says_what_the_tie_costs():
    found = best(problem(), 0.75, "stock", "gguf")
    free = best(problem(), 0.75)
    note = found.plan.origin.notes[-1]
    assert f"+{found.loss_increase:.4g} instead of {free.loss_increase:.4g}" in note
    assert free.plan.origin.notes == ()


def test_ways_are_those_that_all_targets_run():
    assert ways_for(["vllm", "stock"]) == (WIDTH,)
    assert ways_for(["onnx"]) == ()
    found = best(problem(), 0.75, "vllm", "stock").plan
    # Twelve would be within the budget, and is no multiple of eight.
    assert {(h.qk_dim, h.vo_dim) for x in found.layers for h in x.heads} == {(8, 8)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "taken"), [("gguf-cuda", CUDA_WIDTHS), ("vllm-cpu", CPU_WIDTHS)]
)
@pytest.mark.parametrize("policy", ["sensitivity", "uniform", "random"])
def test_widths_are_those_with_kernels_and_the_note_says_what_that_costs(target, taken, policy):
    whole = replace(problem(width=128), policy=policy)
    found = best(whole, 0.6, target)
    widths = {w for x in found.plan.layers for h in x.heads for w in (h.qk_dim, h.vo_dim)}
    assert widths <= set(taken)
    free = best(whole, 0.6)
    assert (
        f"+{found.loss_increase:.4g} instead of {free.loss_increase:.4g}"
        in (found.plan.origin.notes[-1])
    )
    # The control: without kernels to look for, another width is the best.
    budget = Budget(kv_bytes=Limit(share=0.45))
    plans = [fit(tied(whole, WIDTH, Kernels(8, one)), budget).plan for one in (None, taken)]
    if policy != "random":
        assert [x.layers[0].heads[0].vo_dim for x in plans] == [56, max(w for w in taken if w < 57)]


def test_heads_narrower_than_any_kernel_are_refused():
    with pytest.raises(BudgetError, match=r"may be 2 to 16 wide, and there are kernels for 40, 64"):
        best(problem(), 0.75, "gguf-cuda")
    with pytest.raises(
        BudgetError, match="the values of layer 0 may be 8 to 16 wide, and there are kernels"
    ):
        best(problem(), 1.0, "vllm-cpu")
    assert kernels_of(["vllm-cpu", "gguf-cuda"]).widths == (64, 80, 96, 112, 128, 256)


def test_what_cannot_be_is_refused_with_the_reasons():
    biased = problem(attention_biases=("query", "key", "value", "output"))
    found = best(biased, 0.75, "stock")  # keys and values of two widths have no output bias
    assert "one width" in found.plan.origin.notes[-1]
    with pytest.raises(BudgetError, match=r"no plan within the budget runs in stock \(values only"):
        best(problem(), 0.01, "stock")
    with pytest.raises(BudgetError, match="qwen3, which normalises queries and keys"):
        best(problem(family="qwen3"), 0.75, "stock")
