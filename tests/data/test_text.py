import hashlib
import sys

import pytest

from headwise.data.text import Text, read_source
from headwise.errors import HeadwiseError


def test_a_file_is_one_document(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("één\n", encoding="utf-8")
    text = read_source(str(file))
    assert text.documents == ("één\n",)
    assert text.characters == 4


def test_the_hash_covers_the_documents_and_where_they_end(tmp_path):
    expected = hashlib.sha256()
    for part in (b"ab", b"c"):
        expected.update(len(part).to_bytes(8, "little") + part)
    assert Text("x", ("ab", "c")).sha256 == expected.hexdigest()
    assert Text("x", ("ab", "c")).sha256 != Text("x", ("a", "bc")).sha256
    assert Text("x", ("ab", "c")).sha256 == Text("y", ("ab", "c")).sha256


def test_a_folder_is_read_by_name_and_binary_files_are_skipped(tmp_path):
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "nul.txt").write_bytes(b"a\0b")
    (tmp_path / ".hidden").write_text("not read")
    text = read_source(str(tmp_path))
    assert text.documents == ("first", "second")
    assert text.skipped == 2


def test_only_the_first_characters_are_taken(tmp_path):
    for name, content in (("a", "12345"), ("b", "67890"), ("c", "x")):
        (tmp_path / name).write_text(content)
    assert read_source(str(tmp_path), max_chars=7).documents == ("12345", "67")
    assert read_source(str(tmp_path), max_chars=5).documents == ("12345",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p.write_bytes(b""), "holds no text"),
        (lambda p: p.write_text(" \n\t"), "holds no text"),
        (lambda p: p.write_bytes(b"ok\xff"), "byte 2 is not"),
        (lambda p: None, "does not exist"),
        (lambda p: p.mkdir(), "holds no readable text file"),
    ],
)
def test_bad_paths_are_one_sentence(tmp_path, make, message):
    path = tmp_path / "t.txt"
    make(path)
    with pytest.raises(HeadwiseError, match=message):
        read_source(str(path))


def test_an_unknown_builtin_is_answered_with_the_known_one():
    with pytest.raises(HeadwiseError, match="Did you mean 'python'"):
        read_source("builtin:pyton")


@pytest.mark.slow
def test_builtin_python_is_the_same_each_time_and_has_all_three_kinds():
    text = read_source("builtin:python")
    assert text.sha256 == read_source("builtin:python").sha256
    assert text.characters > 5_000_000
    joined = "\n".join(text.documents)
    assert 'The "assert" statement' in joined  # a help topic
    assert "itertools.count" in joined  # a compiled module's documentation
    assert "class ArgumentParser" in joined  # library source
    assert sys.prefix not in joined  # nothing of this machine


def test_a_hub_name_without_datasets_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(HeadwiseError, match=r"install headwise\[hub\]"):
        read_source("hub:owner/name")


class _FakeDatasets:
    """Stands for the `datasets` package; records the call and gives two rows."""

    def __init__(self, error=None):
        self.error, self.calls = error, []

    def load_dataset(self, name, config, split):
        self.calls.append((name, config, split))
        if self.error:
            raise self.error
        return _Rows([{"id": 1, "text": "one"}, {"id": 2, "text": ""}, {"id": 3, "text": "two"}])


class _Rows(list):
    column_names = ("id", "text")

    class _Feature:
        def __init__(self, dtype):
            self.dtype = dtype

    features = {"id": _Feature("int64"), "text": _Feature("string")}  # noqa: RUF012


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("hub:o/n", ("o/n", None, "train")),
        ("o/n", ("o/n", None, "train")),
        ("hub:o/n:c:validation", ("o/n", "c", "validation")),
        ("hub:o/n::test:text", ("o/n", None, "test")),
    ],
)
def test_hub_names_are_taken_apart(monkeypatch, source, call):
    fake = _FakeDatasets()
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert read_source(source).documents == ("one", "two")
    assert fake.calls == [call]


def test_hub_errors_are_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", _FakeDatasets(ConnectionError("no\nnetwork")))
    with pytest.raises(HeadwiseError, match=r"could not be loaded \(ConnectionError: no network\)"):
        read_source("owner/name")
    monkeypatch.setitem(sys.modules, "datasets", _FakeDatasets())
    with pytest.raises(HeadwiseError, match="has no text column 'body', it has id, text"):
        read_source("hub:o/n::train:body")
    with pytest.raises(HeadwiseError, match="is written hub:owner/name"):
        read_source("hub:")
