"""From proxies' curves to a plan: what is known by construction comes out."""

import numpy as np
import pytest

from headwise.errors import BudgetError, PlanError
from headwise.plan import Budget, HeadSpec, LayerPlan, Limit, ModelShape, Plan
from headwise.planning.cost import cost, dense_cost
from headwise.planning.design import DesignRules, new_plan, new_shape
from headwise.planning.fit import HeadWorth
from headwise.planning.proxy import ProxyCurves, plan_from_proxies, proxy_curves
from headwise.planning.targets import target_of

TARGET = new_shape(n_layers=7, d_model=96, n_heads=6, n_kv_heads=3, context=53, vocab_size=59)
HALF = Budget(attn_params=Limit(share=0.5))
RULES = DesignRules(multiple_of=2)


def curves(weights, seed=0, noise=0.0, layers=3):
    """A proxy whose layers are worth `weights` by side, each by a concave curve."""
    rng = np.random.default_rng(seed)
    values = {
        side: tuple(
            np.concatenate([[0.0], np.cumsum(1 / np.arange(1, options + 1))])
            * w
            * np.exp(noise * rng.standard_normal())
            for w in np.linspace(*weights[side], layers)
        )
        for side, options in (("qk", 32), ("vo", 32), ("ffn", 384))
    }
    return ProxyCurves({"qk": 2.0, "vo": 2.0, "ffn": 6.0}, values, (3.0,) * layers)


EQUAL = {"qk": (1, 1), "vo": (1, 1), "ffn": (4, 4)}
EARLY = {"qk": (4, 1), "vo": (4, 1), "ffn": (4, 16)}


def widths(plan, side):
    return [getattr(layer.heads[0], f"{side}_dim") for layer in plan.layers]


@pytest.mark.parametrize(
    ("target", "multiple", "layers", "equal"),
    [("stock", 2, 1, False), ("vllm", 8, 2, True), ("onnx", 2, 2, False)],
)
def test_what_a_target_needs_is_tied(target, multiple, layers, equal):
    rules, wide = (
        RULES.tied_for([target]),
        new_shape(n_layers=7, d_model=384, n_heads=6, context=53),
    )
    weights = {"qk": (1, 1), "vo": (9, 2), "ffn": (4, 16)}
    plan, _ = plan_from_proxies([curves(weights)], wide, HALF, rules)
    found = {side: widths(plan, side) for side in ("qk", "vo")}
    assert (found["qk"] == found["vo"]) == equal
    assert all(w % multiple == 0 for row in found.values() for w in row)
    assert (len(set(found["vo"])) == 1) == (layers == 1)
    assert target_of(target).runs(plan).yes
    both, _ = plan_from_proxies([curves(weights)], wide, limits(block_params="70%"), rules)
    assert both.changes_ffn
    assert (len(set(both.ffn_dims)) == 1) == (layers == 1)
    assert target_of(target).runs(both).yes


def test_equal_proxies_give_the_uniform_plan_and_no_gain():
    plan, evidence = plan_from_proxies([curves(EQUAL)] * 2, TARGET, HALF, RULES)
    uniform = new_plan(TARGET, HALF, "uniform", RULES)
    assert [layer.heads for layer in plan.layers] == [layer.heads for layer in uniform.layers]
    assert plan.ffn_dims == uniform.ffn_dims
    assert evidence.gain == 0
    assert not evidence.is_certain
    assert evidence.wider == evidence.narrower == ()
    assert any("within the spread" in note for note in plan.origin.notes)
    assert "is a hypothesis" in plan.origin.notes[-1]


def test_worth_early_makes_early_layers_wider_than_uniform():
    proxies = [curves(EARLY, seed, noise=0.05) for seed in range(3)]
    plan, evidence = plan_from_proxies(proxies, TARGET, HALF, RULES)
    uniform = new_plan(TARGET, HALF, "uniform", RULES)
    for side in ("qk", "vo"):
        found = widths(plan, side)
        assert found == sorted(found, reverse=True)
        assert found[0] > widths(uniform, side)[0] > found[-1]
    assert evidence.is_certain
    assert evidence.low < evidence.gain < evidence.high
    assert {"0 qk", "0 vo"} <= set(evidence.wider)
    assert {"6 qk", "6 vo"} <= set(evidence.narrower)
    assert cost(plan).attn_params <= 0.5 * dense_cost(TARGET).attn_params


def test_layers_may_be_wider_than_the_uniform_model():
    whole = Budget(attn_params=Limit(share=1.0))
    plan, _ = plan_from_proxies([curves(EARLY)], TARGET, whole, RULES)
    assert widths(plan, "vo")[0] > TARGET.vo_dim
    assert cost(plan).attn_params <= dense_cost(TARGET).attn_params


def limits(**texts):
    return Budget(**{name: Limit.parse(text) for name, text in texts.items()})


FINE = DesignRules(multiple_of=2, ffn_multiple_of=8)


@pytest.mark.slow
@pytest.mark.parametrize("resource", ["params", "block_params", "flops", "traffic"])
def test_limits_that_count_mlps_are_spent_on_heads_and_mlps(resource):
    budget = limits(**{resource: "85%"})
    proxies = [curves(EARLY, seed, noise=0.02) for seed in range(3)]
    plan, evidence = plan_from_proxies(proxies, TARGET, budget, FINE)
    neurons = list(plan.ffn_dims)
    # What each side is worth goes with depth: heads fall, MLPs rise, beyond the uniform width.
    assert neurons == sorted(neurons)
    assert neurons[0] < neurons[-1]
    assert all(width % 8 == 0 for width in neurons)
    assert widths(plan, "vo")[0] > widths(plan, "vo")[-1]
    assert evidence.is_certain
    assert {"6 ffn", "0 vo"} <= set(evidence.wider)
    assert "0 ffn" in evidence.narrower
    dense = dense_cost(TARGET)
    for one in (plan, plan_from_proxies([curves(EQUAL)], TARGET, budget, FINE)[0]):
        assert 0.84 * dense.counted(resource) < cost(one).counted(resource)
        assert cost(one).counted(resource) <= budget.amount(resource, dense)


def test_mlps_may_be_wider_than_the_uniform_ones_and_alone_narrower():
    plan, _ = plan_from_proxies([curves(EARLY)], TARGET, limits(params="100%"), FINE)
    assert max(plan.ffn_dims) > TARGET.ffn_dim > min(plan.ffn_dims)
    only, _ = plan_from_proxies([curves(EQUAL)], TARGET, limits(ffn_params="60%"), FINE)
    assert max(only.ffn_dims) < TARGET.ffn_dim
    both = limits(attn_params="50%", ffn_params="60%")
    narrow, _ = plan_from_proxies([curves(EQUAL)], TARGET, both, FINE)
    assert narrow.ffn_dims == only.ffn_dims
    half, _ = plan_from_proxies([curves(EQUAL)], TARGET, HALF, FINE)
    assert [x.heads for x in narrow.layers] == [x.heads for x in half.layers]
    with pytest.raises(BudgetError, match="MLPs cost"):
        plan_from_proxies([curves(EQUAL)], TARGET, limits(block_params="1%"), FINE)


def test_limits_on_attention_leave_mlps_as_the_shape_says():
    for budget in (HALF, limits(kv_bytes="50%")):
        plan, evidence = plan_from_proxies([curves(EARLY)] * 2, TARGET, budget, FINE)
        assert not plan.changes_ffn
        assert not any("ffn" in place for place in (*evidence.wider, *evidence.narrower))


def test_the_uniform_plan_to_beat_gives_the_same_share_of_both():
    for text in ("85%", "100%"):
        plan, evidence = plan_from_proxies([curves(EQUAL)] * 2, TARGET, limits(params=text), FINE)
        spent = cost(plan)
        assert spent.params <= float(text[:-1]) / 100 * dense_cost(TARGET).params
        # The proxies know better how to divide between heads and MLPs, never worse.
        assert evidence.gain >= 0


def test_proxies_that_disagree_are_no_evidence():
    late = {"qk": (1, 4), "vo": (1, 4), "ffn": (16, 4)}
    plan, evidence = plan_from_proxies([curves(EARLY), curves(late)], TARGET, HALF, RULES)
    assert not evidence.is_certain
    assert evidence.wider == evidence.narrower == ()
    assert plan.origin.policy == "proxy"


def test_one_proxy_has_no_interval_and_none_is_refused():
    _, evidence = plan_from_proxies([curves(EARLY)], TARGET, HALF, RULES)
    assert (evidence.low, evidence.high) == (None, None)
    assert not evidence.is_certain
    with pytest.raises(PlanError, match="at least one proxy"):
        plan_from_proxies([], TARGET, HALF, RULES)


def test_curves_of_a_profile_by_hand():
    shape = ModelShape(
        n_layers=1, d_model=4, context=8, n_heads=2, n_kv_heads=2, qk_dim=4, vo_dim=3, ffn_dim=5
    )
    head = HeadSpec(qk_dim=4, vo_dim=3)
    plan = Plan(shape=shape, layers=(LayerPlan(heads=(head, head)),))
    one = HeadWorth(np.array([6.0, 2.0]), np.zeros(0), np.array([1.0, 5.0, 0.0]))
    two = HeadWorth(np.array([2.0, 2.0]), np.zeros(0), np.array([0.0, 0.0, 0.0]))
    found = proxy_curves(plan, ((one, two),), [np.array([1.0, 0.0, 4.0, 2.0, 3.0])])
    assert found.reach == {"qk": 2, "vo": 2, "ffn": 5 / 4}
    assert found.values["ffn"][0].tolist() == [0, 2, 3.5, 4.5, 5, 5]
    assert set(proxy_curves(plan, ((one, two),)).values) == {"qk", "vo"}
    # The best plane of each head first, half its worth per dimension, ½ for the loss.
    assert found.values["qk"][0].tolist() == [0, 2, 4, 5, 6]
    assert found.values["vo"][0].tolist() == [0, 2.5, 3, 3]
    assert found.heads[0] == pytest.approx((14 + 4) ** 2 / (14**2 + 4**2))
    depths = [
        float(curves({"qk": (1, 3), "vo": (1, 1), "ffn": (1, 1)}).at("qk", d, np.array([2.0]))[0])
        for d in (0, 0.5, 1)
    ]
    assert depths[1] == pytest.approx((depths[0] + depths[2]) / 2)
