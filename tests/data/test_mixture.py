"""Several texts side by side: their shares, their order, and what is held out of each."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.data.mixture import Mixture, Share, deal, read_mixture, token_windows
from headwise.data.text import Text, read_source, text_name
from headwise.data.tokens import token_stream, train_tokenizer
from headwise.errors import HeadwiseError


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, word in (("notes.txt", "note "), ("code.txt", "x = 1\n"), ("0.5:odd.txt", "odd ")):
        (tmp_path / name).write_text(word * 500)
    return tmp_path


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["note x = 1\nodd " * 100], 300)


def test_one_text_is_the_text_itself(files, tokenizer):
    mixture, alone = read_mixture(["notes.txt"]), read_source("notes.txt")
    assert (mixture.source, mixture.sha256) == (alone.source, alone.sha256)
    stream = token_stream(tokenizer, alone.documents, most=100)
    windows = token_windows(tokenizer, mixture, length=16, tokens=100)
    assert np.array_equal(windows.reshape(-1), stream[: 6 * 16])


def test_a_weight_stands_before_the_name(files):
    mixture = read_mixture(["notes.txt", "0.5:code.txt"])
    assert mixture.weights == (1.0, 0.5)
    assert mixture.source == "notes.txt + 0.5:code.txt"
    assert text_name("0.5:code.txt") == "code.txt"
    assert text_name("./0.5:odd.txt") == "./0.5:odd.txt"
    assert read_mixture(["./0.5:odd.txt"]).texts[0].documents[0].startswith("odd")
    assert text_name("hub:owner/name:config") == "hub:owner/name:config"
    other = read_mixture(["notes.txt", "0.25:code.txt"])
    assert mixture.sha256 == read_mixture(["2:notes.txt", "code.txt"]).sha256 != other.sha256


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["0:code.txt"], "must be a number above 0"),
        (["notes.txt", "2:notes.txt"], "given once, got notes.txt twice"),
        (["notes.txt", "copy.txt"], "given once, got copy.txt and as notes.txt"),
        ([], "at least one text"),
        (["0.5:missing.txt"], "missing.txt does not exist"),
    ],
)
def test_wrong_texts_are_refused(files, names, message):
    (files / "copy.txt").write_text((files / "notes.txt").read_text())
    with pytest.raises(HeadwiseError, match=message):
        read_mixture(names)


def test_each_window_is_of_one_text_and_every_beginning_has_the_shares(files, tokenizer):
    mixture = read_mixture(["2:notes.txt", "code.txt"])
    windows = token_windows(tokenizer, mixture, length=8, tokens=8 * 30)
    kinds = ["note" in tokenizer.decode(row) for row in windows]
    assert all(
        ("x =" in tokenizer.decode(row)) is not k for row, k in zip(windows, kinds, strict=True)
    )
    for n in range(3, 31, 3):
        assert sum(kinds[:n]) == 2 * n // 3


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=5),
    st.integers(1, 200),
)
def test_shares_are_kept_at_every_length(weights, n):
    dealt = deal(weights, [math.inf] * len(weights), n)
    assert len(dealt) == n
    for i, weight in enumerate(weights):
        count = np.cumsum(dealt == i)
        wanted = weight / math.fsum(weights) * np.arange(1, n + 1)
        assert np.abs(count - wanted).max() < len(weights)


def test_a_text_that_is_used_up_leaves_its_share_to_the_others():
    dealt = deal([1, 1, 2], [2, 100, 3], 20)
    assert Counter(dealt.tolist()) == {0: 2, 1: 15, 2: 3}
    assert len(deal([1, 1], [2, 3], 20)) == 5


def test_something_is_held_out_of_every_text():
    texts = [Text("a", ("a line\n" * 100,)), Text("b", tuple(f"b {i}\n" for i in range(500)))]
    mixture = Mixture((Share(texts[0]), Share(texts[1], 0.5)))
    kept, held_out = mixture.split(0.2)
    assert kept.weights == mixture.weights
    assert [t.source for t in held_out] == ["a (held out)", "b (held out)"]
    for whole, part, aside in zip(texts, kept.texts, held_out, strict=True):
        assert part.characters + aside.characters == whole.characters
        assert 0.1 < aside.characters / whole.characters < 0.3
    assert mixture.split(0) == (mixture, ())


@pytest.mark.slow
def test_the_built_in_mixture_has_text_of_every_kind():
    mixture = read_mixture(["2:builtin:mixed"])
    assert mixture.weights == (2 / 3,) * 3
    assert [t.source for t in mixture.texts] == [
        "builtin:prose",
        "builtin:code",
        "builtin:packages",
    ]
    prose, code, _ = mixture.texts
    assert all(t.characters > 100_000 for t in mixture.texts)
    assert sum("    return " in d for d in code.documents) > 0.5 * len(code.documents)
    assert sum("    return " in d for d in prose.documents) < 0.2 * len(prose.documents)
    with pytest.raises(HeadwiseError, match="is a mixture, but one text is needed"):
        read_source("builtin:mixed")
