"""Which engines run a plan: yes, or the sentence why not."""

from __future__ import annotations

from typing import get_args

import pytest

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.exporting.run import EXPORTS
from headwise.plan import HeadSpec, LayerPlan, ModelShape, Plan
from headwise.planning.targets import TARGETS, runs_in, target_of
from headwise.recipe import Engine, Target


def plan(*layers: list[HeadSpec], **shape) -> Plan:
    usual = {"n_heads": 6, "n_kv_heads": 2, "qk_dim": 64, "vo_dim": 64, "context": 512}
    made = ModelShape(n_layers=len(layers), d_model=96, **usual | shape)
    biases = made.attention_biases
    return Plan(shape=made, layers=tuple(LayerPlan(heads=tuple(x), biases=biases) for x in layers))


def head(qk: int = 64, vo: int = 64, queries: int = 3, planes=None) -> HeadSpec:
    return HeadSpec(qk_dim=qk, vo_dim=vo, queries=queries, rotary_planes=planes)


def answers(given: Plan) -> dict[str, str]:
    return {a.target: ("yes: " if a.yes else "no: ") + (a.how or a.why_not) for a in runs_in(given)}


def test_every_target_answers_for_every_plan():
    found = answers(plan([head()] * 2, [head()] * 2))
    assert list(found) == list(TARGETS) == list(get_args(Engine))
    assert set(EXPORTS) == set(get_args(Target)) <= set(TARGETS)
    assert all(answer.startswith("yes") for answer in found.values())


def test_one_width_and_one_set_of_planes_run_everywhere():
    kept = tuple(range(0, 48, 2))
    found = answers(plan([head(48, 48, planes=kept)] * 2, [head(48, 48, planes=kept)] * 2))
    assert found["stock"] == "yes: as llama, heads 48 wide"
    assert found["gguf"] == "yes: as llama, heads 48 wide"
    other = answers(plan([head(4, 48, planes=(0, 1))] * 2, [head(4, 48, planes=(0, 2))] * 2))
    assert "layers 0 and 1 keep different rotary planes" in other["stock"]


def test_the_reason_names_the_layers():
    found = answers(plan([head(48)] * 2, [head(40)] * 2))
    assert found["stock"] == (
        "no: layer 0 has keys of 48 and layer 1 of 40; one width for the model is needed"
    )
    assert found["gguf"] == found["stock"]
    assert found["onnx"].startswith("yes")
    assert found["padded"].startswith("yes")


def test_values_may_be_narrower_where_a_class_allows_it():
    narrow = answers(plan([head(64, 48)] * 2, [head(64, 48)] * 2))
    assert narrow["stock"] == "yes: as mimo_v2_flash, keys 64 and values 48 wide"
    biased = answers(plan([head(64, 48)] * 2, attention_biases=("query", "output")))
    assert "fewer biases" in biased["stock"]


def test_head_groups_may_differ_by_layer_in_llama_cpp_only():
    found = answers(plan([head()] * 2, [head()]))
    assert found["gguf"] == "yes: as deci, heads 64 wide"
    assert found["stock"] == "no: layer 0 has 2 head groups and layer 1 1; one number is needed"


def test_widths_by_layer_run_in_vllm():
    found = answers(plan([head(48)] * 2, [head(40, 32)] * 2))
    assert found["vllm"] == (
        "yes: in headwise's class, keys and values of a layer as wide as its widest: 40, 64"
    )
    assert answers(plan([head()] * 2))["vllm"] == "yes: as llama, heads 64 wide"
    empty = answers(plan([head(48)] * 2, []))
    assert empty["vllm"] == "no: layer 1 has no head, and it caches keys in every layer"
    mixed = answers(plan([head(48), head(40, queries=2)]))
    assert mixed["vllm"] == "no: layer 0 has groups of 2 and 3 queries"
    normed = answers(plan([head(64, 48)] * 2, family="qwen3"))
    assert normed["vllm"].startswith("yes: in headwise's class")
    assert "normalises keys" in answers(plan([head(48)] * 2, family="qwen3"))["vllm"]


def test_narrow_keys_with_other_values_run_in_llama_cpp():
    kept = tuple(range(0, 48, 2))
    found = answers(plan([head(48, 32, planes=kept)] * 2, [head(48, 32, planes=kept)] * 2))
    assert found["gguf"] == "yes: as step35, keys 48 and values 32 wide"
    biased = plan([head(64, 48)] * 2, attention_biases=("query", "key", "value"))
    assert "have no biases" in answers(biased)["gguf"]


def test_families_are_refused_by_name():
    cut = plan([head(64, 48)] * 2, family="qwen3")
    assert (
        "qwen3, which normalises queries and keys, has no free head width" in answers(cut)["stock"]
    )
    assert answers(plan([head()] * 2, family="qwen3"))["stock"].startswith("yes")
    assert "bert is an encoder" in answers(plan([head()] * 2, family="bert", causal=False))["gguf"]
    windows = plan([head(48, 48)] * 2, family="mistral", windows=(64,))
    assert answers(windows)["stock"] == "yes: as mistral, heads 48 wide"
    assert "windows of 64 tokens" in answers(windows)["gguf"]


def test_wider_than_the_dense_model_cannot_be_padded():
    found = answers(plan([head(64, 80)] * 2))
    assert found["padded"].startswith("no: layer 0 has heads 64/80 wide")
    assert answers(plan([head()] * 3))["padded"].startswith("no: layer 0 has 3 head groups")


def test_kernels_take_some_widths_only():
    kept = tuple(range(0, 48, 2))
    narrow = answers(plan([head(48, 48, planes=kept)] * 2, [head(48, 48, planes=kept)] * 2))
    assert narrow["gguf"].startswith("yes")
    assert narrow["gguf-cuda"] == (
        "no: heads are 48 wide, and there are kernels for 40, 64, 72, 80, 96, 112, 128, 256"
    )
    assert narrow["vllm"].startswith("yes")
    assert narrow["vllm-cpu"].startswith("no: heads are 48 wide, and there are kernels for 32, 64")
    kept = kept[:16]
    half = answers(plan([head(32, 32, planes=kept)] * 2, [head(32, 32, planes=kept)] * 2))
    assert half["vllm-cpu"] == "yes: as llama, heads 32 wide"
    assert half["gguf-cuda"].startswith("no: heads are 32 wide")
    values = answers(plan([head(64, 32)] * 2, [head(64, 32)] * 2))
    assert "keys are 64 and values 32 wide; that kernel takes" in values["gguf-cuda"]
    # In headwise's own class a layer's heads are as wide as its widest.
    by_layer = answers(plan([head(48)] * 2, [head(32, 32)] * 2))
    assert by_layer["vllm-cpu"].endswith("as wide as its widest: 32, 64")
    other = answers(plan([head()] * 2, [head(48, 48)] * 2))
    assert other["vllm-cpu"].startswith("no: layer 1 has heads 48 wide, and there are kernels")


def test_an_unknown_target_is_told():
    with pytest.raises(HeadwiseError, match="a target is one of stock"):
        target_of("tensorrt")


def test_it_is_part_of_the_public_surface():
    assert hw.runs_in(plan([head()] * 2))[0].yes


def test_mlps_of_several_widths_run_where_a_class_has_them():
    shape = ModelShape(
        n_layers=2, d_model=24, context=67, n_heads=2, n_kv_heads=2, qk_dim=12, vo_dim=12,
        vocab_size=11, ffn_dim=37,
    )  # fmt: skip
    whole = Plan.uniform(shape).layers[0]
    mixed = Plan(shape=shape, layers=(whole, whole.model_copy(update={"ffn_dim": 29})))
    found = {one.target: one for one in runs_in(mixed)}
    assert found["gguf"].how == "as deci, heads 12 wide"
    assert "MLP of 37 neurons and layer 1 of 29; one width" in found["stock"].why_not
    assert "in headwise's class" in found["vllm"].how
    assert found["onnx"].yes
    assert found["padded"].yes
    one = Plan(shape=shape, layers=(whole.model_copy(update={"ffn_dim": 29}),) * 2)
    assert all(answer.yes for answer in runs_in(one) if answer.target in EXPORTS)
    plain = one.model_copy(update={"shape": shape.model_copy(update={"family": "gpt2"})})
    assert "the MLP of layer 0 is cut" in runs_in(plain)[0].why_not
