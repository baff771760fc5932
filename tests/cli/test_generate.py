import json

import pytest
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from headwise.cli.generate import generate
from headwise.data.tokens import trained_tokenizer
from headwise.errors import HeadwiseError

app = typer.Typer()
app.command()(generate)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "llama"
    tokenizer = trained_tokenizer(["abc abc abd"], 260)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=6,
        intermediate_size=7,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=37,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments), "--device", "cpu"])


def _result(*arguments):
    result = _invoke(*arguments, "--json")
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def test_the_same_seed_writes_the_same_and_another_something_else(model):
    draw = (model, "--prompt", "abc", "--max-new-tokens", "7", "--temperature", "2")
    first = _result(*draw, "--seed", "3")
    assert first["tokens"] <= 7
    assert _result(*draw, "--seed", "3") == first
    others = {_result(*draw, "--seed", s)["continuation"] for s in (4, 5, 6)}
    assert others != {first["continuation"]}


def test_temperature_zero_does_not_draw(model):
    greedy = (model, "--prompt", "abc", "--max-new-tokens", "5", "--temperature", "0")
    texts = {_result(*greedy, "--seed", s)["continuation"] for s in (1, 2, 3)}
    assert len(texts) == 1


def test_people_get_prompt_and_continuation(model):
    result = _invoke(model, "--prompt", "abc", "--max-new-tokens", "3")
    assert result.exit_code == 0
    assert result.stdout.startswith("abc")


def test_what_does_not_fit_the_context_is_refused(model):
    result = _invoke(model, "--prompt", "abc", "--max-new-tokens", "40")
    assert isinstance(result.exception, HeadwiseError)
    assert "context of 37" in str(result.exception)
