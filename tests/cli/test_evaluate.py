import json
import math

import pytest
import torch
import typer
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from headwise.cli.evaluate import evaluate
from headwise.data.text import read_source
from headwise.errors import HeadwiseError
from tests import tiny

app = typer.Typer()
app.command()(evaluate)

TEXT = "The quick brown fox jumps over the lazy dog. " * 13


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random stock Llama whose logits are all equal, so each token costs ln V."""
    folder = tiny.write_llama(
        tmp_path_factory.mktemp("evaluate"),
        text=TEXT,
        vocab_size=269,
        max_position_embeddings=37,
        change=lambda llama: torch.nn.init.zeros_(llama.lm_head.weight),
    )
    return folder / "model"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text(TEXT)
    return path


def _result(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments), "--device", "cpu"])
    assert result.exit_code == 0, result.exception
    return result.stdout


def _message(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert isinstance(result.exception, HeadwiseError), result.exception
    return str(result.exception)


def test_equal_logits_cost_the_logarithm_of_the_vocabulary(model, text):
    document = json.loads(_result(model, "--text", text, "--json"))
    found = document["texts"][0]["score"]
    assert found["nll"] == pytest.approx(math.log(269), rel=1e-6)
    assert found["perplexity"] == pytest.approx(269, rel=1e-5)
    assert (found["window"], found["stride"]) == (37, 18)
    assert found["bytes"] == len(TEXT)
    bits = found["tokens"] * math.log2(269) / len(TEXT)
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert document["texts"][0]["sha256"] == read_source(str(text)).sha256
    assert document["dtype"] == "float32"


def test_each_text_has_a_score_of_its_own(model, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("Some other words.")
    lines = _result(model, "--text", text, "--text", other).replace("\n", "")  # may be wrapped
    assert lines.index(str(text)) < lines.index(str(other))
    both = json.loads(_result(model, "--text", text, "--text", other, "--json"))["texts"]
    alone = json.loads(_result(model, "--text", other, "--json"))["texts"]
    assert [one["source"] for one in both] == [str(text), str(other)]
    assert both[1] == alone[0]
    assert both[0]["score"]["tokens"] != both[1]["score"]["tokens"]


def test_all_tokens_of_the_text_are_scored_or_the_first_ones(model, text):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(TEXT)["input_ids"]

    def score(*words):
        return json.loads(_result(model, "--text", text, "--json", *words))["texts"][0]["score"]

    whole = score("--window", "8")
    assert whole["tokens"] == len(ids) + 1  # and the end of text
    assert (whole["window"], whole["stride"]) == (8, 4)
    part = score("--tokens", "11")
    assert part["tokens"] == 11
    assert part["bytes"] == len(tokenizer.decode(ids[:11]))


def test_people_read_four_lines(model, text):
    lines = _result(model, "--text", text).splitlines()
    assert lines[0] == f"nll         {math.log(269):.4f} nats per token"
    assert lines[1].startswith("perplexity  269.00")
    assert lines[3].endswith("window 37, stride 18")


def test_bad_input_is_one_sentence(model, text, tmp_path):
    assert "at most the model's context of 37" in _message(model, "--text", text, "--window", "38")
    message = _message(model, "--text", text, "--window", "8", "--stride", "9")
    assert "stride from 1 to window" in message
    assert "does not exist" in _message(tmp_path / "none", "--text", text)
    assert "does not exist" in _message(model, "--text", tmp_path / "none.txt")
    assert "--dtype must be 'auto', 'fp32' or 'bf16', got 'fp8'" in _message(
        model, "--text", text, "--dtype", "fp8"
    )
    assert "device must be" in _message(model, "--text", text, "--device", "abacus")
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in _message(tmp_path / "empty", "--text", text)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "empty" / name).write_bytes((model / name).read_bytes())
    assert "holds no tokenizer" in _message(tmp_path / "empty", "--text", text)
    assert "nll" in _result(tmp_path / "empty", "--text", text, "--tokenizer", model)


def test_broken_weights_are_said_in_one_sentence(headwise, model, text, tmp_path):
    broken = tmp_path / "broken"
    llama = LlamaForCausalLM.from_pretrained(model)
    torch.nn.init.constant_(llama.model.embed_tokens.weight, math.nan)
    llama.save_pretrained(broken)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((model / name).read_bytes())
    for command in (
        ("eval", broken, "--text", text, "--json"),
        ("generate", broken, "--prompt", "a"),
    ):
        result = headwise(*command, *(("--max-new-tokens", "3") if "--prompt" in command else ()))
        assert result.code == 2
        assert result.out == ""
        assert "weights of model.embed_tokens.weight" in result.err
        assert "must be finite, got NaN" in result.err
