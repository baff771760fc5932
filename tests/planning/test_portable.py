"""Plans that stay within an engine: what is tied, what that costs, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from headwise.errors import BudgetError
from headwise.plan import Budget, HeadSpec, LayerPlan, Limit, ModelShape, Plan
from headwise.planning.fit import FitProblem, HeadWorth, fit
from headwise.planning.portable import fit_for
from headwise.planning.rules import WidthRules
from headwise.planning.targets import TARGETS, runs_in


def problem(seed: int = 3, **shape) -> FitProblem:
    """Three layers of two head groups, 16 wide, whose directions matter differently."""
    rng = np.random.default_rng(seed)
    head = HeadSpec(qk_dim=16, vo_dim=16, queries=2, rotary_planes=tuple(range(8)))
    sizes = {"n_layers": 3, "d_model": 64, "context": 99, "n_heads": 4, "n_kv_heads": 2}
    made = ModelShape(**sizes | {"qk_dim": 16, "vo_dim": 16} | shape)
    layers = (LayerPlan(heads=(head, head), biases=made.attention_biases),) * 3
    worths = tuple(
        tuple(
            HeadWorth(4 * rng.exponential(size=8), np.zeros(0), rng.exponential(size=16))
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
    given = problem()
    found = best(given, share, target)
    assert {a.target: a for a in runs_in(found.plan)}[target].yes
    assert given.allows(found.plan, Budget(kv_bytes=Limit(share=share)))
    assert found.loss_increase >= best(given, share).loss_increase - 1e-12


def test_below_what_values_alone_can_save_keys_become_narrower_too():
    wide, narrow = best(problem(), 0.75, "gguf").plan, best(problem(), 0.4, "gguf").plan
    assert {(h.qk_dim, h.vo_dim) for x in wide.layers for h in x.heads} == {(16, 8)}
    assert "values only" in wide.origin.notes[-1]
    heads = [h for x in narrow.layers for h in x.heads]
    assert {(h.qk_dim, h.vo_dim) for h in heads} == {(6, 6)}
    assert len({h.rotary_planes for h in heads}) == 1
    assert "one width" in narrow.origin.notes[-1]


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


def test_vllm_has_no_class_for_narrower_values():
    found = best(problem(), 0.75, "vllm").plan
    assert {(h.qk_dim, h.vo_dim) for x in found.layers for h in x.heads} == {(12, 12)}


def test_what_cannot_be_is_refused_with_the_reasons():
    biased = problem(attention_biases=("query", "key", "value", "output"))
    found = best(biased, 0.75, "stock")  # keys and values of two widths have no output bias
    assert "one width" in found.plan.origin.notes[-1]
    with pytest.raises(BudgetError, match=r"no plan within the budget runs in stock \(values only"):
        best(problem(), 0.01, "stock")
    with pytest.raises(BudgetError, match="qwen3, which normalises queries and keys"):
        best(problem(family="qwen3"), 0.75, "stock")
