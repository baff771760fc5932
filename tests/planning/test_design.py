"""Policies for new models: within budget, as wide as it allows, and shaped as they say."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headwise.errors import BudgetError, PlanError
from headwise.plan import Budget, Limit, Plan
from headwise.planning.cost import cost, dense_cost
from headwise.planning.design import POLICIES, DesignRules, new_plan, new_shape

GPT2 = new_shape(family="gpt2", n_layers=12, d_model=768, n_heads=12, context=1024)
GQA = new_shape(n_layers=7, d_model=96, n_heads=6, n_kv_heads=2, context=53)


def limits(**texts):
    return Budget(**{name: Limit.parse(text) for name, text in texts.items()})


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    attention=st.integers(5, 100),
    cache=st.integers(5, 100),
    multiple=st.sampled_from([1, 2, 8]),
    shape=st.sampled_from([GPT2, GQA]),
)
def test_never_over_budget(policy, attention, cache, multiple, shape):
    budget = limits(attn_params=f"{attention}%", kv_bytes=f"{cache}%")
    rules = DesignRules(multiple_of=multiple)
    try:
        plan = new_plan(shape, budget, policy, rules)
    except BudgetError:
        assume(False)
    spent, dense = cost(plan), dense_cost(shape)
    assert spent.attn_params <= attention / 100 * dense.attn_params
    assert spent.kv_bytes <= cache / 100 * dense.kv_bytes
    if policy != "more-heads-late":
        widths = {h.qk_dim for layer in plan.layers for h in layer.heads}
        assert all(w % multiple == 0 or w == shape.qk_dim for w in widths)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_more_budget_never_gives_a_smaller_plan(policy):
    spent = [
        cost(new_plan(GPT2, limits(attn_params=f"{share}%"), policy)).attn_params
        for share in range(20, 101, 10)
    ]
    assert spent == sorted(spent)


def test_uniform_is_the_widest_that_fits():
    plan = new_plan(GQA, limits(attn_params="75%"), "uniform", DesignRules(multiple_of=4))
    assert {(h.qk_dim, h.vo_dim) for layer in plan.layers for h in layer.heads} == {(12, 12)}
    # The output bias of GPT-2 does not shrink, so three quarters of its width are a little more
    # than three quarters of its parameters, and the next multiple of 8 below is taken.
    plan = new_plan(GPT2, limits(attn_params="75%"), "uniform")
    assert {(h.qk_dim, h.vo_dim) for layer in plan.layers for h in layer.heads} == {(40, 40)}
    assert new_plan(GPT2, Budget(), "uniform").layers == Plan.uniform(GPT2).layers


def test_more_heads_late_at_three_quarters_is_the_rule_of_openelm():
    plan = new_plan(GPT2, limits(attn_params="76%"), "more-heads-late")
    heads = [len(layer.heads) for layer in plan.layers]
    assert heads[0] == 6
    assert heads[-1] == 12
    assert heads == sorted(heads)
    assert {h.qk_dim for layer in plan.layers for h in layer.heads} == {64}


def test_more_heads_late_takes_the_largest_scale_that_fits():
    plan = new_plan(GQA, limits(attn_params="60%"), "more-heads-late")
    groups = sum(len(layer.heads) for layer in plan.layers)
    # 7 layers of 2 groups; 60% of 14 groups is 8.4
    assert groups == 8


def test_theory_keeps_early_layers_and_narrows_later_ones():
    plan = new_plan(GPT2, limits(attn_params="75%"), "theory")
    widths = [layer.heads[0].qk_dim for layer in plan.layers]
    assert widths[:4] == [64] * 4  # a third of the layers
    assert all(a >= b for a, b in itertools.pairwise(widths))
    assert widths[-1] < 64
    assert "4 early layers" in plan.origin.notes[1]


def test_theory_gives_up_early_layers_before_it_gives_up():
    plan = new_plan(GPT2, limits(attn_params="15%"), "theory")
    early = int(plan.origin.notes[1].split()[0])
    assert early < 4
    assert [layer.heads[0].qk_dim for layer in plan.layers][:early] == [64] * early


def test_theory_takes_the_heads_of_the_bound():
    rules = DesignRules(token_dim=32, kernel=(1.0, 1.0))
    plan = new_plan(GPT2, Budget(), "theory", rules)
    assert {(len(x.heads), x.heads[0].qk_dim) for x in plan.layers} == {(24, 32)}


def test_a_bound_off_its_corner_gives_mixed_heads():
    rules = DesignRules(token_dim=96, kernel=(1.0, 0.01), multiple_of=1)
    shape = new_shape(n_layers=1, d_model=96, n_heads=4, context=5)
    (layer,) = new_plan(shape, Budget(), "theory", rules).layers
    assert sum(h.qk_dim for h in layer.heads) <= 96


@pytest.mark.parametrize("policy", ["uniform", "theory"])
def test_an_identity_query_keeps_its_width(policy):
    rules = DesignRules(identity=("query",))
    plan = new_plan(GPT2, limits(attn_params="60%"), policy, rules)
    assert all(layer.query == "identity" for layer in plan.layers)
    assert {h.qk_dim for layer in plan.layers for h in layer.heads} == {64}
    assert min(h.vo_dim for layer in plan.layers for h in layer.heads) < 64
    assert cost(plan).attn_params <= 0.6 * dense_cost(GPT2).attn_params


def test_an_identity_key_needs_as_many_keys_as_the_model_is_wide():
    with pytest.raises(PlanError, match="identity key projection needs heads whose widths add up"):
        new_plan(GQA, Budget(), "uniform", DesignRules(identity=("key",)))


@pytest.mark.parametrize(
    ("budget", "policy", "rules", "message"),
    [
        (
            limits(attn_params="1%"),
            "uniform",
            DesignRules(),
            "attention parameters is 283484, but the sm",
        ),
        (limits(params="5"), "theory", DesignRules(), "total parameters is 5, but the smallest"),
        (
            limits(kv_bytes="1%"),
            "more-heads-late",
            DesignRules(),
            "too small for any plan with one whole head",
        ),
        (
            limits(attn_params="20%"),
            "uniform",
            DesignRules(min_dim=64),
            "smallest allowed plan costs",
        ),
    ],
)
def test_a_budget_too_small_says_what_is_missing(budget, policy, rules, message):
    with pytest.raises(BudgetError, match=message):
        new_plan(GPT2, budget, policy, rules)


def test_bad_words_are_refused():
    with pytest.raises(PlanError, match=r"unknown policy 'unifrom'. Did you mean 'uniform'\?"):
        new_plan(GPT2, Budget(), "unifrom")
    with pytest.raises(PlanError, match="at least 1, got 0"):
        new_plan(GPT2, Budget(), "uniform", DesignRules(multiple_of=0))
    with pytest.raises(PlanError, match=r"unknown family 'gpt3'. Did you mean 'gpt2'\?"):
        new_shape(family="gpt3", n_layers=1, d_model=8, n_heads=1, context=1)
    with pytest.raises(PlanError, match="heads must divide d-model 768, got 7"):
        new_shape(n_layers=1, d_model=768, n_heads=7, context=1)
    with pytest.raises(PlanError, match="layers must be a whole number of at least 1, got 0"):
        new_shape(n_layers=0, d_model=8, n_heads=1, context=1)
