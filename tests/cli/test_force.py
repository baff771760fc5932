"""`--force` never destroys what headwise did not write, nor what the run reads."""

import hashlib
import os

import pytest


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


VERBS = {
    "compress": ("compress", "model", "--attn-params", "75%", "--text", "text.txt"),
    "profile": ("profile", "model", "--text", "text.txt"),
    "recover": ("recover", "model", "--against", "model", "--text", "text.txt"),
    "train": ("train", "plan.json", "--text", "text.txt", "--steps", "1"),
}


@pytest.mark.parametrize("out", ["model", "text.txt", ".", "..", "album", "link", "pipe"])
@pytest.mark.parametrize("verb", VERBS)
def test_nothing_is_lost(headwise, place, verb, out):
    shape = ("--layers", "1", "--d-model", "16", "--heads", "2", "--context", "32")
    assert headwise("plan", "new", *shape, "-o", "plan.json").code == 0
    before = contents(place)
    result = headwise(*VERBS[verb], "-o", out, "--force")
    assert result.code == 2, result.err
    assert "Traceback" not in result.err
    assert contents(place) == before
    assert (place / "link").is_symlink()


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
