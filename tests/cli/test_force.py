"""`--force` never destroys what headwise did not write, nor what the run reads."""

import hashlib
import os

import pytest

from headwise import pipeline
from headwise.artifacts import atomic_file
from headwise.errors import HeadwiseError, OutputError
from tests import lanes


@pytest.fixture
def place(tmp_path, monkeypatch, write_llama):
    """A working directory with a model, a text, a plan and a photo album."""
    write_llama(
        tmp_path,
        characters=6_000,
        vocab_size=260,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    (tmp_path / "album").mkdir()
    (tmp_path / "album" / "cat.png").write_text("cat")
    (tmp_path / "link").symlink_to(tmp_path / "album")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


THERE = {"model", "text.txt", "album", "link", "pipe"}
VERBS = {
    "compress": ("compress", "model", "--attn-params", "75%", "--text", "text.txt"),
    "profile": ("profile", "model", "--text", "text.txt"),
    "recover": ("recover", "model", "--against", "model", "--text", "text.txt"),
    "train": ("train", "plan.json", "--text", "text.txt", "--steps", "1"),
    "compare": ("compare", "model", "--text", "text.txt", "--methods", "svd-llm"),
    "export": ("export", "model", "--to", "padded", "--no-check"),
}
OUTS = (
    "model",
    "text.txt",
    ".",
    "..",
    "/",
    "album",
    "link",
    "pipe",
    "NEW/../model",
    "NEW/../album",
)


@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("verb", lanes.slow_but(("compress", "train"), VERBS))
def test_nothing_is_lost(headwise, place, verb, out):
    shape = ("--layers", "1", "--d-model", "16", "--heads", "2", "--context", "32")
    assert headwise("plan", "new", *shape, "-o", "plan.json").code == 0
    before = contents(place)
    result = headwise(*VERBS[verb], "-o", out, "--force")
    assert result.code == 2, result.err
    assert "Traceback" not in result.err
    assert contents(place) == before
    assert (place / "link").is_symlink()
    assert {p.name for p in place.iterdir()} == {*THERE, "plan.json"}


def test_an_output_of_headwise_is_replaced(headwise, place):
    command = (*VERBS["profile"], "--length", "16", "--tokens", "64", "-o", "made")
    assert headwise(*command).code == 0
    before = contents(place / "made")
    again = headwise(*command[:-4], "--tokens", "96", "-o", "made")
    assert again.code == 2
    assert "exists already" in again.err
    assert contents(place / "made") == before
    assert headwise(*command[:-4], "--tokens", "96", "-o", "made", "--force").code == 0
    assert contents(place / "made") != before


@pytest.mark.slow
def test_the_earlier_output_stays_until_the_new_one_is_verified(headwise, place, monkeypatch):
    sizes = ("--length", "16", "--tokens", "64", "--multiple-of", "2", "--recover", "0")
    command = (*VERBS["compress"], *sizes, "--verify-tokens", "32", "-o", "made")
    assert headwise(*command, "--no-verify").code == 0
    before = contents(place / "made")

    def fail(*given, **settings):
        assert contents(place / "made") == before
        raise HeadwiseError("no verification today.")

    forced = [{"75%": "60%"}.get(word, word) for word in (*command, "--force")]
    with monkeypatch.context() as broken:
        broken.setattr(pipeline, "verify_model", fail)
        failed = headwise(*forced)
    assert failed.code == 2
    assert "no verification today" in failed.err
    assert contents(place / "made") == before
    assert headwise(*forced).code == 0
    assert (place / "made" / "verify.json").is_file()
    assert contents(place / "made") != before
    there = {p.name for p in place.iterdir()} - THERE
    assert there == {"made", "made.profile"}


SHAPE = ("--layers", "1", "--d-model", "16", "--heads", "2", "--context", "32")
FILES = {
    "eval": ("eval", "model", "--text", "text.txt"),
    "verify": ("verify", "model", "--against", "model", "--text", "text.txt"),
    "plan new": ("plan", "new", *SHAPE, "--policy", "theory", "--vectors", "text.txt"),
    "design": ("plan", "design", *SHAPE, "--text", "text.txt"),
    "gguf": ("export", "model", "--to", "gguf", "--no-check"),
}


FOREIGN = ("text.txt", "model/config.json", "album/cat.png", "album", "pipe")


@pytest.mark.parametrize("out", [*FOREIGN, "NEW/../text.txt", "NEW/../album/cat.png"])
@pytest.mark.parametrize("verb", FILES)
def test_a_file_that_is_an_input_or_foreign_is_not_replaced(headwise, place, verb, out):
    before = contents(place)
    result = headwise(*FILES[verb], "-o", out, "--force")
    assert result.code == 2, result.err
    assert "Traceback" not in result.err
    assert contents(place) == before
    assert {p.name for p in place.iterdir()} == THERE


def test_a_page_takes_the_place_of_a_page_but_of_no_input(headwise, place):
    plan, page = place / "plan.json", place / "plan.svg"
    assert headwise("plan", "new", *SHAPE, "-o", plan).code == 0
    assert headwise("plan", "new", *SHAPE, "-o", plan, "--force").code == 0
    page.write_text("an earlier one")
    assert headwise("plan", "show", plan, "--plot", page, "--force").code == 0
    assert page.read_text() != "an earlier one"
    refused = headwise("report", "model", "-o", "model/config.json", "--force")
    assert refused.code == 2
    assert "an input of this run" in refused.err


def test_the_plan_and_the_recipe_of_a_run_are_inputs(headwise, place):
    assert headwise("plan", "new", *SHAPE, "-o", "plan.json").code == 0
    run = place / "run"
    run.mkdir()
    (run / "run.json").write_text('{"format": "headwise-run/2"}')
    for name in ("plan.json", "recipe.yaml"):
        (run / name).write_bytes((place / "plan.json").read_bytes())
    (run / "recipe.yaml").write_text("{format: headwise-recipe/1, verb: train, plan: plan.json}")
    before = contents(place)
    for words in (
        ("train", "run/plan.json", "--text", "text.txt", "-o", "run", "--force"),
        ("run", "run/recipe.yaml", "-o", "run", "--force"),
    ):
        refused = headwise(*words)
        assert refused.code == 2
        assert "an input of this run" in refused.err
    assert contents(place) == before


def test_the_first_of_two_writers_wins(place):
    """Both have seen a free place; the second one does not overwrite what the first has written."""
    with (  # noqa: PT012
        pytest.raises(OutputError, match="another run has just written"),
        atomic_file(place / "x.json", inputs=[]) as mine,
    ):
        mine.write_text("mine")
        (place / "x.json").write_text("theirs")
    assert (place / "x.json").read_text() == "theirs"
    assert not list(place.glob(".x.json*"))


@pytest.mark.parametrize("profile", ["out", "out/deep/profile"])
def test_a_profile_in_the_place_of_the_output_is_refused_before_it_is_made(
    headwise, place, profile
):
    refused = headwise(*VERBS["compress"], "--profile", profile, "-o", "out")
    assert refused.code == 2
    assert "is the output out or lies in it" in refused.err
    assert {p.name for p in place.iterdir()} == THERE
