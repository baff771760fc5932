"""Every family and every target: an export that works in the engine, or a sentence that names it.

Llama-like families are cut to one width, which all targets take; the others head by head.
"""

from __future__ import annotations

import pytest

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.exporting import llama_cpp
from headwise.exporting.run import EXPORTS
from headwise.models import backbones_headwise as backbones
from headwise.models.build import convert
from headwise.planning.targets import LLAMA_LIKE, runs_in
from tests import tiny
from tests.exporting.portable import FULL, WORDS, portable, with_tokenizer

pytestmark = pytest.mark.slow  # engines, and traced graphs
FAMILIES = [name for name in tiny.CONFIGS if not name.startswith("llama_")]
WHOLE = {"mistral": {"sliding_window": None}, "qwen2": FULL}
NORMED = ("qwen3", "gemma3_text", "olmo2")


def taken(name: str) -> set[str]:
    """The targets that take a cut model of this family."""
    if name in LLAMA_LIKE:
        return set(EXPORTS)
    if name in tiny.ENCODERS:
        return {"padded"}
    return {"onnx"} if name in NORMED else {"vllm", "onnx", "padded"}


def cut_model(name: str):
    if name in LLAMA_LIKE:
        return portable(name, (0, 2, 3), 6, vocab_size=WORDS, **WHOLE.get(name, {}))
    task = "bare" if tiny.task_of(name) == "masked-lm" else None
    words = {} if name == "vit" else {"vocab_size": WORDS}
    return tiny.narrowed(convert(tiny.stock(name, task, **words)))


def test_the_matrix_has_every_family():
    assert {tiny.config(name).model_type for name in FAMILIES} == set(backbones.FAMILIES)
    assert len(FAMILIES) == 14


@pytest.mark.parametrize("target", EXPORTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_works_or_names_the_family(name, target, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(llama_cpp, "POSITIONS", 12)
    folder = with_tokenizer(cut_model(name), tokenizer, tmp_path / "cut")
    plan = hw.open_source(folder).plan
    answer = {one.target: one for one in runs_in(plan)}[target]
    assert answer.yes == (target in taken(name))
    out = tmp_path / ("out.gguf" if target == "gguf" else "out")
    if answer.yes:
        made = hw.export(folder, to=target, out=out)
        assert made.held
        assert made.parity.top_agreement == 1
        return
    with pytest.raises(HeadwiseError) as refused:
        hw.export(folder, to=target, out=out)
    assert answer.why_not in str(refused.value)
    assert plan.shape.family in answer.why_not
    assert not out.exists()
