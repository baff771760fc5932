import ctypes
import gc
import json

import numpy as np
import pytest

from headwise.data import tokens
from headwise.data.tokens import load_tokenizer, token_ids, token_stream, train_tokenizer
from headwise.errors import HeadwiseError

DOCUMENTS = ("the cat sat on the mat\n" * 20, "zwölf Boxkämpfer ♞\n" * 7)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(DOCUMENTS, 277)


def test_streams_spell_the_documents_with_an_end_after_each(tokenizer):
    stream = token_stream(tokenizer, DOCUMENTS)
    end = tokenizer.eos_token_id
    ends = np.flatnonzero(stream == end)
    assert stream.dtype == np.uint32
    assert len(ends) == 2
    assert ends[-1] == len(stream) - 1
    assert tokenizer.decode(stream[: ends[0]]) == DOCUMENTS[0]
    assert tokenizer.decode(stream[ends[0] + 1 : ends[1]]) == DOCUMENTS[1]
    assert len(stream) < sum(len(d.encode()) for d in DOCUMENTS)  # merges were learned


def test_pieces_cut_at_line_ends_change_nothing(tokenizer, monkeypatch):
    whole = token_stream(tokenizer, DOCUMENTS)
    monkeypatch.setattr(tokens, "PIECE", 100)
    monkeypatch.setattr(tokens, "AT_ONCE", 3)
    seen = []
    pieces = token_stream(
        tokenizer, DOCUMENTS, lambda what, done, total: seen.append((done, total))
    )
    total = sum(map(len, DOCUMENTS))
    assert tokenizer.decode(pieces) == tokenizer.decode(whole)
    assert len(seen) > 1
    assert seen[-1] == (total, total)
    assert list(token_stream(tokenizer, DOCUMENTS, most=11)) == list(pieces[:11])


def test_training_is_deterministic(tokenizer):
    again = train_tokenizer(DOCUMENTS, 277)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert len(tokenizer) == 277


def test_tokenizers_are_loaded_from_a_folder_or_a_file(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "t")
    for path in (tmp_path / "t", tmp_path / "t" / "tokenizer.json"):
        loaded = load_tokenizer(str(path))
        assert list(token_stream(loaded, DOCUMENTS)) == list(token_stream(tokenizer, DOCUMENTS))


def test_bad_tokenizers_are_one_sentence(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(HeadwiseError, match="holds no tokenizer that can be loaded"):
            load_tokenizer(str(path))
    with pytest.raises(HeadwiseError, match="at least 257"):
        train_tokenizer(DOCUMENTS, 256)


def allocated():
    """Bytes that this process has taken from the C library and not given back."""
    gc.collect()
    words = ("arena", "free", "fast", "maps", "mapped", "most", "fast_bytes", "used")
    fields = [(name, ctypes.c_size_t) for name in (*words, "unused", "top")]
    info = type("Info", (ctypes.Structure,), {"_fields_": fields})
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("the C library does not say")
    ask.restype = info
    return ask().used


@pytest.mark.slow
def test_a_loaded_tokenizer_leaves_nothing_behind(tokenizer, tmp_path):
    """Its words would stay in memory for ever: 300 bytes each, of every tokenizer opened."""
    tokenizer.save_pretrained(tmp_path)
    words = " ".join(f"{i:b}x{i:o}" for i in range(3_000))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        load_tokenizer(str(path))(words)
        before = allocated()
        for _ in range(5):
            load_tokenizer(str(path))(words)
        assert allocated() - before < 2**20


def template(data):
    """A template with a token that it does not say the number of."""
    single = [{"SpecialToken": {"id": "zz", "type_id": 0}}]
    post = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    data["post_processor"] = post


def prefix(data):
    data["normalizer"] = {"type": "Prepend", "prepend": "x" * 100_000}


def far(data):
    data["model"]["vocab"]["a"] = 2**31


def slow(data):
    regex = {"Regex": r"(([a-z ])+.)+[A-Z]([a-z])+$"}
    split = {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
    data["pre_tokenizer"] = split


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (template, "PanicException"),
        (prefix, "it makes 100,"),
        (far, "a token with the number 2,147,483,648"),
    ],
)
def test_tokenizers_that_panic_or_make_too_much_are_refused(tokenizer, tmp_path, damage, said):
    tokenizer.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    damage(data)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(HeadwiseError, match=f"holds no tokenizer that can be .*{said}"):
            load_tokenizer(str(path))


def test_a_tokenizer_that_gives_up_on_a_text_is_said(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    data = json.loads((tmp_path / "tokenizer.json").read_text())
    slow(data)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    loaded = load_tokenizer(str(tmp_path))
    for ask in (lambda t: token_ids(loaded, t), lambda t: token_stream(loaded, [t])):
        with pytest.raises(HeadwiseError, match=r"the tokenizer fails: PanicException: .*retry"):
            ask("some words of a text that has no capital letter at all " * 9)


def test_more_tokens_than_a_text_has_are_not_made_room_for():
    """Room for a trillion tokens would end the process."""
    assert len(train_tokenizer(DOCUMENTS, 10**12)) < 600
