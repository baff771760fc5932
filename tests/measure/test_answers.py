"""Tasks from local files: scores written out, pairs, and files that are wrong."""

import json
import math

import pytest
import torch

from headwise.data.tokens import train_tokenizer
from headwise.errors import HeadwiseError
from headwise.measure.answers import (
    TaskAnswers,
    answer_tasks,
    read_tasks,
    task_result,
    task_results,
)
from tests import tiny

ROWS = {
    "lambada": [{"context": "abc de", "continuation": c} for c in ("abc", "f", "de", "a b")],
    "piqa": [
        {"query": f"Question: {q}\n", "choices": ["abc def", "d"], "gold": g}
        for q, g in (("abc", 0), ("de f", 1), ("f a", 0), ("bc", 1))
    ],
    "winogrande": [
        {"context_options": [f"{a} abc", f"{a} def"], "continuation": "is a b.", "gold": g}
        for a, g in (("a", 0), ("bcd", 1), ("f e", 1))
    ],
}


@pytest.fixture
def folder(tmp_path):
    for name, rows in ROWS.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}_small.jsonl").write_text(text)
    return tmp_path


@pytest.fixture(scope="module")
def words():
    return train_tokenizer(["a b c d e f abc def is Question Answer: \n"], 300)


@pytest.fixture(scope="module")
def models():
    return [tiny.stock("llama", seed=s, vocab_size=307) for s in (7, 8)]


def _log_likelihood(model, words, context, continuation):
    """Of the continuation's tokens, and whether each is the likeliest."""
    before = words(context, add_special_tokens=False)["input_ids"]
    whole = words(context + continuation, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        rows = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
    steps = range(len(before), len(whole))
    total = sum(float(rows[i - 1, whole[i]]) for i in steps)
    return total, all(int(rows[i - 1].argmax()) == whole[i] for i in steps)


def _by_hand(model, words, name):
    def score(context, continuation):
        return _log_likelihood(model, words, context, continuation)

    for row in ROWS[name]:
        if name == "lambada":
            yield float(score(row["context"], " " + row["continuation"])[1])
        elif name == "piqa":
            asked = row["query"] + "Answer:"
            each = [score(asked, " " + c)[0] / len(c.encode()) for c in row["choices"]]
            yield float(max(range(2), key=each.__getitem__) == row["gold"])
        else:
            each = [score(c, " " + row["continuation"])[0] for c in row["context_options"]]
            yield float(max(range(2), key=each.__getitem__) == row["gold"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_answers_are_those_written_out_and_paired(folder, words, models):
    asked = read_tasks(tuple(ROWS), str(folder))
    found = task_results(asked, *(answer_tasks(m, words, asked) for m in models))
    assert [t.name for t in found] == list(ROWS)
    assert [t.metric for t in found] == ["acc", "acc_norm", "acc"]
    for task in found:
        cut, dense = (list(_by_hand(m, words, task.name)) for m in models)
        assert task.questions == len(cut)
        assert (task.cut, task.dense) == pytest.approx((sum(cut) / len(cut), sum(dense) / len(cut)))
        pairs = [a - b for a, b in zip(cut, dense, strict=True)]
        assert task.difference == pytest.approx(sum(pairs) / len(pairs))
        assert (task.gained, task.lost) == (pairs.count(1.0), pairs.count(-1.0))
    (limited,) = read_tasks(("piqa",), str(folder), 2)
    assert len(limited.questions) == 2


def test_the_error_of_the_difference_is_that_of_the_pairs():
    dense = dict(enumerate([1.0, 0.0] * 50))
    cut = {**dense, 0: 0.0}  # one question of a hundred is lost
    found = task_result("t", "f", TaskAnswers("acc", cut), TaskAnswers("acc", dense))
    assert (found.difference, found.gained, found.lost) == (pytest.approx(-0.01), 0, 1)
    assert found.difference_stderr == pytest.approx(0.01)
    apart = math.hypot(found.dense_stderr, found.cut_stderr)
    assert apart > 5 * found.difference_stderr  # as if they had answered other questions
    with pytest.raises(HeadwiseError, match="same questions, at least 2"):
        task_result(
            "t", "f", TaskAnswers("acc", {0: 1.0, 1: 1.0}), TaskAnswers("acc", {0: 1.0, 2: 1.0})
        )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 holds invalid JSON"),
        ("[]", "line 1 must be a JSON object"),
        ('{"query": 3, "choices": [], "gold": 0}', "must have 'query' as a str, got 3"),
        ('{"query": "a", "choices": ["b"], "gold": 1}', "gold must be from 0 to 0, got 1"),
        ('{"query": "a", "choices": ["b"], "gold": true}', "must have 'gold' as a int"),
        ('{"query": "a", "choices": ["b"], "gold": 0}', "at least 2 questions"),
    ],
)
def test_wrong_files_are_one_sentence(tmp_path, line, message):
    (tmp_path / "piqa.jsonl").write_text(line + "\n")
    with pytest.raises(HeadwiseError, match=message):
        read_tasks(("piqa",), str(tmp_path))


def test_missing_files_and_unknown_tasks(tmp_path):
    with pytest.raises(HeadwiseError, match=r"one file piqa\*.jsonl for the task piqa, found none"):
        read_tasks(("piqa",), str(tmp_path))
    with pytest.raises(HeadwiseError, match=r"knows the files of lambada, .* got the task 'mmlu'"):
        read_tasks(("mmlu",), str(tmp_path))
    with pytest.raises(HeadwiseError, match="--task-data needs --tasks"):
        read_tasks((), str(tmp_path))
    assert read_tasks(("mmlu",))[0].source == "lm-eval"
