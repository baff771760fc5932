"""One budget over heads and MLPs: brute force not beaten, ties, floors, and who is left alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from headwise.errors import BudgetError
from headwise.plan import Budget, Limit
from headwise.planning.cost import cost, dense_cost
from headwise.planning.fit import fit, least_fit, predicted_loss
from headwise.planning.portable import fit_for
from headwise.planning.rules import WidthRules
from tests.planning.test_fit import make_problem

NEURONS = 48


def problem_of(seed=0, neurons=NEURONS, scale=0.003, rules=None, **more):
    """A problem with neurons, heads tied in a layer."""
    rules = rules or WidthRules("layer", multiple_of=4, ffn_multiple_of=8)
    problem = make_problem(seed=seed, rules=rules, **more)
    shape = problem.template.shape.model_copy(update={"ffn_dim": neurons})
    layers = [x.model_copy(update={"ffn_dim": neurons}) for x in problem.template.layers]
    template = problem.template.model_copy(update={"shape": shape, "layers": tuple(layers)})
    rng = np.random.default_rng(seed + 1)
    worth = tuple(scale * (1 + i) * rng.exponential(size=neurons) for i in range(shape.n_layers))
    return replace(problem, template=template, neurons=worth)


def limits(**texts):
    return Budget(**{name: Limit.parse(text) for name, text in texts.items()})


def test_no_choice_of_mlp_widths_beats_the_solver():
    problem = problem_of(layers=3, rules=WidthRules("layer", 4, ffn_multiple_of=8))
    budget = limits(ffn_params="60%")
    found = fit(problem, budget)
    assert found.exact
    assert set(found.plan.ffn_dims) != {NEURONS}
    ranked = [np.sort(worth) for worth in problem.neurons]
    best = min(
        sum(
            0.5 * worth[: NEURONS - width].sum()
            for worth, width in zip(ranked, widths, strict=True)
        )
        for widths in itertools.product(range(8, NEURONS + 1, 8), repeat=3)
        if sum(widths) <= 0.6 * 3 * NEURONS
    )
    assert found.loss_increase == pytest.approx(best)
    # Heads cost nothing of it, so they stay.
    assert cost(found.plan).attn_params == dense_cost(problem.template.shape).attn_params


@pytest.mark.parametrize("resource", ["params", "block_params", "flops", "traffic"])
@pytest.mark.parametrize("policy", ["sensitivity", "uniform", "wider-late", "random"])
def test_one_budget_is_spent_on_both(resource, policy):
    problem = problem_of(policy=policy)
    budget = limits(**{resource: "85%"})
    found = fit(problem, budget)
    plan, shape = found.plan, problem.template.shape
    assert problem.allows(plan, budget)
    assert cost(plan).ffn_params < dense_cost(shape).ffn_params
    assert cost(plan).attn_params < dense_cost(shape).attn_params
    assert all(width % 8 == 0 for width in plan.ffn_dims)
    assert found.loss_increase == pytest.approx(predicted_loss(problem, plan))
    if policy == "sensitivity":  # each alone would have to give more than it is worth
        alone = fit(replace(problem, neurons=None), budget)
        assert found.loss_increase < alone.loss_increase
        assert found.gap < 0.02


@pytest.mark.parametrize("limit", [{"attn_params": "70%"}, {"kv_bytes": "70%"}])
def test_limits_on_attention_leave_mlps_alone(limit):
    with_mlps, without = problem_of(), replace(problem_of(), neurons=None)
    assert fit(with_mlps, limits(**limit)).plan == fit(without, limits(**limit)).plan
    assert not fit(with_mlps, limits(**limit)).plan.changes_ffn
    both = fit(with_mlps, limits(**limit, ffn_params="80%")).plan
    assert both.changes_ffn


def test_mlps_stay_where_they_are_asked_to():
    kept = problem_of(rules=WidthRules("layer", 4, cut_ffn=False))
    plan = fit(kept, limits(params="90%")).plan
    assert not plan.changes_ffn
    with pytest.raises(BudgetError, match="--no-cut-ffn leaves them whole"):
        fit(kept, limits(ffn_params="90%"))
    with pytest.raises(BudgetError, match="has not measured their neurons"):
        fit(replace(problem_of(), neurons=None), limits(ffn_params="90%"))


def test_floors_ties_and_multiples():
    rules = WidthRules("layer", 4, ffn_multiple_of=16, min_ffn_dim=32)
    plan = fit(problem_of(rules=rules), limits(ffn_params="70%")).plan
    assert set(plan.ffn_dims) <= {32, 48}
    tied = fit(problem_of(rules=WidthRules("model", 4, ffn_multiple_of=8)), limits(params="80%"))
    assert len(set(tied.plan.ffn_dims)) == 1
    free = fit(problem_of(rules=WidthRules("layer", 4, ffn_multiple_of=8)), limits(params="80%"))
    assert free.loss_increase < tied.loss_increase
    with pytest.raises(BudgetError):
        fit(problem_of(rules=rules), limits(ffn_params="60%"))


def test_groups_that_may_go_and_mlps_in_one_budget():
    rules = WidthRules("layer", 4, ffn_multiple_of=8, drop_groups=True)
    problem, budget = problem_of(rules=rules, layers=2), limits(block_params="60%")
    found = fit(problem, budget)
    assert problem.allows(found.plan, budget)
    assert found.plan.changes_ffn
    plain = fit(problem_of(layers=2), budget)
    assert found.loss_increase <= plain.loss_increase + 1e-12


def test_engines_get_the_mlp_widths_they_run():
    problem = problem_of(rules=WidthRules("head", 2, ffn_multiple_of=8))
    even = problem.template.shape.model_copy(update={"d_model": 36})
    problem = replace(problem, template=problem.template.model_copy(update={"shape": even}))

    def solve(one):
        return fit(one, limits(params="85%"))

    stock = fit_for(problem, ["stock"], solve)
    assert len(set(stock.plan.ffn_dims)) == 1
    gguf = fit_for(problem, ["gguf"], solve)
    assert gguf.loss_increase <= stock.loss_increase
    assert fit_for(problem, ["onnx"], solve).loss_increase <= gguf.loss_increase


def test_the_least_of_all_parameters_for_a_loss():
    problem = problem_of()
    found = least_fit(problem, 0.05, "params", Budget())
    assert found.loss_increase <= 0.05
    assert found.plan.changes_ffn
    spent = cost(found.plan).params
    less = fit(problem, limits(params=f"{spent - 1}"))
    assert less.loss_increase > 0.05


def test_many_neurons_are_solved_with_a_proven_gap():
    """A model of 32 layers with 11008 neurons each."""
    rules = WidthRules("layer", 8)
    problem = problem_of(layers=32, neurons=11008, scale=1e-5, qk=32, vo=32, rules=rules)
    found = fit(problem, limits(params="80%"))
    assert found.gap < 1e-3
    assert len(set(found.plan.ffn_dims)) > 4
