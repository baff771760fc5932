"""Policies for new models: within budget, as wide as it allows, and shaped as they say."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headwise.errors import BudgetError, PlanError
from headwise.plan import Budget, Limit, ModelShape, Plan
from headwise.planning.cost import cost, dense_cost
from headwise.planning.design import EVIDENCE, POLICIES, DesignRules, new_plan, new_shape
from headwise.theory.allocation import allocate
from headwise.theory.estimators import Spectrum
from tests import lanes

GPT2 = new_shape(family="gpt2", n_layers=12, d_model=768, n_heads=12, context=1024)
TOKENS = DesignRules(token_dim=32)
GQA = new_shape(n_layers=7, d_model=96, n_heads=6, n_kv_heads=2, context=53)


def limits(**texts):
    return Budget(**{name: Limit.parse(text) for name, text in texts.items()})


@pytest.mark.slow
@settings(max_examples=lanes.examples(60), deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    attention=st.integers(5, 100),
    cache=st.integers(5, 100),
    multiple=st.sampled_from([1, 2, 8]),
    shape=st.sampled_from([GPT2, GQA]),
)
def test_never_over_budget(policy, attention, cache, multiple, shape):
    budget = limits(attn_params=f"{attention}%", kv_bytes=f"{cache}%")
    rules = DesignRules(multiple_of=multiple, token_dim=16)
    try:
        plan = new_plan(shape, budget, policy, rules)
    except BudgetError:
        assume(False)
    spent, dense = cost(plan), dense_cost(shape)
    assert spent.attn_params <= attention / 100 * dense.attn_params
    assert spent.kv_bytes <= cache / 100 * dense.kv_bytes
    if policy not in ("more-heads-late", "openelm", "theory"):
        widths = {h.qk_dim for layer in plan.layers for h in layer.heads}
        assert all(w % multiple == 0 or w == shape.qk_dim for w in widths)


@pytest.mark.slow
@pytest.mark.parametrize("policy", lanes.slow_but(("theory", "uniform"), sorted(POLICIES)))
def test_more_budget_never_gives_a_smaller_plan(policy):
    spent = [
        cost(new_plan(GPT2, limits(attn_params=f"{share}%"), policy, TOKENS)).attn_params
        for share in range(30, 101, 10)
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


def test_narrower_late_keeps_early_layers_and_narrows_later_ones():
    plan = new_plan(GPT2, limits(attn_params="75%"), "narrower-late")
    widths = [layer.heads[0].qk_dim for layer in plan.layers]
    assert widths[:4] == [64] * 4  # a third of the layers
    assert all(a >= b for a, b in itertools.pairwise(widths))
    assert widths[-1] < 64
    assert "4 early layers" in plan.origin.notes[0]


def test_narrower_late_gives_up_early_layers_before_it_gives_up():
    plan = new_plan(GPT2, limits(attn_params="15%"), "narrower-late")
    early = int(plan.origin.notes[0].split()[0])
    assert early < 4
    assert [layer.heads[0].qk_dim for layer in plan.layers][:early] == [64] * early


def test_narrower_late_is_the_rule_that_the_papers_were_judged_by():
    """The results of planned-vs-uniform were made with these widths."""
    shape = ModelShape(
        n_layers=6, d_model=96, context=128, n_heads=6, n_kv_heads=6, qk_dim=16, vo_dim=16,
        vocab_size=1024, ffn_dim=256,
    )  # fmt: skip
    plan = new_plan(shape, limits(attn_params="75%"), "narrower-late", DesignRules(multiple_of=2))
    assert [layer.heads[0].qk_dim for layer in plan.layers] == [16, 16, 14, 12, 8, 6]


def test_uniform_is_the_default_and_every_other_policy_a_hypothesis_with_its_evidence():
    assert new_plan(GPT2, limits(attn_params="75%")).origin.policy == "uniform"
    assert set(EVIDENCE) == set(POLICIES)
    for policy in POLICIES:
        notes = new_plan(GPT2, limits(attn_params="75%"), policy, TOKENS).origin.notes
        told = [note for note in notes if "is a hypothesis: " in note]
        assert told == (
            [] if policy == "uniform" else [f"{policy} is a hypothesis: {EVIDENCE[policy]}"]
        )


def test_theory_asks_for_the_tokens_instead_of_answering_what_it_was_told():
    """With the head width as its token width, 4, 12, 24 and 48 heads all came back unchanged."""
    with pytest.raises(PlanError, match=r"theory needs the width that tokens fill.*--token-dim"):
        new_plan(GPT2, Budget(), "theory")
    for told in (4, 12, 24, 48):
        shape = new_shape(n_layers=1, d_model=768, n_heads=told, context=64)
        (layer,) = new_plan(shape, Budget(), "theory", TOKENS).layers
        assert (len(layer.heads), layer.heads[0].qk_dim) == (24, 32)


def test_theory_takes_the_heads_of_the_bound_early_and_fewer_late():
    rules = DesignRules(token_dim=32, kernel=(1.0, 1.0))
    plan = new_plan(GPT2, Budget(), "theory", rules)
    heads = [len(layer.heads) for layer in plan.layers]
    assert heads[:4] == [24] * 4
    assert heads[-1] == 12
    assert heads == sorted(heads, reverse=True)
    assert {h.qk_dim for layer in plan.layers for h in layer.heads} == {32}


@pytest.mark.parametrize("kernel", [(1.0,), (1.0, 0.5), (1.0, 0.5, 0.25), (0.3, 1.0, 0.1)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16])
def test_theory_spends_the_whole_layer_on_grouped_queries(kernel, kv_heads):
    """Each lag's heads were divided by the group: 12, 14 or 24 query heads instead of 16."""
    shape = new_shape(n_layers=1, d_model=1024, n_heads=16, n_kv_heads=kv_heads, context=64)
    rules = DesignRules(token_dim=64, kernel=kernel)
    (layer,) = new_plan(shape, Budget(), "theory", rules).layers
    assert {h.queries for h in layer.heads} == {16 // kv_heads}
    best = allocate(1024, 64, kernel, heads_multiple=16 // kv_heads, dims_multiple=8)
    assert sum(h.queries for h in layer.heads) == sum(g.heads for g in best.groups)
    if kv_heads >= 4:
        assert sum(h.queries for h in layer.heads) == 16


def test_a_longer_context_narrows_scores_and_never_values():
    def widths(context):
        shape = new_shape(n_layers=6, d_model=768, n_heads=12, context=context)
        plan = new_plan(shape, limits(attn_params="50%"), "theory", TOKENS)
        return [
            sum(getattr(h, side) for layer in plan.layers for h in layer.heads)
            for side in ("qk_dim", "vo_dim")
        ]

    short, long = widths(64), widths(65536)
    assert long[0] < short[0]
    assert long[1] > short[1]


def test_theory_takes_a_measured_spectrum():
    steep = Spectrum(tuple(0.1**i for i in range(24)))
    flat = Spectrum((1.0,) * 16)
    shape = new_shape(n_layers=3, d_model=192, n_heads=4, context=64)
    plans = [
        new_plan(shape, Budget(), "theory", DesignRules(token_dim=tokens))
        for tokens in (steep, flat)
    ]
    narrow, wide = (plan.layers[0].heads[0].qk_dim for plan in plans)
    assert narrow < wide


@pytest.mark.parametrize("shape", [GPT2, GQA])
def test_graded_heads_mirror_each_other(shape):
    rules, budget = DesignRules(multiple_of=2), limits(attn_params="80%")
    many = new_plan(shape, budget, "early-many-late-few", rules)
    few = new_plan(shape, budget, "early-few-late-many", rules)
    assert [layer.heads for layer in many.layers] == [layer.heads for layer in few.layers[::-1]]
    heads = [len(layer.heads) for layer in many.layers]
    assert heads == sorted(heads, reverse=True)
    assert heads[0] == 2 * shape.n_kv_heads
    assert heads[-1] == shape.n_kv_heads // 2
    widths = [layer.heads[0].qk_dim for layer in many.layers]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1]


def test_an_image_model_can_be_planned():
    shape = new_shape(family="vit", n_layers=12, d_model=768, n_heads=12, context=197)
    # timm's vit_base_patch16_224 without its classes
    assert cost(Plan.uniform(shape)).params == 85_798_656
    assert not shape.causal
    assert new_plan(shape, limits(attn_params="75%")).layers[0].heads[0].qk_dim == 40
    with pytest.raises(PlanError, match="a square plus 1, got 200; use 197 or 226"):
        new_shape(family="vit", n_layers=12, d_model=768, n_heads=12, context=200)


@pytest.mark.parametrize("policy", ["uniform", "narrower-late"])
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
        (limits(params="5"), "theory", TOKENS, "total parameters is 5, but the smallest"),
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


def test_openelm_grows_heads_and_mlps_with_depth_at_the_uniform_models_size():
    plan = new_plan(GPT2, Budget(), "openelm")
    widths = plan.ffn_dims
    assert list(widths) == sorted(widths)
    assert all(w % 64 == 0 for w in widths)
    # 0.5 to 4 times d_model in the paper; here the same proportions of the uniform 4 · d_model.
    assert widths[-1] / widths[0] == pytest.approx(8, rel=0.15)
    assert sum(widths) == 12 * 3072
    groups = [len(layer.heads) for layer in plan.layers]
    assert groups == sorted(groups)
    assert groups[0] < groups[-1]
    assert cost(plan).params <= dense_cost(GPT2).params
    less = new_plan(GPT2, limits(ffn_params="50%"), "openelm")
    assert 0.45 * 12 * 3072 < sum(less.ffn_dims) <= 0.5 * 12 * 3072


def test_a_limit_on_mlps_narrows_mlps_and_nothing_else():
    plan = new_plan(GPT2, limits(ffn_params="70%"))
    assert set(plan.ffn_dims) == {2112}  # 70% of 3072 is 2150
    assert cost(plan).ffn_params <= 0.7 * dense_cost(GPT2).ffn_params
    assert cost(plan).attn_params == dense_cost(GPT2).attn_params
    both = new_plan(GPT2, limits(ffn_params="70%", attn_params="60%"), "narrower-late")
    assert both.ffn_dims == plan.ffn_dims
    # Limits that do not name the MLPs are spent on heads.
    heads = new_plan(GPT2, limits(params="95%"))
    assert not heads.changes_ffn
    assert cost(heads).attn_params < dense_cost(GPT2).attn_params
    with pytest.raises(BudgetError, match="too small for MLPs of 64 neurons"):
        new_plan(GPT2, limits(ffn_params="1%"))


def test_what_an_identity_saves_goes_to_the_mlp():
    rules = DesignRules(identity=("query",), refill_ffn=True, ffn_multiple_of=8)
    plan = new_plan(GPT2, Budget(), "uniform", rules)
    assert set(plan.ffn_dims) == {3072 + 384}  # 768² + 768 saved, at 2 · 768 + 1 for a neuron
    missing = dense_cost(GPT2).params - cost(plan).params
    assert 0 <= missing < 12 * 8 * (2 * 768 + 1)
    plain = new_plan(GPT2, Budget(), "uniform", DesignRules(identity=("query",)))
    assert cost(plan).attn_params == cost(plain).attn_params
    assert not plain.changes_ffn
    with pytest.raises(
        PlanError, match="only with limits on attention parameters and cached bytes"
    ):
        new_plan(GPT2, limits(params="90%"), "uniform", rules)
