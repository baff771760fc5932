"""From proxies' curves to a plan: what is known by construction comes out."""

import numpy as np
import pytest

from headwise.errors import PlanError
from headwise.plan import Budget, HeadSpec, LayerPlan, Limit, ModelShape, Plan
from headwise.planning.cost import cost, dense_cost
from headwise.planning.design import DesignRules, new_plan, new_shape
from headwise.planning.fit import HeadWorth
from headwise.planning.proxy import ProxyCurves, plan_from_proxies, proxy_curves

TARGET = new_shape(n_layers=7, d_model=96, n_heads=6, n_kv_heads=3, context=53)
HALF = Budget(attn_params=Limit(share=0.5))
RULES = DesignRules(multiple_of=2)


def curves(weights, seed=0, noise=0.0, layers=3):
    """A proxy whose layers are worth `weights` (qk, vo), each by a concave curve."""
    rng = np.random.default_rng(seed)
    shape = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, 33))])
    values = {
        side: tuple(
            shape * w * np.exp(noise * rng.standard_normal())
            for w in np.linspace(*weights[side], layers)
        )
        for side in ("qk", "vo")
    }
    return ProxyCurves(2.0, values, (3.0,) * layers)


EQUAL = {"qk": (1, 1), "vo": (1, 1)}
EARLY = {"qk": (4, 1), "vo": (4, 1)}


def widths(plan, side):
    return [getattr(layer.heads[0], f"{side}_dim") for layer in plan.layers]


def test_equal_proxies_give_the_uniform_plan_and_no_gain():
    plan, evidence = plan_from_proxies([curves(EQUAL)] * 2, TARGET, HALF, RULES)
    uniform = new_plan(TARGET, HALF, "uniform", RULES)
    assert [layer.heads for layer in plan.layers] == [layer.heads for layer in uniform.layers]
    assert plan.ffn_dims == uniform.ffn_dims
    assert evidence.gain == 0
    assert not evidence.is_certain
    assert evidence.wider == evidence.narrower == ()
    assert any("not beyond the seeds' spread" in note for note in plan.origin.notes)
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


def test_proxies_that_disagree_are_no_evidence():
    late = {"qk": (1, 4), "vo": (1, 4)}
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
    found = proxy_curves(plan, ((one, two),))
    assert found.reach == 2
    # The best plane of each head first, half its worth per dimension, ½ for the loss.
    assert found.values["qk"][0].tolist() == [0, 2, 4, 5, 6]
    assert found.values["vo"][0].tolist() == [0, 2.5, 3, 3]
    assert found.heads[0] == pytest.approx((14 + 4) ** 2 / (14**2 + 4**2))
    depths = [
        float(curves({"qk": (1, 3), "vo": (1, 1)}).at("qk", d, np.array([2.0]))[0])
        for d in (0, 0.5, 1)
    ]
    assert depths[1] == pytest.approx((depths[0] + depths[2]) / 2)
