"""GGUF files in real llama.cpp: the likeliest tokens and their log-probabilities are ours."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from headwise.data.text import read_source
from headwise.errors import HeadwiseError
from headwise.exporting import llama_cpp
from headwise.exporting.gguf_tokenizer import BYTE, vocabulary
from headwise.exporting.layout import HeadShape
from headwise.models.build import build_model, plan_of
from headwise.source import open_source
from tests import tiny
from tests.exporting.portable import FULL, WORDS, portable, with_tokenizer

SIZES = {"vocab_size": WORDS, "max_position_embeddings": 128}
NO_WINDOW = {**SIZES, "sliding_window": None}
# Name, planes that stay, value width, changes of the config, llama.cpp's class.
CASES = {
    "llama": ("llama", (0, 2, 3), 6, SIZES, "llama"),
    "from the second plane on": ("llama_tied", (1, 2, 3), 6, SIZES, "llama"),
    "biases": ("llama_biased", (0, 1, 4), 6, SIZES, "llama"),
    "values only": ("llama_tied", None, 6, SIZES, "mimo2"),
    "keys wider than values": ("llama_tied", (0, 2, 3), 4, SIZES, "step35"),
    "narrow keys of a progression": ("llama", (1, 2, 3), 4, SIZES, "step35"),
    "mistral": ("mistral", (0, 2, 3), 6, NO_WINDOW, "llama"),
    "qwen2": ("qwen2", (0, 2, 3), 6, {**SIZES, **FULL}, "llama"),
    "phi3": ("phi3", (0, 2, 3), 6, NO_WINDOW, "llama"),
    "gpt2": ("gpt2", None, 11, {"vocab_size": WORDS, "n_positions": 128}, "gpt2"),
}
pytestmark = pytest.mark.slow  # an engine with threads of its own


@pytest.fixture(autouse=True)
def few_positions(monkeypatch):
    """Enough to see a wrong tensor; the real model is compared at all of them."""
    monkeypatch.setattr(llama_cpp, "POSITIONS", 24)


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_says_the_same(case, tokenizer, tmp_path):
    name, planes, vo_dim, changes, expected = CASES[case]
    model = with_tokenizer(portable(name, planes, vo_dim, **changes), tokenizer, tmp_path / "cut")
    made = hw.export(model, to="gguf", out=tmp_path / "out.gguf")
    assert made.record.architecture == expected
    assert made.parity.held
    assert made.parity.top_agreement == 1
    assert made.parity.error < (5e-3 if name == "gpt2" else 1e-3)  # GELU is a table there
    assert made.parity.positions >= 10


@pytest.mark.parametrize("case", ["llama", "values only", "keys wider than values"])
def test_the_cache_weighs_what_the_plan_says(case, tokenizer, tmp_path):
    name, planes, vo_dim, changes, _ = CASES[case]
    model = portable(name, planes, vo_dim, **changes)
    folder, file = with_tokenizer(model, tokenizer, tmp_path / "cut"), tmp_path / "out.gguf"
    hw.export(folder, to="gguf", out=file, check=False)
    server = llama_cpp.open_server(file, 128, states=tmp_path)

    def weight(length):
        llama_cpp.likeliest(server, [7 + i for i in range(length)])
        return llama_cpp.saved_bytes(server)

    heads = [head for layer in plan_of(model).layers for head in layer.heads]
    planned = 4 * sum(head.qk_dim + head.vo_dim for head in heads)  # in float32
    found = (weight(100) - weight(36)) / 64
    assert planned <= found <= planned + 40  # and which token it is, and where


def test_a_kill_after_the_file_has_its_name_leaves_nothing(tokenizer, tmp_path):
    folder = with_tokenizer(portable("llama", (0, 2, 3), 6, **SIZES), tokenizer, tmp_path / "cut")
    out, parts = tmp_path / "out.gguf", tmp_path / "out.gguf.partial"
    made = hw.export(folder, to="gguf", out=out)
    (parts / "parts").mkdir(parents=True)
    again = hw.export(folder, to="gguf", out=out)
    assert again.record == made.record
    assert not parts.exists()
    # The control: of other inputs, the file is in the way.
    (parts / "parts").mkdir(parents=True)
    with pytest.raises(HeadwiseError, match="exists already"):
        hw.export(folder, to="gguf", dtype="fp16", out=out)


@pytest.mark.parametrize(("vo_dim", "expected"), [(8, "deci"), (6, "step35")])
def test_head_groups_may_differ_by_layer(vo_dim, expected, tokenizer, tmp_path):
    head = hw.HeadSpec(qk_dim=8, vo_dim=vo_dim, queries=2, rotary_planes=(0, 1, 3, 4))
    shape = hw.ModelShape(
        n_layers=2, d_model=24, context=128, n_heads=4, n_kv_heads=2, qk_dim=10, vo_dim=10,
        vocab_size=WORDS, ffn_dim=37,
    )  # fmt: skip
    # MLPs may differ too where keys are as wide as values.
    narrow = hw.LayerPlan(heads=(head,), ffn_dim=29 if vo_dim == 8 else 37)
    layers = (hw.LayerPlan(heads=(head, head)), narrow)
    model = tiny.randomise(build_model(hw.Plan(shape=shape, layers=layers), seed=1))
    folder = with_tokenizer(model, tokenizer, tmp_path / "cut")
    made = hw.export(folder, to="gguf", out=tmp_path / "out.gguf")
    assert made.record.architecture == expected
    assert made.parity.error < 1e-3


def test_a_wrong_weight_misses_parity(tokenizer, tmp_path, monkeypatch):
    """The negative control."""
    wrong = property(lambda self: 1.3 * self.qk_dim**-0.5)
    monkeypatch.setattr(HeadShape, "score_scale", wrong)
    cut = portable("llama", (0, 2, 3), 6, **SIZES)
    folder = with_tokenizer(cut, tokenizer, tmp_path / "cut")
    assert not hw.export(folder, to="gguf", out=tmp_path / "out.gguf").held


@pytest.mark.parametrize("kind", ["fp16", "bf16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_narrower_formats_run(kind, tokenizer, tmp_path):
    sizes = {**SIZES, "hidden_size": 96, "intermediate_size": 96, "scale": 0.05}
    cut = portable("llama", (0, 2, 3), 6, **sizes)
    folder = with_tokenizer(cut, tokenizer, tmp_path / "cut")
    how = {"quantize": kind} if kind.startswith("Q") else {"dtype": kind}
    whole = hw.export(folder, to="gguf", out=tmp_path / "whole.gguf", check=False)
    made = hw.export(folder, to="gguf", out=tmp_path / "out.gguf", **how)
    assert made.held
    assert (tmp_path / "out.gguf").stat().st_size < whole.out.stat().st_size
    if kind == "Q8_0":  # 36 columns of the output projection are not whole blocks of 32
        note = made.record.notes[0]
        assert "attn_output.weight" in note
        assert "stay in 16 bits" in note


def test_a_stock_model_comes_back_from_its_gguf_file(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    stock = tiny.stock("llama", **SIZES)
    folder = with_tokenizer(stock, tokenizer, tmp_path / "dense")
    hw.export(folder, to="gguf", out=tmp_path / "dense.gguf", check=False)
    source = open_source(tmp_path / "dense.gguf")
    again = source.load()
    ids = tiny.inputs("llama")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, stock(input_ids=ids).logits)
    text = "def main(): return 42"
    assert source.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert source.tokenizer.chat_template == tokenizer.chat_template
    chat = [{"role": "user", "content": "def main"}]
    assert llama_cpp.templated(llama_cpp.open_server(tmp_path / "dense.gguf", 32), chat) == (
        tokenizer.apply_chat_template(chat, tokenize=False)
    )


def byte_fallback_tokenizer(texts: list[str]):
    """A small tokenizer of SentencePiece's kind."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    pieces = [line for text in texts for line in text.splitlines()][:400]
    made.train_from_iterator(pieces, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_a_tokenizer_with_byte_fallback_is_written_with_scores(tmp_path):
    text = "\n".join(read_source("builtin:python", max_chars=20_000).documents)
    words = byte_fallback_tokenizer([text])
    found = vocabulary(words, len(words))
    assert found.model == "llama"
    assert found.types[3] == BYTE
    assert found.add_space_prefix
    model = portable("llama", (0, 2, 3), 6, **{**SIZES, "vocab_size": len(words)})
    folder = with_tokenizer(model, words, tmp_path / "cut")
    assert hw.export(folder, to="gguf", out=tmp_path / "out.gguf").held


def test_what_llama_cpp_has_not_is_refused(tokenizer, tmp_path):
    windowed = with_tokenizer(portable("mistral", (0, 2, 3), 6), tokenizer, tmp_path / "windowed")
    with pytest.raises(HeadwiseError, match="windows of 5 tokens"):
        hw.export(windowed, to="gguf", out=tmp_path / "out.gguf")
    cut = with_tokenizer(portable("gpt2", None, 8), tokenizer, tmp_path / "gpt2")
    with pytest.raises(HeadwiseError, match=r"gpt2 has no free head width.*padded first"):
        hw.export(cut, to="gguf", out=tmp_path / "out.gguf")
    biased = with_tokenizer(portable("qwen2", None, 6, **FULL), tokenizer, tmp_path / "biased")
    with pytest.raises(HeadwiseError, match="the classes that allow it have no biases"):
        hw.export(biased, to="gguf", out=tmp_path / "out.gguf")
    plain = with_tokenizer(portable("llama", (0, 2, 3), 6, **SIZES), tokenizer, tmp_path / "cut")
    with pytest.raises(HeadwiseError, match="--quantize must be one of Q8_0"):
        hw.export(plain, to="gguf", quantize="Q6_K", out=tmp_path / "out.gguf")
    with pytest.raises(HeadwiseError, match="--quantize is for --to gguf"):
        hw.export(plain, to="stock", quantize="Q8_0", out=tmp_path / "out")
    assert not (tmp_path / "out.gguf").exists()


def test_an_unknown_tokenizer_is_refused(tokenizer):
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(HeadwiseError, match="no rule for this tokenizer"):
        vocabulary(other, WORDS)


@pytest.mark.parametrize("kind", ["fp16", "Q8_0", "Q4_0"])
def test_numbers_that_become_infinite_are_refused(kind, tokenizer, tmp_path):
    cut = portable("llama", (0, 2, 3), 6, **SIZES)
    with torch.no_grad():
        cut.backbone.model.layers[1].mlp.up_proj.weight[3, 5] = 1e5
    folder, out = with_tokenizer(cut, tokenizer, tmp_path / "cut"), tmp_path / "out.gguf"
    how = {"quantize": kind} if kind.startswith("Q") else {"dtype": kind}
    with pytest.raises(HeadwiseError, match=r"ffn_up.weight has numbers beyond the range of"):
        hw.export(folder, to="gguf", out=out, check=False, **how)
    assert not out.exists()
    other = tmp_path / "bf16.gguf"
    assert hw.export(folder, to="gguf", out=other, check=False, dtype="bf16").out.exists()
