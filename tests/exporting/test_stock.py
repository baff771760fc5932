"""Folders that transformers loads without headwise: equal logits, text and cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.exporting.layout import HeadShape
from headwise.exporting.reading import Rotary
from headwise.exporting.rotary import rotary_form
from headwise.models.build import build_model, convert
from tests import lanes, tiny
from tests.exporting.portable import FULL, portable, saved

# Name, planes that stay, value width, changes of the config, the class it becomes.
PORTABLE = {
    "llama": ("llama", (0, 2, 3), 6, {}, "llama"),
    "every second plane": ("llama", (0, 2, 4), 6, {}, "llama"),
    "from the second plane on": ("llama", (1, 2, 3), 6, {}, "llama"),
    "biases": ("llama_biased", (0, 1, 4), 6, {}, "llama"),
    "tied": ("llama_tied", (1, 2, 3), 6, {}, "llama"),
    "values only": ("llama", None, 6, {}, "mimo_v2_flash"),
    "keys wider than values": ("llama", (0, 2, 3), 4, {}, "mimo_v2_flash"),
    "windows": ("mistral", (0, 2, 3), 6, {}, "mistral"),
    "mistral": ("mistral", (0, 2, 3), 6, {"sliding_window": None}, "llama"),
    "some windows": ("qwen2", (0, 2, 3), 6, {}, "qwen2"),
    "qwen2": ("qwen2", (0, 2, 3), 6, FULL, "llama"),
    "qwen2 values only": ("qwen2", None, 6, FULL, "mimo_v2_flash"),
    "phi3": ("phi3", (0, 2, 3), 6, {}, "llama"),
    "dense": ("llama", None, 10, {}, "llama"),
}


@pytest.mark.parametrize(
    "case",
    lanes.slow_but(
        ("from the second plane on", "biases", "tied", "values only", "some windows", "phi3"),
        PORTABLE,
    ),
)
def test_a_portable_plan_is_the_same_model_in_a_stock_class(case, tmp_path):
    name, planes, vo_dim, changes, expected = PORTABLE[case]
    model = portable(name, planes, vo_dim, **changes)
    made = hw.export(saved(model, tmp_path / "cut"), to="stock", out=tmp_path / "out")
    assert made.record.architecture == expected
    assert made.parity.held
    assert made.parity.error < 1e-5
    assert made.parity.top_agreement == 1
    plan = hw.open_source(tmp_path / "cut").plan
    assert made.parity.cached_numbers == sum(x.key_width + x.value_width for x in plan.layers)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"] == expected
    assert "auto_map" not in config


WITHOUT_HEADWISE = """
import json, sys
sys.modules["headwise"] = None  # as if it were not installed
import torch
from transformers import AutoModelForCausalLM
folder, again = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder).eval()
ids = torch.tensor([json.loads(sys.stdin.read())])
with torch.no_grad():
    logits = model(input_ids=ids).logits
    text = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    model.save_pretrained(again)
    loaded = AutoModelForCausalLM.from_pretrained(again).eval()
    assert torch.equal(loaded(input_ids=ids).logits, logits)
held = sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
print(json.dumps({"logits": logits.tolist(), "text": text.tolist(), "bytes": held,
                  "class": type(model).__name__}))
"""


def without_headwise(folder: Path, again: Path, ids: torch.Tensor) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HEADWISE, str(folder), str(again)],
        input=json.dumps(ids[0].tolist()),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "values only", "qwen2"])
def test_it_runs_in_a_process_without_headwise(case, tmp_path):
    name, planes, vo_dim, changes, _ = PORTABLE[case]
    model = portable(name, planes, vo_dim, **changes)
    hw.export(saved(model, tmp_path / "cut"), to="stock", out=tmp_path / "out", check=False)
    ids = tiny.inputs(name)["input_ids"][:1]
    found = without_headwise(tmp_path / "out", tmp_path / "again", ids)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        text = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None)
        cache = model(input_ids=ids, use_cache=True).past_key_values
    difference = (torch.tensor(found["logits"]) - logits).abs().max() / logits.abs().max()
    assert difference < 1e-5
    assert found["text"] == text.tolist()
    assert found["bytes"] == sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)


def test_what_no_stock_class_has_is_refused_with_the_reason(tmp_path):
    ragged = saved(tiny.narrowed(convert(tiny.stock("llama"))), tmp_path / "ragged")
    with pytest.raises(HeadwiseError, match=r"layer 0 has keys of \d+ and layer 1 of \d+; one"):
        hw.export(ragged, to="stock", out=tmp_path / "out")
    normed = saved(tiny.narrowed(convert(tiny.stock("qwen3"))), tmp_path / "normed")
    with pytest.raises(HeadwiseError, match="qwen3, which normalises queries and keys"):
        hw.export(normed, to="stock", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_a_wrong_weight_misses_parity(tmp_path, monkeypatch):
    """The negative control: a key that is not where it should be shows in the engine."""
    monkeypatch.setattr(
        HeadShape, "score_scale", property(lambda self: 1.3 * self.qk_dim**-0.5), raising=True
    )
    model = saved(portable("llama", (0, 2, 3), 6), tmp_path / "cut")
    made = hw.export(model, to="stock", out=tmp_path / "out")
    assert not made.parity.held
    assert not made.held
    assert made.record.parity.error > 1e-3


def test_narrower_numbers_are_within_their_own_limit(tmp_path):
    model = saved(portable("llama", (0, 2, 3), 6, scale=0.05), tmp_path / "cut")
    made = hw.export(model, to="stock", dtype="bf16", out=tmp_path / "out")
    assert made.held
    assert 1e-5 < made.parity.error < made.parity.limit
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_position_free_columns_become_planes_that_never_turn(tmp_path):
    plan = hw.Plan(
        shape=hw.ModelShape(
            n_layers=2, d_model=24, context=67, n_heads=4, n_kv_heads=2, qk_dim=10, vo_dim=10,
            vocab_size=tiny.VOCAB, ffn_dim=37,
        ),
        layers=(
            hw.LayerPlan(
                heads=(hw.HeadSpec(qk_dim=10, vo_dim=10, queries=2, rotary_planes=(0, 3)),) * 2
            ),
        )
        * 2,
    )  # fmt: skip
    model = tiny.randomise(build_model(plan, seed=1))
    made = hw.export(saved(model, tmp_path / "cut"), to="stock", out=tmp_path / "out")
    assert made.parity.error < 1e-5
    factors = json.loads((tmp_path / "out/config.json").read_text())["rope_parameters"]
    assert sum(f > 1e29 for f in factors["long_factor"]) == 3


def test_planes_that_are_a_progression_are_plain_rotary_positions():
    rotary = Rotary(tuple(1e4 ** (-2 * j / 64) for j in range(32)), 1e4)

    def form(*planes: int):
        return rotary_form(rotary, HeadShape(planes, 0, 8, 1))

    assert form(*range(32)).parameters(99) == {"rope_type": "default", "rope_theta": 1e4}
    assert form(*range(0, 32, 2)).parameters(99)["rope_type"] == "default"
    assert form(*range(1, 32, 2)).parameters(99)["rope_type"] == "linear"
    assert form(0, 1, 3, 4).parameters(99)["rope_type"] == "longrope"


def test_an_export_is_never_in_the_place_of_something_else(tmp_path):
    model = saved(portable("llama", (0, 2, 3), 6), tmp_path / "cut")
    hw.export(model, to="stock", out=tmp_path / "out", check=False)
    with pytest.raises(HeadwiseError, match="exists already"):
        hw.export(model, to="stock", out=tmp_path / "out", check=False)
    hw.export(model, to="padded", out=tmp_path / "out", check=False, force=True)
    assert json.loads((tmp_path / "out/config.json").read_text())["head_dim"] == 10
    with pytest.raises(HeadwiseError, match="not replaced"):
        hw.export(model, to="stock", out=model, force=True, check=False)


def test_the_recipe_of_an_export_makes_it_again(tmp_path):
    model = saved(portable("llama", (0, 2, 3), 6), tmp_path / "cut")
    hw.export(model, to="stock", dtype="fp16", out=tmp_path / "out", check=False)
    hw.run(tmp_path / "out/recipe.yaml", out=tmp_path / "again")
    first, second = (tmp_path / x / "model.safetensors" for x in ("out", "again"))
    assert first.read_bytes() == second.read_bytes()


def test_a_killed_export_resumes_where_it_stopped(tmp_path, monkeypatch):
    from headwise.exporting.stock import StockForm

    model = saved(portable("llama", (0, 2, 3), 6), tmp_path / "cut")
    real, made = StockForm.layer, []

    def layer(self, i):
        if i == 2 and not made.count(2):
            made.append(2)
            raise KeyboardInterrupt
        made.append(i)
        return real(self, i)

    monkeypatch.setattr(StockForm, "layer", layer)
    with pytest.raises(KeyboardInterrupt):
        hw.export(model, to="stock", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert hw.export(model, to="stock", out=tmp_path / "out").held
    assert made == [0, 1, 2, 2]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.slow  # a process of its own
def test_numbers_stored_in_16_bits_are_not_rounded_again(tmp_path):
    """A score scale that would have to be folded is stated instead: every weight keeps its bits."""
    cut = portable("llama", (0, 2, 3), 6, scale=0.05).to(torch.bfloat16)
    made = hw.export(saved(cut, tmp_path / "cut"), to="stock", out=tmp_path / "out")
    assert made.record.architecture == "granite"
    assert made.parity.error < 1e-5  # not the limit of 16 bits: both hold the same numbers
    stored = load_file(tmp_path / "out/model.safetensors")
    own = cut.backbone.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(stored["model.layers.0.self_attn.q_proj.weight"], own)
    found = without_headwise(
        tmp_path / "out", tmp_path / "again", tiny.inputs("llama")["input_ids"][:1]
    )
    assert found["class"] == "GraniteForCausalLM"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", lanes.slow_but(("llama", "gpt2"), ("llama", "qwen2", "mistral", "gpt2", "gpt_neox"))
)
def test_any_widths_become_one_width_per_layer_for_vllm(name, tmp_path):
    """vLLM itself is asked by `make test-vllm`; here the padded model is the same model."""
    cut = tiny.narrowed(convert(tiny.stock(name)))
    made = hw.export(saved(cut, tmp_path / "cut"), to="vllm", out=tmp_path / "out")
    assert made.record.architecture == "headwise"
    assert made.parity.error < 1e-5
    served = hw.open_source(tmp_path / "out")
    assert all(len({(h.qk_dim, h.vo_dim) for h in x.heads}) == 1 for x in served.plan.layers)
    config = served.config
    for layer, own in zip(config.per_layer_config, served.plan.layers, strict=True):
        assert layer.head_dim == own.heads[0].qk_dim
        assert layer.num_key_value_heads == len(own.heads)
        assert layer.num_attention_heads == own.n_queries
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["auto_map"]["AutoModel"] == "modeling_headwise.HeadwiseModel"
    assert (tmp_path / "out/heads_headwise.py").exists()


@pytest.mark.slow
def test_portable_plans_are_served_by_vllms_own_classes(tmp_path):
    model = saved(portable("llama", (0, 2, 3), 6), tmp_path / "cut")
    assert hw.export(model, to="vllm", out=tmp_path / "out").record.architecture == "llama"
    padded = saved(portable("llama", None, 6), tmp_path / "values")
    made = hw.export(padded, to="vllm", out=tmp_path / "values-out")
    assert made.record.architecture == "headwise"
    ragged = tiny.narrowed(convert(tiny.stock("qwen3")))
    with pytest.raises(HeadwiseError, match="qwen3 normalises keys"):
        hw.export(saved(ragged, tmp_path / "normed"), to="vllm", out=tmp_path / "no")


@pytest.mark.parametrize("target", ["stock", "padded", "vllm"])
def test_numbers_that_become_infinite_are_refused(target, tmp_path):
    model = portable("llama", (0, 2, 3), 6)
    with torch.no_grad():
        model.backbone.model.layers[1].mlp.up_proj.weight[3, 5] = 1e5
    folder, how = saved(model, tmp_path / "cut"), {"to": target, "check": False}
    with pytest.raises(HeadwiseError, match=r"up_proj.weight has numbers beyond .* float16"):
        hw.export(folder, dtype="fp16", out=tmp_path / "fp16", **how)
    assert not (tmp_path / "fp16").exists()
    assert hw.export(folder, dtype="bf16", out=tmp_path / "bf16", **how).out.exists()
