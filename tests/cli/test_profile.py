"""`headwise profile` as a user runs it."""

import json

import pytest
from transformers import BertTokenizer

from tests import tiny

TEXT = "the quick brown fox jumps over the lazy dog and seven small wolves run away. " * 12
OPTIONS = ("--length", 16, "--tokens", 160, "--chunk", 4, "--device", "cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny.write_llama(folder, text=TEXT)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *sorted(set(TEXT[:-2].split()))]
    (folder / "vocab.txt").write_text("\n".join(words))
    tiny.stock("bert_bare", vocab_size=len(words)).save_pretrained(folder / "encoder")
    vocabulary = {word: i for i, word in enumerate(words)}
    BertTokenizer(vocab=vocabulary).save_pretrained(folder / "encoder")
    return folder


def test_profile_prints_and_writes(headwise, checkpoint, tmp_path):
    where = (checkpoint / "model", "--text", checkpoint / "text.txt")
    done = headwise("profile", *where, "-o", tmp_path / "p", *OPTIONS)
    assert done.code == 0, done.err
    assert "10 sequences of 16 tokens, loss" in done.out
    assert f"Wrote {tmp_path / 'p'}" in done.err
    assert sorted(f.name for f in tmp_path.rglob("*")) == [
        "p",
        "profile.json",
        "profile.safetensors",
        "recipe.yaml",
        "report.html",
    ]
    again = headwise("profile", *where, "-o", tmp_path / "p", *OPTIONS)
    assert again.code == 2
    assert "exists already" in again.err
    forced = headwise("profile", *where, "-o", tmp_path / "p", *OPTIONS, "--force", "--json")
    document = json.loads(forced.out)
    assert document["format"] == "headwise-profile/1"
    assert document["objective"] == "next-token"
    assert len(document["layers"]) == 2
    assert document["layers"][0]["query_key"] > 0


@pytest.mark.slow
def test_an_encoder_without_a_head_is_profiled_by_its_embedding(headwise, checkpoint, tmp_path):
    where = (checkpoint / "encoder", "--text", checkpoint / "text.txt")
    done = headwise("profile", *where, "-o", tmp_path / "p", *OPTIONS, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["objective"] == "embedding"
    assert document["loss"] is None
    assert document["centred"] is True
    fitted = headwise("plan", "fit", tmp_path / "p", "--attn-params", "80%", "--multiple-of", 2)
    assert "Predicted 1 − cosine of embeddings: " in fitted.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--length", 65), "at most the model's context of 64 tokens, got 65"),
        (("--length", 60, "--tokens", 20), "tokens for at least one length"),
        (("--dtype", "fp8"), "--dtype must be 'auto', 'fp32' or 'bf16', got 'fp8'"),
        (("--text", "nothing.txt"), "nothing.txt does not exist"),
        (("--tokenizer", "./no/such"), "does not exist"),
    ],
)
def test_wrong_input_is_one_sentence(headwise, checkpoint, tmp_path, options, message):
    where = (checkpoint / "model", "--text", checkpoint / "text.txt", "--device", "cpu")
    done = headwise("profile", *where, "-o", tmp_path / "p", *options)
    assert done.code == 2
    assert message in done.err
    assert len(done.err.splitlines()) == 1  # nothing about memory before it
    assert not list(tmp_path.iterdir())


def test_short_text_and_a_broken_checkpoint(headwise, checkpoint, tmp_path):
    (tmp_path / "short.txt").write_text("dog")
    done = headwise(
        "profile", checkpoint / "model", "--text", tmp_path / "short.txt", "-o", tmp_path / "p"
    )
    assert done.code == 2
    assert "but one sequence needs 64; give more text or a smaller --length" in done.err
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (checkpoint / "model").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    done = headwise("profile", broken, "--text", checkpoint / "text.txt", "-o", tmp_path / "p")
    assert done.code == 2
    assert "model.safetensors is not a complete safetensors file" in done.err
    assert not (tmp_path / "p").exists()
