"""Tasks for encoders: linear probes and cosines on the embeddings of two models.

    --tasks sst2,cola,stsb --task-data FOLDER

    sst2   sst2_train*.tsv, sst2_dev*.tsv     sentence, tab, 0 or 1
    cola   cola_train*.tsv, cola_dev*.tsv     GLUE's four columns: source, 0 or 1, mark, sentence
    stsb   stsb*.csv                          two sentences and how alike they are

The models are not trained. The embedding is the mean of the last hidden states. For sentences
with labels a logistic regression on the embeddings of the train file is tested on the dev file
(accuracy; Matthews correlation for CoLA, as is usual). For pairs the cosine of both embeddings is
compared with the given similarity by rank (Spearman).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from headwise.errors import HeadwiseError, quoted
from headwise.measure.comparison import sentence_embeddings
from headwise.records import read_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PULL = 1.0  # of the weights of standardised embeddings towards zero, as in scikit-learn
_STEPS = 50  # of Newton's method, which needs about ten


@dataclass(frozen=True, slots=True)
class EmbeddingTask:
    """A task on embeddings: its metric, and the columns of a line that it needs."""

    metric: str
    columns: int
    label: int  # the column of the label
    sentences: tuple[int, ...]

    @property
    def of_pairs(self) -> bool:
        """Whether two sentences are compared, which needs no training."""
        return len(self.sentences) == 2


PROBES: Mapping[str, EmbeddingTask] = {
    "sst2": EmbeddingTask("acc", 2, label=1, sentences=(0,)),
    "cola": EmbeddingTask("mcc", 4, label=1, sentences=(3,)),
    "stsb": EmbeddingTask("spearman", 3, label=2, sentences=(0, 1)),
}


@dataclass(frozen=True, slots=True)
class ProbeRows:
    """Sentences, or pairs of them, with their labels."""

    sentences: tuple[tuple[str, ...], ...]
    labels: Float[np.ndarray, " rows"]


@dataclass(frozen=True, slots=True)
class ProbeData:
    """The test rows of a task, and the train rows of its regression, if it has one."""

    test: ProbeRows
    train: ProbeRows | None = None


def probe_data(name: str, folder: str, limit: int | None) -> tuple[str, ProbeData]:
    """The name of the test file and the rows of a task; a wrong file is an error."""
    probe = PROBES[name]
    if probe.of_pairs:
        path = _one(folder, f"{name}*.csv", name)
        return path.name, ProbeData(_rows(path, probe, limit))
    train, dev = (_one(folder, f"{name}_{part}*.tsv", name) for part in ("train", "dev"))
    data = ProbeData(_rows(dev, probe, limit), _rows(train, probe, None))
    assert data.train is not None
    if len(np.unique(data.train.labels)) < 2:
        raise HeadwiseError(f"{train} must have sentences with label 0 and with label 1.")
    return dev.name, data


def _one(folder: str, pattern: str, name: str) -> Path:
    found = sorted(Path(folder).glob(pattern))
    if len(found) != 1:
        came = ", ".join(path.name for path in found) or "none"
        raise HeadwiseError(
            f"{folder} must hold one file {pattern} for the task {name}, found {came}."
        )
    return found[0]


def _rows(path: Path, probe: EmbeddingTask, limit: int | None) -> ProbeRows:
    content = read_file(path)
    lines: Any = (
        csv.reader(StringIO(content))
        if path.suffix == ".csv"
        else (line.split("\t") for line in content.splitlines())
    )
    sentences, labels = [], []
    for number, row in enumerate(lines, 1):
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != probe.columns:
            raise HeadwiseError(
                f"{path}, line {number} must have {probe.columns} columns, got {len(row)}."
            )
        labels.append(_label(row[probe.label], probe, f"{path}, line {number}"))
        sentences.append(tuple(row[i] for i in probe.sentences))
    if len(sentences[:limit]) < 2:
        raise HeadwiseError(f"{path} must hold at least 2 lines for a standard error.")
    return ProbeRows(tuple(sentences[:limit]), np.array(labels[:limit]))


def _label(text: str, probe: EmbeddingTask, where: str) -> float:
    try:
        label = float(text)
    except ValueError:
        label = np.nan
    if not np.isfinite(label) or (not probe.of_pairs and label not in (0.0, 1.0)):
        wanted = "a number" if probe.of_pairs else "0 or 1"
        raise HeadwiseError(f"{where}: the label must be {wanted}, got {quoted(text)}.")
    return label


def probe_outcomes(
    name: str, model: Any, tokenizer: PreTrainedTokenizerBase, data: ProbeData
) -> list[float]:
    """For every test row: 1 if the answer is right, the predicted label, or the cosine."""
    probe, rows = PROBES[name], data.test

    def embedded(rows: ProbeRows, place: int) -> np.ndarray:
        return sentence_embeddings(model, tokenizer, [row[place] for row in rows.sentences])

    if probe.of_pairs:
        first, second = (_unit(embedded(rows, place)) for place in (0, 1))
        return [float(x) for x in (first * second).sum(1)]
    assert data.train is not None
    train, test = embedded(data.train, 0), embedded(rows, 0)
    mean, spread = train.mean(0), train.std(0) + 1e-12
    weights = logistic_regression((train - mean) / spread, data.train.labels)
    labels = _with_one((test - mean) / spread) @ weights > 0
    if probe.metric == "acc":
        return [float(x) for x in labels == rows.labels]
    return [float(x) for x in labels]


def logistic_regression(
    x: Float[np.ndarray, "rows dim"], y: Float[np.ndarray, " rows"]
) -> Float[np.ndarray, " weights"]:
    """Weights, the intercept last, that minimise Σ log(1 + e^∓z) + PULL/2·‖w‖², by Newton."""
    rows = _with_one(x)
    pull = np.full(rows.shape[1], PULL)
    pull[-1] = 0.0
    weights = np.zeros(rows.shape[1])

    def loss(w: np.ndarray) -> float:
        z = rows @ w
        return float(np.logaddexp(0, z).sum() - y @ z + 0.5 * (pull * w * w).sum())

    best = loss(weights)
    for _ in range(_STEPS):
        p = 0.5 * (1 + np.tanh(0.5 * (rows @ weights)))
        gradient = rows.T @ (p - y) + pull * weights
        curvature = (rows * (p * (1 - p))[:, None]).T @ rows + np.diag(pull)
        step = np.linalg.solve(curvature + 1e-9 * np.eye(len(pull)), gradient)
        length = 1.0
        while (now := loss(weights - length * step)) > best and length > 1e-6:
            length /= 2
        weights = weights - length * step
        if best - now <= 1e-10 * abs(best):
            break
        best = now
    return weights


def _with_one(x: np.ndarray) -> np.ndarray:
    return np.hstack([x, np.ones((len(x), 1))])


def _unit(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True).clip(min=1e-30))


def statistic(metric: str, outcomes: np.ndarray, labels: np.ndarray) -> float:
    """The metric of some rows."""
    if metric == "acc":
        return float(outcomes.mean())
    if metric == "spearman":
        outcomes, labels = _ranks(outcomes), _ranks(labels)
    # Matthews correlation is the plain correlation of two labels.
    centred = outcomes - outcomes.mean(), labels - labels.mean()
    size = float(np.linalg.norm(centred[0]) * np.linalg.norm(centred[1]))
    return float(np.clip(centred[0] @ centred[1] / size, -1.0, 1.0)) if size else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from lowest to highest; ties share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return np.asarray((last - (counts - 1) / 2)[inverse])


def resampled(
    metric: str, models: Sequence[np.ndarray], labels: np.ndarray, *, times: int = 400
) -> Float[np.ndarray, "models times"]:
    """The metric of every model on bootstrap resamples of the rows, the same rows for all."""
    rng = np.random.default_rng(0)
    draws = [rng.integers(len(labels), size=len(labels)) for _ in range(times)]
    return np.array([[statistic(metric, m[d], labels[d]) for d in draws] for m in models])
