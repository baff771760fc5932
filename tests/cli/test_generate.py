import json
import shutil

import pytest
import typer
from typer.testing import CliRunner

from headwise.cli.generate import generate
from headwise.errors import HeadwiseError
from tests import tiny

app = typer.Typer()
app.command()(generate)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny.write_llama(
        tmp_path_factory.mktemp("generate"),
        text="abc abc abd",
        vocab_size=260,
        max_position_embeddings=37,
        change=tiny.randomise,
    )
    return folder / "model"


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


def test_temperature_zero_and_nearly_zero_do_not_draw(model):
    greedy = (model, "--prompt", "abc", "--max-new-tokens", "5", "--temperature")
    runs = (("0", 1), ("0", 2), ("0", 3), ("1e-320", 1), ("1e-320", 2))
    texts = {_result(*greedy, t, "--seed", s)["continuation"] for t, s in runs}
    assert len(texts) == 1


def test_people_get_prompt_and_continuation(model):
    result = _invoke(model, "--prompt", "abc", "--max-new-tokens", "3")
    assert result.exit_code == 0
    assert result.stdout.startswith("abc")


def test_a_terminal_is_not_sent_escape_sequences(model):
    result = _invoke(model, "--prompt", "a\x1b[31mb", "--max-new-tokens", "3")
    assert result.stdout.startswith("a\\x1b[31mb")
    assert "\x1b" not in result.stdout
    found = _result(model, "--prompt", "a\x1b[31mb", "--max-new-tokens", "3")
    assert found["prompt"] == "a\x1b[31mb"


def test_what_does_not_fit_the_context_is_refused(model):
    result = _invoke(model, "--prompt", "abc", "--max-new-tokens", "40")
    assert isinstance(result.exception, HeadwiseError)
    assert "context of 37" in str(result.exception)


@pytest.mark.slow
@pytest.mark.parametrize(
    "said",
    [
        {"num_beams": 10**7},
        {"stop_strings": ["a"]},
        {"bad_words_ids": "x"},
        {"repetition_penalty": -3.0},
        {"cache_implementation": "quantized"},
        {"bos_token_id": 1e400},
        {"suppress_tokens": list(range(260))},
    ],
    ids=str,
)
def test_only_the_options_say_how_text_is_drawn(model, tmp_path, said):
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(said))
    draw = ("--prompt", "abc", "--max-new-tokens", "5")
    found, plain = _result(tmp_path / "model", *draw), _result(model, *draw)
    assert found == plain | {"model": found["model"]}
