"""A model run layer by layer must be the model, in memory that its depth does not change."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headwise.errors import HeadwiseError, PlanError
from headwise.models.backbones_headwise import (
    layer_mlp,
    projections_of,
    stock_attentions,
    stock_projections,
)
from headwise.models.build import convert, inner, plan_of
from headwise.source import open_source
from tests import tiny


def _saved(name, path, dtype=torch.float32):
    model = tiny.stock(name).to(dtype)
    model.save_pretrained(path, max_shard_size="20KB")
    return model, open_source(path)


def _states(model, batch):
    """The input of every layer and the output of the last, from hooks on the whole model."""
    from headwise.models.backbones_headwise import stock_attentions

    found, hooks = [], []
    layers = [layer for layer, _ in stock_attentions(model)]
    for layer in layers:
        hooks.append(layer.register_forward_pre_hook(lambda m, a: found.append(a[0])))
    hooks.append(layers[-1].register_forward_hook(lambda m, a, out: found.append(out)))
    with torch.no_grad():
        output = model(**batch)
    for hook in hooks:
        hook.remove()
    return found, output


def _batches(name):
    if name == "vit":
        return [tiny.inputs(name), tiny.inputs(name)]
    return [tiny.inputs(name), tiny.inputs(name, 7), tiny.padded()]


def test_every_layer_gives_what_the_whole_model_gives(any_family, tmp_path):
    whole, source = _saved(any_family, tmp_path)
    batches = _batches(any_family)
    stream = source.layers(batches, task=tiny.task_of(any_family))
    states = [_states(whole, batch) for batch in batches]
    hidden = list(stream.first)
    for i in stream:
        layer = stream.load(i)
        for b, (expected, _) in enumerate(states):
            assert torch.equal(hidden[b], expected[i])
            hidden[b] = stream.run(layer, i, hidden[b], b)
    for b, (expected, output) in enumerate(states):
        assert torch.equal(hidden[b], expected[-1])
        torch.testing.assert_close(stream.outputs(hidden[b], b).logits, output.logits)
    assert not torch.equal(stream.first[0], hidden[0])


def test_a_layer_in_the_wrong_place_shows(tmp_path):
    whole, source = _saved("gemma3_text", tmp_path)
    stream = source.layers([tiny.inputs("gemma3_text")])
    expected, _ = _states(whole, tiny.inputs("gemma3_text"))
    layer = stream.load(0)
    assert torch.equal(stream.run(layer, 0, stream.first[0]), expected[1])
    # Layer 1 attends to all tokens with rotary positions of its own.
    assert not torch.allclose(stream.run(layer, 1, stream.first[0]), expected[1], atol=1e-3)
    assert not torch.allclose(stream.run(stream.load(2), 0, stream.first[0]), expected[1])


def test_numbers_are_as_stored_or_as_asked(tmp_path):
    whole, source = _saved("llama", tmp_path, torch.bfloat16)
    stored = source.layers([tiny.inputs("llama")])
    assert {p.dtype for p in stored.load(1).parameters()} == {torch.bfloat16}
    full = source.layers([tiny.inputs("llama")], dtype=torch.float32)
    layer = full.load(1)
    assert {p.dtype for p in layer.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in layer.parameters())
    assert torch.equal(layer.mlp.up_proj.weight, whole.model.layers[1].mlp.up_proj.weight.float())


def test_batches_of_one_length_share_their_surroundings(tmp_path):
    _, source = _saved("gemma3_text", tmp_path)
    stream = source.layers([tiny.inputs("gemma3_text")] * 3)
    masks = {id(calls[0][1]["attention_mask"]) for calls in stream._calls}
    assert len(masks) == 1


@pytest.mark.slow
def test_planned_layers_run_in_the_stream(any_family, tmp_path):
    """Cut layers in the stream equal the cut model: heads keep some columns, MLPs some neurons."""
    model = tiny.narrowed(convert(tiny.stock(any_family)))
    _, source = _saved(any_family, tmp_path)
    batch = tiny.inputs(any_family)
    stream = source.layers([batch], task=tiny.task_of(any_family))
    hidden = stream.first[0]
    layers = zip(plan_of(model).layers, stock_attentions(inner(model)), strict=True)
    for i, (plan, (owner, attention)) in enumerate(layers):
        mlp = layer_mlp(owner, inner(model).config)
        own = projections_of(attention).replaced(**mlp.by_side)
        layer = stream.planned(i, plan, own)
        hidden = stream.run(layer, i, hidden)
    with torch.no_grad():
        expected = model(**batch).logits
    torch.testing.assert_close(stream.outputs(hidden).logits, expected)


def test_projections_of_a_stock_layer_are_the_whole_models(any_family, tmp_path):
    whole, source = _saved(any_family, tmp_path)
    stream = source.layers([], task=tiny.task_of(any_family))
    for i, projections in enumerate(stock_projections(whole)):
        expected, got = projections.tensors(), stream.projections(stream.load(i)).tensors()
        assert expected.keys() == got.keys()
        assert len(expected) >= 4
        assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_a_base_model_without_its_prefix_is_found(tmp_path):
    from safetensors.torch import load_file, save_file

    whole = tiny.stock("gpt2")
    whole.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): t for name, t in state.items()}
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stream = open_source(tmp_path).layers([tiny.inputs("gpt2")])
    expected, _ = _states(whole, tiny.inputs("gpt2"))
    assert torch.equal(stream.run(stream.load(0), 0, stream.first[0]), expected[1])


def test_what_cannot_be_streamed_is_one_sentence(tmp_path):
    import json

    from safetensors.torch import load_file, save_file

    tiny.stock("llama").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HeadwiseError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        open_source(tmp_path).layers([])
    del state["model.norm.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HeadwiseError, match=r"lacks .*model\.norm\.weight"):
        open_source(tmp_path).layers([])
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
        ({"model_type": "bloom"}, "backbone must be one of"),
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}},
            "without running code of that folder",
        ),
    ):
        (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises((HeadwiseError, PlanError), match=message):
            open_source(tmp_path).layers([])


MEMORY = r"""
import re, sys, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from headwise.models.checkpoint import CheckpointWriter
from headwise.source import open_source

def peak():  # of this program alone: rusage would start at the peak of the process it came from
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

def through(folder, target, keep):
    stream = open_source(folder).layers([{"input_ids": torch.arange(61)[None]}])
    hidden, kept = stream.first[0], []
    target.mkdir()
    with CheckpointWriter(target) as writer:
        for i in stream:
            layer = stream.load(i)
            hidden = stream.run(layer, i, hidden)
            for name, tensor in layer.state_dict().items():
                writer.put(f"{i}.{name}", tensor)
            if keep:
                kept.append(layer)

here = Path(sys.argv[1])
sizes = dict(hidden_size=512, intermediate_size=1536, num_attention_heads=8, vocab_size=67)
few = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).state_dict()
for n in (3, 12):
    (here / str(n)).mkdir()
    LlamaConfig(num_hidden_layers=n, **sizes).save_pretrained(here / str(n))
    with CheckpointWriter(here / str(n), max_shard_bytes=30_000_000) as writer:
        for name, tensor in few.items():
            for i in range(n if ".0." in name else 1):
                writer.put(name.replace(".0.", f".{i}."), tensor)
del few, tensor
through(here / "3", here / "first", False)
peaks = [peak()]
through(here / "12", here / "second", False)
peaks.append(peak())
through(here / "12", here / "third", True)
peaks.append(peak())
print(*peaks)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's peak memory")
def test_four_times_the_layers_need_no_more_memory(tmp_path):
    """Layers of 13 MB, read, run and written; if they were all kept it would show."""
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    three, twelve, all_kept = map(int, done.stdout.split())
    layer = 4 * 512 * (4 * 512 + 3 * 1536) / 1024  # kilobytes
    # Nine more layers must not show; the allocator's own slack is up to about one of them.
    assert twelve < three + 3 * layer
    assert all_kept > twelve + 5 * layer
