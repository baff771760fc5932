"""Costs of uniform plans against the parameter counts of real, published models."""

import pytest

from headwise.plan import HeadSpec, LayerPlan, ModelShape, Plan
from headwise.planning.cost import (
    cost,
    dense_cost,
    layer_params,
    neuron_cost,
    outside_params,
    unit_cost,
)
from headwise.planning.design import new_shape

# (shape, parameters of the attention projections, all parameters) of the released models.
GPT2_SMALL = new_shape(family="gpt2", n_layers=12, d_model=768, n_heads=12, context=1024)
LLAMA_2_7B = new_shape(
    n_layers=32, d_model=4096, n_heads=32, context=4096, ffn_dim=11008, vocab_size=32000
)
LLAMA_3_8B = new_shape(
    n_layers=32,
    d_model=4096,
    n_heads=32,
    n_kv_heads=8,
    context=8192,
    ffn_dim=14336,
    vocab_size=128256,
)
SMOLLM2_135M = new_shape(
    n_layers=30,
    d_model=576,
    n_heads=9,
    n_kv_heads=3,
    context=8192,
    ffn_dim=1536,
    vocab_size=49152,
    tied_embeddings=True,
)
BERT_BASE = new_shape(family="bert", n_layers=12, d_model=768, n_heads=12, context=512)


@pytest.mark.parametrize(
    ("shape", "attention", "total"),
    [
        pytest.param(GPT2_SMALL, 28_348_416, 124_439_808, id="gpt2"),
        pytest.param(LLAMA_2_7B, 2_147_483_648, 6_738_415_616, id="llama-2-7b"),
        pytest.param(LLAMA_3_8B, 1_342_177_280, 8_030_261_248, id="llama-3-8b"),
        pytest.param(SMOLLM2_135M, 26_542_080, 134_515_008, id="smollm2-135m"),
        pytest.param(BERT_BASE, 28_348_416, 109_482_240, id="bert-base"),
    ],
)
def test_uniform_plans_count_like_the_released_models(shape, attention, total):
    counted = dense_cost(shape)
    assert counted.attn_params == attention
    assert counted.params == total


def test_key_value_bytes_of_llama_3_8b():
    # 32 layers × 8 key/value heads × (128 + 128) numbers × 2 bytes
    assert dense_cost(LLAMA_3_8B).kv_bytes == 131_072


def test_an_encoder_caches_nothing():
    assert dense_cost(BERT_BASE).kv_bytes == 0


def test_flops_by_hand():
    shape = ModelShape(
        n_layers=1,
        d_model=7,
        context=13,
        n_heads=2,
        n_kv_heads=1,
        qk_dim=3,
        vo_dim=5,
        vocab_size=11,
        ffn_dim=17,
        ffn_gated=False,
    )
    # query 7·6, key 7·3, value 7·5, output 10·7; MLP 2·7·17; head 7·11; scores and mixing
    projections, mlp, head = 42 + 21 + 35 + 70, 238, 77
    assert dense_cost(shape).flops == 2 * (projections + mlp + head) + 2 * 13 * (6 + 10)
    assert cost(Plan.uniform(shape), context=1).flops == 2 * (projections + mlp + head) + 2 * 16


def test_mlps_of_other_widths_cost_what_their_neurons_cost():
    """Gated and plain, with biases and without: the slope times the neurons, in every resource."""
    for gated in (True, False):
        shape = GPT2_SMALL.model_copy(update={"ffn_gated": gated})
        dense = Plan.uniform(shape)
        widths = [7 + 5 * i for i in range(shape.n_layers)]
        layers = [
            x.model_copy(update={"ffn_dim": w}) for x, w in zip(dense.layers, widths, strict=True)
        ]
        cut = Plan(shape=shape, layers=tuple(layers))
        missing = sum(shape.ffn_dim - w for w in widths)
        for resource, slope in neuron_cost(shape).items():
            saved = cost(dense).counted(resource) - cost(cut).counted(resource)
            assert saved == missing * slope, resource
        spent = cost(cut)
        assert spent.block_params == spent.attn_params + spent.ffn_params
        d, sides = shape.d_model, 3 if gated else 2
        assert spent.ffn_params == sum(sides * d * w + (sides - 1) * w + d for w in widths)


def test_a_sliding_window_limits_what_a_token_attends_to():
    shape = ModelShape(
        n_layers=2, d_model=7, context=13, n_heads=1, n_kv_heads=1, qk_dim=3, vo_dim=5
    )
    windowed = shape.model_copy(update={"windows": (None, 4)})
    assert dense_cost(shape).flops - dense_cost(windowed).flops == 2 * (13 - 4) * (3 + 5)


def test_traffic_by_hand():
    """Weights once for the batch; for each sequence its cache, a row of words and one of places."""
    shape = ModelShape(
        n_layers=2,
        d_model=7,
        context=13,
        n_heads=2,
        n_kv_heads=1,
        qk_dim=3,
        vo_dim=5,
        vocab_size=11,
        tied_embeddings=False,
        learned_positions=13,
        ffn_dim=17,
        ffn_gated=False,
        windows=(None, 4),
        other_params=19,
        kv_dtype_bytes=2,
        weight_dtype_bytes=4,
    )
    layer = 42 + 21 + 35 + 70 + 238 + 2 * 7  # projections, MLP, norms
    weights = 2 * layer + 7 + 7 * 11 + 19  # the last norm, the output head, the nameless
    cached = (13 + 4) * (3 + 5) * 2
    found = dense_cost(shape, batch=3)
    assert found.step_bytes == 4 * weights + 3 * (cached + 4 * 2 * 7)
    assert found.traffic == found.step_bytes / 3
    # A shorter context, and tied embeddings: the table is read as the head.
    short = dense_cost(shape.model_copy(update={"tied_embeddings": True}), context=2, batch=1)
    assert short.traffic == 4 * weights + 4 * 8 * 2 + 4 * 2 * 7
    headless = shape.model_copy(update={"lm_head": False})
    assert dense_cost(headless).traffic == dense_cost(shape).traffic - 4 * 7 * 11
    assert dense_cost(BERT_BASE).traffic == 0  # an encoder generates nothing


def test_weights_and_cache_of_smollm2_weigh_the_same_at_730_tokens_in_batches_of_16():
    weights = 2 * dense_cost(SMOLLM2_135M).params
    assert weights == pytest.approx(269e6, rel=1e-3)
    both = dense_cost(SMOLLM2_135M, context=730, batch=16).traffic
    assert both == pytest.approx(2 * weights / 16, rel=1e-3)


def test_ragged_layer_with_biases_by_hand():
    layer = LayerPlan(
        heads=(HeadSpec(qk_dim=3, vo_dim=5, queries=2), HeadSpec(qk_dim=7, vo_dim=2)),
        biases=("query", "value", "output"),
    )
    d = 11
    weights = d * ((2 * 3 + 7) + (3 + 7) + (5 + 2) + (2 * 5 + 2))
    assert layer_params(layer, d) == weights + (2 * 3 + 7) + (5 + 2) + d


def test_an_identity_query_removes_a_quarter_of_the_weights():
    head = HeadSpec(qk_dim=5, vo_dim=5)
    learned = layer_params(LayerPlan(heads=(head,) * 3), 15)
    free = layer_params(LayerPlan(heads=(head,) * 3, query="identity"), 15)
    assert free * 4 == learned * 3


@pytest.mark.parametrize("side", ["qk", "vo"])
@pytest.mark.parametrize("biases", [(), ("query", "key", "value", "output")])
@pytest.mark.parametrize("identity", [None, "query", "key", "value"])
def test_unit_cost_is_the_slope_of_cost(side, biases, identity):
    shape = ModelShape(
        n_layers=2,
        d_model=13,
        context=11,
        n_heads=6,
        n_kv_heads=2,
        qk_dim=5,
        vo_dim=7,
        vocab_size=3,
        windows=(None, 4),
        weight_dtype_bytes=4,
    )
    head = HeadSpec(qk_dim=5, vo_dim=7, queries=3)
    layer = LayerPlan(heads=(head, head), biases=tuple(b for b in biases if b != identity))
    if identity:  # past the check that identities are d_model wide: only counting matters here
        layer = layer.model_copy(update={identity: "identity"})
    plan = Plan.uniform(shape).model_copy(update={"layers": (layer, layer)})
    before = cost(plan, batch=3)
    for i in range(2):
        wider = head.model_copy(update={f"{side}_dim": getattr(head, f"{side}_dim") + 1})
        layers = list(plan.layers)
        layers[i] = layer.model_copy(update={"heads": (wider, head)})
        after = cost(plan.model_copy(update={"layers": tuple(layers)}), batch=3)
        slope = unit_cost(plan, i, head, side, 11, batch=3)
        assert {r: after.counted(r) - before.counted(r) for r in slope} == slope


def test_outside_parameters_do_not_depend_on_heads():
    a = new_shape(n_layers=3, d_model=30, n_heads=2, context=8)
    b = new_shape(n_layers=3, d_model=30, n_heads=5, context=8)
    assert outside_params(a) == outside_params(b)
