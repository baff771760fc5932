"""Plans fitted to sensitivities: budgets kept, brute force not beaten, the rules obeyed."""

import itertools
import math

import numpy as np
import pytest

from headwise.errors import BudgetError, PlanError
from headwise.plan import RESOURCES, Budget, HeadSpec, LayerPlan, Limit
from headwise.planning.cost import cost, dense_cost
from headwise.planning.fit import (
    FitProblem,
    HeadWorth,
    fit,
    kept_planes,
    least_fit,
    most_valuable,
    predicted_loss,
    weighted_loss,
    width_curves,
)
from headwise.planning.rules import WidthRules
from tests.tiny_profile import dense_plan


def make_problem(
    *, layers=3, groups=2, qk=16, vo=16, rotary=None, seed=0, rules=None, whole=False, **more
):
    """A problem with random sensitivities; `rotary` of the qk columns have positions."""
    rotary = qk if rotary is None else rotary
    template = dense_plan(
        layers=layers, groups=groups, queries=3, qk=qk, vo=vo, rotary=rotary, d_model=37
    )
    rng = np.random.default_rng(seed)
    worths = tuple(
        tuple(
            HeadWorth(
                rng.exponential(size=rotary // 2) * 0.01,
                rng.exponential(size=qk - rotary) * 0.01,
                rng.exponential(size=vo) * 0.01,
                qk_whole=whole,
            )
            for _ in range(groups)
        )
        for _ in range(layers)
    )
    return FitProblem(template, worths, rules or WidthRules("head", multiple_of=2), **more)


def share(value, resource="attn_params"):
    return Budget(**{resource: Limit(share=value)})


@pytest.mark.parametrize("policy", ["sensitivity", "uniform", "narrower-late"])
@pytest.mark.parametrize("resource", [r for r in RESOURCES if r != "ffn_params"])
def test_budgets_are_kept_and_nearly_used(policy, resource):
    problem = make_problem(policy=policy)
    found = fit(problem, share(0.8, resource))
    spent = cost(found.plan).counted(resource)
    dense = dense_cost(problem.template.shape).counted(resource)
    assert spent <= 0.8 * dense
    assert spent > (0.75 if policy == "sensitivity" else 0.6) * dense
    assert found.plan.origin.policy == policy
    assert found.loss_increase == predicted_loss(problem, found.plan)
    assert found.plan.origin.predicted_loss == found.loss_increase


@pytest.mark.parametrize("weight", [1.0, 0.4])
def test_no_plan_predicts_less_brute_force(weight):
    rules = WidthRules("head", multiple_of=2, min_dim=2, qk_weight=weight)
    for seed in range(5):
        problem = make_problem(layers=2, groups=1, qk=6, vo=6, seed=seed, rules=rules)
        found = fit(problem, share(0.6))
        assert found.exact
        best = math.inf
        for widths in itertools.product((2, 4, 6), repeat=4):
            heads = [problem.template.layers[0].heads[0]] * 2
            layers = []
            for i, head in enumerate(heads):
                qk, vo = widths[2 * i : 2 * i + 2]
                planes = tuple(most_valuable(problem.sensitivity[i][0].planes, qk // 2))
                change = {"qk_dim": qk, "vo_dim": vo, "rotary_planes": planes}
                layers.append(LayerPlan(heads=(head.model_copy(update=change),)))
            plan = problem.template.model_copy(update={"layers": tuple(layers)})
            if cost(plan).attn_params <= 0.6 * cost(problem.template).attn_params:
                best = min(best, weighted_loss(problem, plan))
        assert weighted_loss(problem, found.plan) == pytest.approx(best, rel=1e-12)
        assert found.loss_increase == predicted_loss(problem, found.plan)


def test_a_light_query_key_side_is_cut_first_and_still_predicted_in_full():
    plain, light = (
        fit(make_problem(rules=WidthRules("head", 2, qk_weight=w)), share(0.7)) for w in (1, 0.3)
    )
    keys = [sum(layer.key_width for layer in f.plan.layers) for f in (plain, light)]
    assert keys[1] < keys[0]
    assert light.loss_increase > plain.loss_increase
    assert (plain.plan.origin.qk_weight, light.plan.origin.qk_weight) == (None, 0.3)
    # Only what goes by sensitivity has a weight.
    rules = WidthRules("head", 2, qk_weight=0.3)
    uniform = fit(make_problem(rules=rules, policy="uniform"), share(0.7))
    assert uniform.plan == fit(make_problem(policy="uniform"), share(0.7)).plan


def test_more_budget_never_predicts_more_loss():
    problem = make_problem(seed=3)
    losses = [fit(problem, share(s)).loss_increase for s in np.linspace(0.3, 1.0, 15)]
    assert all(b <= a + 1e-15 for a, b in itertools.pairwise(losses))
    assert losses[-1] == 0
    assert losses[0] > 0


def test_a_hand_computed_prediction():
    problem = make_problem(layers=1, groups=1, qk=4, vo=2)
    worth = HeadWorth(np.array([0.5, 3.0]), np.zeros(0), np.array([1.0, 0.25]))
    problem = FitProblem(problem.template, ((worth,),), WidthRules(multiple_of=1))
    head = problem.template.layers[0].heads[0]
    cut = head.model_copy(update={"qk_dim": 2, "vo_dim": 1, "rotary_planes": (1,)})
    plan = problem.template.model_copy(update={"layers": (LayerPlan(heads=(cut,)),)})
    assert predicted_loss(problem, plan) == pytest.approx(0.5 * (0.5 + 0.25))
    # A plan that keeps the wrong plane is charged for the one it drops.
    wrong = cut.model_copy(update={"rotary_planes": (0,)})
    plan = problem.template.model_copy(update={"layers": (LayerPlan(heads=(wrong,)),)})
    assert predicted_loss(problem, plan) == pytest.approx(0.5 * (3.0 + 0.25))


def test_kept_planes_are_the_most_sensitive_and_scales_stay():
    problem = make_problem(seed=1)
    for i, layer in enumerate(fit(problem, share(0.6)).plan.layers):
        for j, head in enumerate(layer.heads):
            assert head.score_scale == 0.3
            assert 2 * len(head.rotary_planes) == head.qk_dim
            ranked = np.argsort(-problem.sensitivity[i][j].planes)[: len(head.rotary_planes)]
            assert set(head.rotary_planes) == set(ranked.tolist())


@pytest.mark.parametrize("granularity", ["head", "layer", "model"])
def test_granularity_ties_widths(granularity):
    problem = make_problem(seed=2, rules=WidthRules(granularity, multiple_of=2))
    layers = [[(h.qk_dim, h.vo_dim) for h in x.heads] for x in fit(problem, share(0.7)).plan.layers]
    assert (len({w for layer in layers for w in layer}) == 1) == (granularity == "model")
    assert all(len(set(layer)) == 1 for layer in layers) == (granularity != "head")


def test_finer_granularity_never_predicts_more():
    losses = [
        fit(make_problem(seed=2, rules=WidthRules(g, multiple_of=2)), share(0.7)).loss_increase
        for g in ("head", "layer", "model")
    ]
    assert losses == sorted(losses)


@pytest.mark.parametrize(("multiple", "least"), [(1, None), (3, None), (8, None), (4, 7)])
def test_widths_are_multiples_above_the_floor(multiple, least):
    problem = make_problem(rules=WidthRules(multiple_of=multiple, min_dim=least), qk=24, vo=20)
    for budget in (share(0.75), share(0.6)):
        for layer in fit(problem, budget).plan.layers:
            for head in layer.heads:
                assert head.qk_dim % math.lcm(multiple, 2) == 0 or head.qk_dim == 24
                assert head.vo_dim % multiple == 0 or head.vo_dim == 20
                assert min(head.qk_dim, head.vo_dim) >= (least or multiple)


def test_partly_rotated_heads_have_two_curves():
    problem = make_problem(qk=20, rotary=8, rules=WidthRules(multiple_of=4))
    curves = width_curves(problem.sensitivity, problem.rules)
    assert [len(curves[0, 0, p].values) for p in ("planes", "free", "vo")] == [9, 13, 17]
    found = fit(problem, share(0.6))
    assert found.loss_increase > 0
    for layer in found.plan.layers:
        for head in layer.heads:
            n = len(head.rotary_planes)
            assert n in (2, 4)
            assert 0 <= head.qk_dim - 2 * n <= 12


def test_heads_without_positions():
    problem = make_problem(rotary=0)
    heads = [h for x in fit(problem, share(0.6)).plan.layers for h in x.heads]
    assert all(h.rotary_planes == () for h in heads)
    assert len({h.qk_dim for h in heads}) > 1


def test_a_side_that_is_left_alone_keeps_its_width():
    for policy in ("sensitivity", "uniform", "narrower-late"):
        problem = make_problem(whole=True, policy=policy)
        heads = [h for x in fit(problem, share(0.8)).plan.layers for h in x.heads]
        assert {h.qk_dim for h in heads} == {16}
        assert min(h.vo_dim for h in heads) < 16
    with pytest.raises(BudgetError, match="smallest allowed plan"):
        fit(problem, share(0.4))


def test_narrower_late_narrows_later_layers_and_uniform_does_not():
    late = fit(make_problem(policy="narrower-late", layers=5), share(0.7)).plan.layers
    widths = [layer.heads[0].vo_dim for layer in late]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]
    uniform = fit(make_problem(policy="uniform", layers=5), share(0.75)).plan.layers
    assert {(h.qk_dim, h.vo_dim) for x in uniform for h in x.heads} == {(12, 12)}


def test_another_worth_decides_widths_but_not_directions():
    problem = make_problem(seed=4)
    flat = tuple(
        tuple(HeadWorth(np.ones(8), np.ones(0), np.linspace(2, 1, 16)) for _ in layer)
        for layer in problem.sensitivity
    )
    other = FitProblem(problem.template, problem.sensitivity, problem.rules, "energy", flat)
    plain, changed = fit(problem, share(0.7)), fit(other, share(0.7))
    assert changed.plan.layers != plain.plan.layers
    assert changed.loss_increase > plain.loss_increase
    head = changed.plan.layers[0].heads[0]
    ranked = np.argsort(-problem.sensitivity[0][0].planes)[: len(head.rotary_planes)]
    assert set(head.rotary_planes) == set(ranked.tolist())


@pytest.mark.parametrize("resource", ["attn_params", "kv_bytes", "params"])
def test_the_least_plan_under_a_loss_target(resource):
    problem = make_problem(seed=5)
    target = 0.02
    found = least_fit(problem, target, resource, Budget())
    spent = getattr(cost(found.plan), resource)
    assert found.loss_increase <= target
    # One unit less is over the target: the cut is the largest.
    less = fit(problem, Budget(**{resource: Limit(amount=spent - 1)}))
    assert less.loss_increase > target
    # Other budgets hold at the same time.
    both = least_fit(problem, target, resource, share(0.9, "flops"))
    assert cost(both.plan).flops <= 0.9 * cost(problem.template).flops
    assert both.loss_increase <= target


def test_loss_targets_at_the_ends():
    problem = make_problem(seed=5)
    assert least_fit(problem, 0.0, "attn_params", Budget()).loss_increase == 0
    smallest = least_fit(problem, 1e9, "attn_params", Budget()).plan
    assert {(h.qk_dim, h.vo_dim) for x in smallest.layers for h in x.heads} == {(2, 2)}
    with pytest.raises(BudgetError, match="even the largest plan within the budget predicts"):
        least_fit(problem, 0.0, "attn_params", share(0.5))


@pytest.mark.parametrize("policy", ["sensitivity", "uniform", "narrower-late", "energy"])
def test_nothing_is_dropped_where_no_limit_binds(policy):
    unused = make_problem(rules=WidthRules(multiple_of=8))
    for layer in unused.sensitivity:
        for head in layer:
            for part in (head.planes, head.vo):
                part[1:] = 0.0  # directions the text never used
    problem = FitProblem(
        unused.template, unused.sensitivity, unused.rules, policy, unused.sensitivity
    )
    for budget in (Budget(), share(1.0), share(1.0, "kv_bytes")):
        assert fit(problem, budget).plan.layers == unused.template.layers


def test_what_cannot_be_is_one_sentence():
    with pytest.raises(BudgetError, match="smallest allowed plan costs"):
        fit(make_problem(), share(0.01))
    with pytest.raises(BudgetError, match="less than the smallest allowed plan"):
        fit(make_problem(policy="uniform"), share(0.01))
    with pytest.raises(PlanError, match="granularity must be layer, head or model, got 'heads'"):
        WidthRules("heads")
    with pytest.raises(PlanError, match="multiple-of and min-dim must be at least 1"):
        WidthRules(multiple_of=0)
    with pytest.raises(PlanError, match="unknown policy 'theory'"):
        make_problem(policy="theory")
    dense = HeadSpec(qk_dim=4, vo_dim=4, rotary_planes=(0, 1))
    with pytest.raises(PlanError, match="use the plan with the profile it was fitted to"):
        kept_planes(dense, HeadSpec(qk_dim=4, vo_dim=4, rotary_planes=(0, 5)))


def test_ties_are_kept_in_order():
    assert most_valuable(np.array([1.0, 2.0, 2.0, 1.0]), 3) == [0, 1, 2]


def test_a_traffic_budget_holds_where_it_is_stated():
    """A long context is nearly all cache, a short one nearly all weights."""
    rules = {c: WidthRules("layer", 2, context=c, batch=16) for c in (1, 4096)}
    plans = {}
    for context, rule in rules.items():
        problem = make_problem(seed=4, rules=rule)
        found = fit(problem, share(0.7, "traffic"))
        dense = dense_cost(problem.template.shape, context, 16)
        assert cost(found.plan, context, 16).step_bytes <= 0.7 * dense.step_bytes
        plans[context] = cost(found.plan).kv_bytes / dense.kv_bytes
    assert plans[4096] == pytest.approx(0.7, abs=0.05)
    # At another context the same plan is over the limit: the place matters.
    assert plans[1] < plans[4096] - 0.02


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["narrower-late", "wider-late", "random", "random:7"])
def test_shares_spend_the_budget_and_no_more(policy):
    problem = make_problem(layers=6, rules=WidthRules("layer", 2), policy=policy)
    found = fit(problem, share(0.7))
    spent, dense = cost(found.plan).attn_params, cost(problem.template).attn_params
    step = max(
        2 * sum(problem.unit_cost(0, head, side)["attn_params"] for head in layer.heads)
        for layer in problem.template.layers
        for side in ("qk", "vo")
    )
    assert 0.7 * dense - step < spent <= 0.7 * dense
    widths = [layer.value_width for layer in found.plan.layers]
    if policy == "narrower-late":
        assert widths == sorted(widths, reverse=True)
    if policy == "wider-late":
        assert widths == sorted(widths)
    again = fit(make_problem(layers=6, rules=WidthRules("layer", 2), policy=policy), share(0.7))
    assert again.plan == found.plan
    if policy.startswith("random"):
        assert widths not in (sorted(widths), sorted(widths, reverse=True))
        other = make_problem(layers=6, rules=WidthRules("layer", 2), policy="random:3")
        assert fit(other, share(0.7)).plan.layers != found.plan.layers


@pytest.mark.parametrize("policy", ["uniform:3", "random:x", "later"])
def test_policies_that_are_none(policy):
    with pytest.raises(PlanError, match=r"unknown policy|only random takes a seed"):
        make_problem(policy=policy)
