"""ONNX graphs in ONNX Runtime: equal logits at once and from the cache, each layer's own widths."""

from __future__ import annotations

import json

import numpy as np
import pytest

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.exporting.onnx_graph import Session
from headwise.models.build import convert
from tests import tiny
from tests.exporting.portable import saved

pytestmark = pytest.mark.slow  # tracing a model takes seconds


@pytest.mark.parametrize("name", ["llama", "gpt2"])
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


def test_what_onnx_has_not_is_refused(tmp_path):
    encoder = saved(tiny.narrowed(convert(tiny.stock("bert", "bare"))), tmp_path / "bert")
    with pytest.raises(HeadwiseError, match="bert is an encoder"):
        hw.export(encoder, to="onnx", out=tmp_path / "out")
    model = saved(convert(tiny.stock("llama")), tmp_path / "llama")
    with pytest.raises(HeadwiseError, match="written in fp32"):
        hw.export(model, to="onnx", dtype="bf16", out=tmp_path / "out")
