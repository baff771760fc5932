"""ONNX graphs in ONNX Runtime: equal logits at once and from the cache, each layer's own widths."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime_genai as genai
import pytest
import torch

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.exporting.onnx_graph import Session
from headwise.models.build import convert
from tests import tiny
from tests.exporting.portable import saved

pytestmark = pytest.mark.slow  # tracing a model takes seconds


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_any_plan_runs_in_onnx_runtime(name, tmp_path):
    cut = tiny.narrowed(convert(tiny.stock(name)))
    made = hw.export(saved(cut, tmp_path / "cut"), to="onnx", out=tmp_path / "out")
    assert made.held
    assert made.parity.error < 1e-4
    assert made.parity.top_agreement == 1
    plan = hw.open_source(tmp_path / "cut").plan
    assert made.parity.cached_numbers == sum(x.key_width + x.value_width for x in plan.layers)
    cached = json.loads((tmp_path / "out/onnx.json").read_text())["cache"]
    widths = {i: layer.key_width for i, layer in enumerate(plan.layers)}
    assert {i: np.prod(cached[f"{i}.key"]) for i in widths} == widths
    # A negative control: another token is another answer.
    session = Session(tmp_path / "out")
    first = session.read([5, 6, 7])[-1]
    session.reset()
    assert np.abs(session.read([5, 8, 7])[-1] - first).max() > 1e-2


def test_onnxruntime_genai_writes_the_same_text(tmp_path):
    """Widths by layer, keys as wide as values: what it has a place for."""
    cut = tiny.narrowed(convert(tiny.stock("llama")))
    alike = hw.export(saved(cut, tmp_path / "cut"), to="vllm", out=tmp_path / "alike", check=False)
    graph = hw.export(alike.out, to="onnx", out=tmp_path / "out", check=False).out
    prompt, new = [5, 6, 7, 8, 9], 12
    with torch.no_grad():
        ids = torch.tensor([prompt])
        own = cut.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None)[0].tolist()
    model = genai.Model(str(graph))
    found = {}
    for start in (prompt, [4, *prompt[1:]]):
        asked = genai.GeneratorParams(model)
        asked.set_search_options(max_length=len(prompt) + new, do_sample=False)
        writer = genai.Generator(model, asked)
        writer.append_tokens(start)
        while not writer.is_done():
            writer.generate_next_token()
        found[tuple(start)] = [int(t) for t in writer.get_sequence(0)]
    assert found[tuple(prompt)] == own
    assert found[4, *prompt[1:]][5:] != own[5:]  # the control: another prompt, another text
    plain = hw.export(tmp_path / "cut", to="onnx", out=tmp_path / "plain", check=False).out
    assert (graph / "genai_config.json").exists()
    assert not (plain / "genai_config.json").exists()  # its keys and values differ in width


def test_what_onnx_has_not_is_refused(tmp_path):
    encoder = saved(tiny.narrowed(convert(tiny.stock("bert", "bare"))), tmp_path / "bert")
    with pytest.raises(HeadwiseError, match="bert is an encoder"):
        hw.export(encoder, to="onnx", out=tmp_path / "out")
    model = saved(convert(tiny.stock("llama")), tmp_path / "llama")
    with pytest.raises(HeadwiseError, match="written in fp32"):
        hw.export(model, to="onnx", dtype="bf16", out=tmp_path / "out")
