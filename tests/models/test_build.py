"""New models from plans: sizes, seeds, scales, identity projections, clear refusals."""

from __future__ import annotations

import math

import pytest
import torch

from headwise.errors import PlanError
from headwise.models.build import (
    build_model,
    plan_of,
    resolved,
    spread_planes,
    stock_config,
    stock_plan,
)
from headwise.plan import HeadSpec, LayerPlan, ModelShape, Plan
from headwise.planning.cost import cost
from headwise.planning.design import new_shape
from tests import tiny
from tests.tolerances import REORDERED


def _plan(family="llama", **given):
    sizes = {"n_layers": 2, "d_model": 48, "n_heads": 3, "context": 31, "vocab_size": 101}
    return Plan.uniform(new_shape(family=family, **(sizes | given)))


@pytest.mark.parametrize(
    ("family", "task"), [("llama", "causal-lm"), ("gpt2", "causal-lm"), ("bert", "bare")]
)
def test_a_new_model_has_the_planned_size(family, task):
    plan = _plan(family)
    model = build_model(plan, task=task, seed=1)
    assert sum(p.numel() for p in model.parameters()) == cost(plan).params
    ids = torch.arange(7)[None]
    assert torch.isfinite(model(input_ids=ids)[0]).all()


def test_heads_need_not_divide_d_model():
    plan = _plan(d_model=47, n_heads=6, n_kv_heads=3, head_dim=8)
    model = build_model(plan)
    assert sum(p.numel() for p in model.parameters()) == cost(plan).params
    assert plan_of(model).layers[0].heads[0].queries == 2


def test_shape_config_shape(every_family):
    if every_family == "vit":  # an image's size is not part of a shape
        return
    shape = stock_plan(tiny.config(every_family)).shape
    again = stock_plan(stock_config(shape)).shape
    ignored = {"attention_biases": (), "ffn_biases": False, "other_params": 0, "kv_dtype_bytes": 2}
    assert again.model_copy(update=ignored) == shape.model_copy(update=ignored)


def test_seeds():
    plan = _plan()
    one, same, other = (build_model(plan, seed=s) for s in (1, 1, 2))
    weights = [m.attentions()[0].q_proj.weight for m in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    torch.manual_seed(5)
    before = torch.rand(3)
    torch.manual_seed(5)
    build_model(plan, seed=1)
    assert torch.equal(torch.rand(3), before)  # the caller's random state is left alone


def test_dtype_and_overrides():
    model = build_model(_plan(), dtype=torch.bfloat16, overrides={"rms_norm_eps": 0.25})
    assert model.dtype == torch.bfloat16
    assert model.config.rms_norm_eps == 0.25
    assert model.backbone.model.rotary_emb.inv_freq.dtype == torch.float32


def test_initial_spread_is_the_familys():
    model = build_model(_plan("gpt2", n_layers=8, d_model=96), seed=1)
    attention = model.attentions()[3]
    assert attention.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    # GPT-2 starts its residual outputs smaller by the root of their number.
    assert attention.o_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert not attention.q_proj.bias.any()


def test_identity_query_removes_a_quarter():
    shape = _plan().shape
    head = HeadSpec(qk_dim=16, vo_dim=16)
    plain = Plan(shape=shape, layers=(LayerPlan(heads=(head,) * 3),) * 2)
    less = Plan(shape=shape, layers=(LayerPlan(heads=(head,) * 3, query="identity"),) * 2)

    def weights(plan):
        model = build_model(plan)
        assert sum(p.numel() for p in model.parameters()) == cost(plan).params
        return sum(p.numel() for a in model.attentions() for p in a.parameters())

    assert weights(less) * 4 == weights(plain) * 3


@pytest.mark.parametrize("side", ["query", "key", "value"])
def test_an_identity_projection_is_an_identity_matrix(side):
    shape = _plan().shape
    heads = (HeadSpec(qk_dim=16, vo_dim=16, score_scale=0.3),) * 3
    learned = build_model(Plan(shape=shape, layers=(LayerPlan(heads=heads),) * 2), seed=1)
    layer = LayerPlan(heads=heads, **{side: "identity"})
    model = build_model(Plan(shape=shape, layers=(layer,) * 2), seed=1)
    name = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}[side]
    tiny.randomise(learned)
    state = learned.state_dict()
    with torch.no_grad():
        for attention in learned.attentions():
            getattr(attention, name).weight.copy_(torch.eye(48))
    model.load_state_dict({k: v for k, v in state.items() if f".{name}." not in k})
    ids = torch.arange(3, 14)[None]
    torch.testing.assert_close(model(ids).logits, learned(ids).logits, **REORDERED)


def test_scales_and_planes_are_resolved_by_hand():
    shape = ModelShape(
        n_layers=1, d_model=768, context=8, n_heads=12, n_kv_heads=12, qk_dim=64, vo_dim=64
    )
    heads = (HeadSpec(qk_dim=64, vo_dim=64),) * 12
    layer = LayerPlan(heads=heads, query="identity")
    head = resolved(Plan(shape=shape, layers=(layer,)), init_std=0.02).layers[0].heads[0]
    # The paper halves 1/√64; matching the spread asks for 0.02·√768 = 0.554.
    assert head.score_scale == pytest.approx(0.02 * math.sqrt(768) / 8)
    assert head.rotary_planes == ()
    narrow = LayerPlan(heads=(HeadSpec(qk_dim=9, vo_dim=5),))
    head = resolved(Plan(shape=shape, layers=(narrow,)), rotary_planes=32).layers[0].heads[0]
    assert head.score_scale == pytest.approx(1 / 3)
    assert head.rotary_planes == (0, 10, 21, 31)
    kept = LayerPlan(heads=(HeadSpec(qk_dim=9, vo_dim=5, score_scale=2.0, rotary_planes=(7,)),))
    plan = Plan(shape=shape, layers=(kept,))
    assert resolved(plan, rotary_planes=32) == plan


def test_the_identity_scale_matches_the_spread_of_scores():
    torch.manual_seed(0)
    d, width, n = 768, 64, 400
    x, w_q, w_k = torch.randn(n, d), 0.02 * torch.randn(width, d), 0.02 * torch.randn(width, d)
    learned = ((x @ w_q.T) @ (x @ w_k.T).T / 8).std()
    identity = x[:, :width] @ (x @ w_k.T).T / 8
    assert (identity * 0.02 * math.sqrt(d)).std() == pytest.approx(learned.item(), rel=0.05)
    assert identity.std() > 1.5 * learned  # without the factor the spread is another


def test_spread_planes():
    assert spread_planes(3, 5) == (0, 2, 4)
    assert spread_planes(5, 5) == (0, 1, 2, 3, 4)
    assert spread_planes(9, 5) == (0, 1, 2, 3, 4)
    assert spread_planes(1, 5) == (0,)
    assert spread_planes(0, 5) == ()
    for kept in range(1, 33):
        assert len(set(spread_planes(kept, 32))) == kept


def test_refusals():
    with pytest.raises(PlanError, match=r"task must be one of bare, causal-lm, .*, got 'poetry'"):
        build_model(_plan(), task="poetry")
    with pytest.raises(PlanError, match="a llama model has no masked-lm variant"):
        build_model(_plan(), task="masked-lm")
    shape = _plan().shape
    with pytest.raises(PlanError, match="a llama model is causal, got causal=False"):
        build_model(Plan.uniform(shape.model_copy(update={"causal": False})))
    with pytest.raises(PlanError, match="a llama model has no sliding windows"):
        build_model(Plan.uniform(shape.model_copy(update={"windows": (3, 3)})))
    uneven = shape.model_copy(update={"windows": (3, 5), "family": "qwen2"})
    with pytest.raises(PlanError, match="a qwen2 model has one window size"):
        build_model(Plan.uniform(uneven))
    with pytest.raises(PlanError, match=r"must be one of .* got 'mamba'"):
        build_model(Plan.uniform(shape.model_copy(update={"family": "mamba"})))
    config = tiny.config("llama")
    with pytest.raises(PlanError, match="the plan has 2 layers, but the backbone has 3"):
        build_model(_plan(d_model=42), config=config)
