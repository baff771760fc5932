import pytest

from headwise.data.text import held_out_split
from headwise.errors import HeadwiseError


def test_few_documents_are_cut_by_position_after_a_line_end():
    text = "".join(f"line {i:02d}\n" for i in range(100))  # 800 characters
    split = held_out_split((text,), 0.1)
    assert split.train[0] + split.held_out[0] == text
    assert split.held_out[0] == "".join(f"line {i:02d}\n" for i in range(91, 100))
    assert split.rule == "the last 0.1 of the text"


def test_position_cut_between_documents_keeps_them_whole():
    split = held_out_split(("a" * 90, "b" * 10), 0.1)
    assert split == type(split)(("a" * 90,), ("b" * 10,), split.rule)


def test_many_documents_are_split_by_hash_and_copies_stay_together():
    documents = tuple(f"document {i % 500}" for i in range(2000))
    split = held_out_split(documents, 0.2)
    assert len(split.train) + len(split.held_out) == 2000
    assert not set(split.train) & set(split.held_out)
    # 500 draws with p = 0.2: the share's standard deviation is 0.018.
    assert abs(len(split.held_out) / 2000 - 0.2) < 0.08
    assert held_out_split(documents[::-1], 0.2).held_out == split.held_out[::-1]


def test_copies_would_straddle_a_split_by_position():
    """The control for the test above."""
    documents = tuple(f"document {i % 30}" for i in range(90))
    split = held_out_split(documents, 0.2)
    assert set(split.train) & set(split.held_out)


def test_no_share_holds_out_nothing_and_a_bad_share_is_refused():
    assert held_out_split(("a",), 0.0).held_out == ()
    with pytest.raises(HeadwiseError, match="held-out must be a share"):
        held_out_split(("a",), 1.0)
