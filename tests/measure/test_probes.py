"""Tasks for encoders: the regression, the statistics, files that are wrong, and real sentences."""

import numpy as np
import pytest
import torch
from scipy import stats

from headwise.errors import HeadwiseError
from headwise.measure.answers import TaskAnswers, answer_tasks, read_tasks, task_results
from headwise.measure.probes import PULL, logistic_regression, probe_outcomes, statistic
from headwise.source import open_source

GOOD = ("a film that is good and warm", "this is a wonderful story", "great acting, I loved it")
BAD = ("a film that is bad and cold", "this is a terrible story", "awful acting, I hated it")
PAIRS = (
    ("A man is playing a guitar.", "A man plays the guitar.", 4.8),
    ("A cat sits on the sofa.", "A cat is lying on a couch.", 4.0),
    ("A woman is cooking.", "Someone prepares a meal.", 3.0),
    ("Two dogs run on the beach.", "A dog is in the water.", 2.0),
    ("The stock market fell.", "A child is eating an apple.", 0.1),
)


@pytest.fixture
def folder(tmp_path):
    rows = [(s, 1) for s in GOOD] + [(s, 0) for s in BAD]
    (tmp_path / "sst2_train.tsv").write_text("".join(f"{s}\t{y}\n" for s, y in rows))
    (tmp_path / "sst2_dev.tsv").write_text("".join(f"{s} indeed\t{y}\n" for s, y in rows))
    for part in ("train", "dev"):
        lines = (f"gj04\t{y}\t\t{s}\n" for s, y in rows)
        (tmp_path / f"cola_{part}.tsv").write_text("".join(lines))
    pairs = "".join(f'"{a}","{b}",{score}\n' for a, b, score in PAIRS)
    (tmp_path / "stsb_en_test.csv").write_text(pairs)
    return tmp_path


def test_the_regression_is_at_its_least_loss():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(211, 7))
    y = (x[:, 0] + 0.5 * rng.normal(size=211) + 0.3 > 0).astype(float)
    weights = logistic_regression(x, y)

    def gradient(w):
        rows = np.hstack([x, np.ones((211, 1))])
        return rows.T @ (1 / (1 + np.exp(-rows @ w)) - y) + PULL * w * ([1] * 7 + [0])

    assert np.abs(gradient(weights)).max() < 1e-3
    assert np.abs(gradient(weights * 0.9)).max() > 0.1
    right = (np.hstack([x, np.ones((211, 1))]) @ weights > 0) == y
    assert right.mean() > 0.8
    apart = logistic_regression(np.array([[-1.0], [1.0]]), np.array([0.0, 1.0]))
    assert np.isfinite(apart).all()  # labels that a line separates


def test_the_statistics_are_the_usual_ones():
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, 9, 101).astype(float), rng.normal(size=101)
    expected = stats.spearmanr(a, a + 3 * b).statistic
    assert statistic("spearman", a + 3 * b, a) == pytest.approx(expected)
    own, true = rng.integers(0, 2, (2, 101))
    tp, tn = (own & true).sum(), ((1 - own) & (1 - true)).sum()
    fp, fn = (own & (1 - true)).sum(), ((1 - own) & true).sum()
    root = np.sqrt(float((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
    found = statistic("mcc", own.astype(float), true.astype(float))
    assert found == pytest.approx((tp * tn - fp * fn) / root)
    assert statistic("mcc", np.ones(5), np.arange(5.0)) == 0.0  # one answer to everything


def test_differences_are_paired(folder):
    """Two models that answer alike differ by less than two that were asked other rows would."""
    asked = read_tasks(("stsb",), str(folder))
    labels = asked[0].probe.test.labels
    own = TaskAnswers("spearman", dict(enumerate(labels)))
    (same,) = task_results(asked, (own,), (own,))
    assert same.cut == pytest.approx(1.0)
    assert (same.difference, same.difference_stderr) == (0.0, 0.0)
    assert same.gained is None
    other = TaskAnswers("spearman", dict(enumerate(-labels)))
    (worse,) = task_results(asked, (other,), (own,))
    assert worse.difference == pytest.approx(-2.0)


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("sst2_dev.tsv", "no label", "line 1 must have 2 columns, got 1"),
        ("sst2_dev.tsv", "x\t2", "label must be 0 or 1, got '2'"),
        ("sst2_train.tsv", "x\t1\ny\t1", "label 0 and with label 1"),
        ("stsb_en_test.csv", "a,b,nan\nc,d,1", "label must be a number, got 'nan'"),
        ("stsb_en_test.csv", "a,b,1", "at least 2 lines"),
    ],
)
def test_wrong_files_are_one_sentence(folder, file, line, message):
    (folder / file).write_text(line + "\n")
    with pytest.raises(HeadwiseError, match=message):
        read_tasks((file.partition("_")[0],), str(folder))


def test_missing_files(tmp_path):
    with pytest.raises(HeadwiseError, match=r"one file sst2_train\*.tsv .* found none"):
        read_tasks(("sst2",), str(tmp_path))
    with pytest.raises(HeadwiseError, match="give their folder: --task-data"):
        read_tasks(("stsb",))


@pytest.mark.slow
def test_a_real_encoder_knows_what_is_alike_and_what_is_meant(folder):
    source = open_source("builtin:minilm")
    model, tokenizer = source.load(), source.tokenizer
    asked = read_tasks(("sst2", "stsb", "cola"), str(folder))
    answers = answer_tasks(model, tokenizer, asked)
    sst2, stsb, cola = task_results(asked, answers, answers)
    assert sst2.cut == 1.0
    assert stsb.cut > 0.8
    assert cola.cut == pytest.approx(1.0)
    assert (sst2.difference, stsb.difference, cola.difference) == (0.0, 0.0, 0.0)
    # The control: embeddings that know nothing order the sentences by chance only.
    orders = []
    for seed in range(6):
        torch.manual_seed(seed)
        for layer in model.parameters():
            layer.data.normal_(0.0, 1e-3)
        likeness = probe_outcomes("stsb", model, tokenizer, asked[1].probe)
        orders.append(statistic("spearman", np.array(likeness), asked[1].probe.test.labels))
    assert min(orders) < 0.5
