"""Layers that lost some or all of their head groups: the same function as zeroed outputs."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from headwise.measure.size import cache_bytes
from headwise.models.build import build_model, convert, load_around, load_projections, plan_of
from headwise.models.slicing import projections_of
from headwise.plan import LayerPlan, Plan
from headwise.planning.cost import cost
from tests import lanes, tiny
from tests.tolerances import REORDERED

DECODERS = ["llama", "llama_biased", "qwen2", "qwen3", "gemma3_text", "gpt2", "gpt_neox", "mistral"]


def without(plan: Plan, gone: dict[int, set[int]]) -> Plan:
    """The plan without some head groups of some layers."""
    layers = []
    for i, layer in enumerate(plan.layers):
        kept = [
            head.model_copy(update={"source": j})
            for j, head in enumerate(layer.heads)
            if j not in gone.get(i, ())
        ]
        layers.append(layer.model_copy(update={"heads": tuple(kept)}))
    return Plan(shape=plan.shape, layers=tuple(layers))


def pair(name: str):
    """A model without heads in layer 0 and one group in layer 1, and the dense one with zeros."""
    dense = convert(tiny.stock(name)).eval()
    plan = plan_of(dense)
    groups = len(plan.layers[0].heads)
    gone = {0: set(range(groups)), 1: {0}}
    small = build_model(without(plan, gone), config=dense.config.backbone, dtype=dense.dtype).eval()
    load_around(small, dense)
    for i, (target, source) in enumerate(zip(small.attentions(), dense.attentions(), strict=True)):
        layer, whole = plan.layers[i], projections_of(source)
        dropped = gone.get(i, set())
        rows = {side: [] for side in ("query", "key", "value", "output")}
        ends = dict.fromkeys(rows, 0)
        for j, head in enumerate(layer.heads):
            widths = {
                "query": head.queries * head.qk_dim,
                "key": head.qk_dim,
                "value": head.vo_dim,
                "output": head.queries * head.vo_dim,
            }
            for side, width in widths.items():
                mine = range(ends[side], ends[side] + width)
                ends[side] += width
                if j not in dropped:
                    rows[side] += mine
                elif side == "output":
                    with torch.no_grad():
                        source.o_proj.weight[:, list(mine)] = 0
        kept = {}
        for side, index in rows.items():
            p = whole[side]
            if side == "output":
                kept[side] = type(p)(p.weight[:, index], p.bias)
            else:
                kept[side] = p.map(lambda t, index=index: t[index])
        load_projections(target, type(whole)(kept))
    return small, dense


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_gone_is_as_good_as_zero(name):
    small, dense = pair(name)
    ids = tiny.inputs(name)["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(small(ids).logits, dense(ids).logits, **REORDERED)
    assert sum(p.numel() for p in small.parameters()) == cost(plan_of(small)).params
    assert cost(plan_of(small)).attn_params < cost(plan_of(dense)).attn_params


@pytest.mark.slow
@pytest.mark.parametrize("name", lanes.slow_but(tiny.QUICK, DECODERS))
@pytest.mark.parametrize("growing", [True, False])
def test_caches_count_tokens_where_nothing_is_kept(name, growing):
    """Layer 0 tells the model how many tokens there were, though it caches no numbers."""
    small, _ = pair(name)
    ids = tiny.inputs(name)["input_ids"][:, :9]
    config = small.config.get_text_config()
    cache = DynamicCache(config=config) if growing else StaticCache(config, max_cache_len=16)
    with torch.no_grad():
        whole = small(ids, use_cache=False).logits
        parts = [small(ids[:, :4], past_key_values=cache).logits]
        assert int(cache.get_seq_length()) == 4
        parts += [small(ids[:, k : k + 1], past_key_values=cache).logits for k in range(4, 9)]
    assert int(cache.get_seq_length()) == 9
    torch.testing.assert_close(torch.cat(parts, 1), whole, **REORDERED)


@pytest.mark.parametrize("name", lanes.slow_but(("gpt2",), ("llama", "gpt2", "gemma3_text")))
def test_generation_beams_and_files(name, tmp_path):
    small, dense = pair(name)
    ids = tiny.inputs(name)["input_ids"][:1, :5]
    for options in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options}
        assert torch.equal(small.generate(ids, **how), dense.generate(ids, **how)), options
    small.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert plan_of(again) == plan_of(small)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, small(ids).logits)
    number = 4
    shape = plan_of(small).shape.model_copy(update={"kv_dtype_bytes": number})
    in_fp32 = plan_of(small).model_copy(update={"shape": shape})
    assert cache_bytes(small) == cost(in_fp32).kv_bytes


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_training_reaches_every_weight_that_is_left(name, implementation):
    small, _ = pair(name)
    small.set_attn_implementation(implementation)
    small.train()
    out = small(**tiny.inputs(name), labels=tiny.inputs(name)["input_ids"])
    out.loss.backward()
    assert all(p.grad is not None for p in small.parameters())
    if implementation == "eager":
        seen = small(**tiny.inputs(name), output_attentions=True).attentions
        assert seen[0].shape[1] == 0
        assert seen[1].shape[1] > 0


def test_a_new_model_without_any_attention_is_built_and_counted():
    plan = plan_of(convert(tiny.stock("gpt2")))
    layers = (LayerPlan(heads=(), biases=("output",)),) * plan.shape.n_layers
    empty = Plan(shape=plan.shape, layers=layers)
    assert cost(empty).kv_bytes == 0
    model = build_model(empty, seed=1)
    assert sum(p.numel() for p in model.parameters()) == cost(empty).params
    assert all(not a.o_proj.bias.any() for a in model.attentions())
