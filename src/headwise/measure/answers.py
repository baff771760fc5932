"""Tasks: questions with known answers, for two models through lm-eval.

    --tasks piqa,lambada ─┬─ FOLDER/piqa*.jsonl (--task-data), one question a line
                          └─ or the data that lm-eval downloads
        ─► each model's answers, question by question ─► accuracy, and the paired difference

The two models answer the same questions, so most of the sampling noise cancels in the difference:
its standard error is that of the paired differences, question by question.

Lines of a file, by task:

    lambada                          {"context": …, "continuation": the last word}
    piqa, arc_easy, hellaswag, boolq {"query": …, "choices": […], "gold": index}
    winogrande                       {"context_options": […], "continuation": …, "gold": index}

Encoders have other tasks, without lm-eval (`headwise.measure.probes`).
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import logging
import math
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headwise.errors import HeadwiseError, quoted
from headwise.measure.probes import (
    PROBES,
    ProbeData,
    probe_data,
    probe_outcomes,
    resampled,
    statistic,
)
from headwise.measure.record import TaskResult
from headwise.progress import Progress, silent
from headwise.records import parse_json, read_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Form = Literal["last word", "choices", "contexts"]


@dataclass(frozen=True, slots=True)
class LocalTask:
    """How a task's file is read: its form, and the text between question and answer."""

    form: Form
    after: str = ""
    normed: bool = False  # scored per byte of the answer, as is usual for the task
    lm_eval: str = ""  # what lm-eval calls it, where the names differ


LOCAL_TASKS: Mapping[str, LocalTask] = {
    "lambada": LocalTask("last word", lm_eval="lambada_openai"),
    "piqa": LocalTask("choices", after="Answer:", normed=True),
    "arc_easy": LocalTask("choices", after="\nAnswer:", normed=True),
    "hellaswag": LocalTask("choices", normed=True),
    "boolq": LocalTask("choices", after="\nAnswer:"),
    "winogrande": LocalTask("contexts"),
}
_KEYS: Mapping[Form, dict[str, type]] = {
    "last word": {"context": str, "continuation": str},
    "choices": {"query": str, "choices": list, "gold": int},
    "contexts": {"context_options": list, "continuation": str, "gold": int},
}
_METRICS = ("acc_norm", "acc", "exact_match", "em")  # the first that a task has
_BATCH = 8


@dataclass(frozen=True, slots=True)
class TaskQuestions:
    """A task with its questions; without them lm-eval uses its own."""

    name: str
    source: str
    limit: int | None
    questions: tuple[Mapping[str, Any], ...] | None = None
    probe: ProbeData | None = None  # of a task for encoders

    @property
    def kind(self) -> str:
        """The kind of model that the task is for."""
        return "causal" if self.probe is None else "encoder"


def read_tasks(
    names: Sequence[str], data: str | None = None, limit: int | None = None
) -> tuple[TaskQuestions, ...]:
    """The tasks with their local questions; a missing or damaged file is an error."""
    if data is not None and not names:
        raise HeadwiseError("--task-data needs --tasks; name them, for example piqa,lambada.")
    if set(names) - set(PROBES):
        _refuse_without_lm_eval()
    return tuple(_asked(name, data, limit) for name in dict.fromkeys(names))


def _refuse_without_lm_eval() -> None:
    from importlib.util import find_spec

    if find_spec("lm_eval") is None:
        raise HeadwiseError("tasks need lm-eval; install it with `pip install 'headwise[eval]'`.")


def _asked(name: str, data: str | None, limit: int | None) -> TaskQuestions:
    if name in PROBES:
        if data is None:
            raise HeadwiseError(f"the task {name} needs its files; give their folder: --task-data.")
        source, probe = probe_data(name, data, limit)
        return TaskQuestions(name, source, limit, probe=probe)
    if data is None:
        return TaskQuestions(name, "lm-eval", limit)
    if name not in LOCAL_TASKS:
        raise HeadwiseError(
            f"--task-data knows the files of {', '.join([*LOCAL_TASKS, *PROBES])}, got the task "
            f"{quoted(name)}; leave --task-data out to use lm-eval's own data."
        )
    found = sorted(Path(data).glob(f"{name}*.jsonl"))
    if len(found) != 1:
        came = ", ".join(path.name for path in found) or "none"
        raise HeadwiseError(
            f"{data} must hold one file {name}*.jsonl for the task {name}, found {came}."
        )
    (path,) = found
    rows = _questions(path, LOCAL_TASKS[name].form)
    if len(rows[:limit]) < 2:
        raise HeadwiseError(f"{path} must hold at least 2 questions for a standard error.")
    return TaskQuestions(name, path.name, limit, tuple(rows[:limit]))


def _questions(path: Path, form: Form) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(read_file(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        row = parse_json(line, where, advice="check the file")
        if not isinstance(row, dict):
            raise HeadwiseError(f"{where} must be a JSON object; check the file.")
        for key, kind in _KEYS[form].items():
            value = row.get(key)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise HeadwiseError(
                    f"{where} must have {key!r} as a {kind.__name__}, got {quoted(value)}."
                )
        options = row.get("choices", row.get("context_options"))
        if options is not None and not 0 <= row["gold"] < len(options):
            raise HeadwiseError(
                f"{where}: gold must be from 0 to {len(options) - 1}, got {row['gold']}."
            )
        rows.append({key: row[key] for key in _KEYS[form]})
    return rows


@dataclass(frozen=True, slots=True)
class TaskAnswers:
    """A model's result on each question, by the question's number."""

    metric: str
    right: Mapping[int, float]  # of "mcc" the predicted label, of "spearman" the likeness


def _probe_result(task: TaskQuestions, cut: TaskAnswers, dense: TaskAnswers) -> TaskResult:
    """Metrics that are not means: their standard errors come from bootstrap resamples."""
    assert task.probe is not None
    labels, metric = task.probe.test.labels, cut.metric
    own, other = (np.array(list(one.right.values())) for one in (cut, dense))
    drawn = resampled(metric, (own, other), labels)
    errors = [float(x.std(ddof=1)) for x in (*drawn, drawn[0] - drawn[1])]
    found = [statistic(metric, x, labels) for x in (own, other)]
    right = [x == labels for x in (own, other)] if metric == "mcc" else None
    return TaskResult(
        name=task.name,
        source=task.source,
        metric=metric,
        questions=len(labels),
        dense=found[1],
        dense_stderr=errors[1],
        cut=found[0],
        cut_stderr=errors[0],
        difference=found[0] - found[1],
        difference_stderr=errors[2],
        gained=None if right is None else int((right[0] & ~right[1]).sum()),
        lost=None if right is None else int((~right[0] & right[1]).sum()),
    )


def task_result(name: str, source: str, cut: TaskAnswers, dense: TaskAnswers) -> TaskResult:
    """Means with their standard errors, and the difference of pairs with its own."""
    if cut.right.keys() != dense.right.keys() or len(cut.right) < 2:
        raise HeadwiseError(f"{name}: both models must answer the same questions, at least 2.")
    numbers = sorted(cut.right)
    own, other = ([one.right[n] for n in numbers] for one in (cut, dense))
    differences = [a - b for a, b in zip(own, other, strict=True)]
    return TaskResult(
        name=name,
        source=source,
        metric=cut.metric,
        questions=len(numbers),
        dense=statistics.fmean(other),
        dense_stderr=_stderr(other),
        cut=statistics.fmean(own),
        cut_stderr=_stderr(own),
        difference=statistics.fmean(differences),
        difference_stderr=_stderr(differences),
        gained=sum(d > 0 for d in differences),
        lost=sum(d < 0 for d in differences),
    )


def task_results(
    tasks: Sequence[TaskQuestions], cut: Sequence[TaskAnswers], dense: Sequence[TaskAnswers]
) -> tuple[TaskResult, ...]:
    """Every task, answered by both models."""
    return tuple(
        task_result(task.name, task.source, own, other)
        if own.metric not in ("mcc", "spearman")
        else _probe_result(task, own, other)
        for task, own, other in zip(tasks, cut, dense, strict=True)
    )


def answer_tasks(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[TaskQuestions],
    progress: Progress = silent,
) -> tuple[TaskAnswers, ...]:
    """A model's answers to every task."""
    found = []
    for done, task in enumerate(tasks, 1):
        found.append(_answers(model, tokenizer, task))
        progress("tasks", done, len(tasks))
    return tuple(found)


def _stderr(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def _answers(model: Any, tokenizer: PreTrainedTokenizerBase, task: TaskQuestions) -> TaskAnswers:
    if task.probe is not None:
        outcomes = probe_outcomes(task.name, model, tokenizer, task.probe)
        return TaskAnswers(PROBES[task.name].metric, dict(enumerate(outcomes)))
    with _quiet():
        import lm_eval  # type: ignore[import-untyped]
        from lm_eval.models.huggingface import HFLM  # type: ignore[import-untyped]

        known = LOCAL_TASKS.get(task.name)
        config: str | dict[str, Any] = (known and known.lm_eval) or task.name
        if task.questions is not None:
            config = _config(task)
        try:
            found = lm_eval.simple_evaluate(
                HFLM(pretrained=model, tokenizer=tokenizer, batch_size=_BATCH),
                tasks=[config],
                limit=task.limit,
                bootstrap_iters=0,
                log_samples=True,
                verbosity="ERROR",
            )
        except (KeyError, ValueError, OSError, ConnectionError) as error:
            raise HeadwiseError(
                f"lm-eval cannot run the task {quoted(task.name)} ({quoted(error)}); check its "
                "name, or give its questions with --task-data."
            ) from error
    assert found is not None
    (samples,) = found["samples"].values()
    metric = next((m for m in _METRICS if m in samples[0]), None)
    if metric is None:
        raise HeadwiseError(f"the task {task.name} has none of the metrics {', '.join(_METRICS)}.")
    return TaskAnswers(metric, {int(s["doc_id"]): float(s[metric]) for s in samples})


def _config(task: TaskQuestions) -> dict[str, Any]:
    """A local task as an lm-eval config."""
    import datasets  # type: ignore[import-untyped]

    local, rows = LOCAL_TASKS[task.name], list(task.questions or ())
    common: dict[str, Any] = {
        "task": f"headwise_{task.name}",
        "custom_dataset": lambda **_: {"validation": datasets.Dataset.from_list(rows)},
        "validation_split": "validation",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc"}, *([{"metric": "acc_norm"}] if local.normed else [])],
    }
    match local.form:
        case "last word":
            return common | {
                "output_type": "loglikelihood",
                "doc_to_text": lambda doc: doc["context"],
                "doc_to_target": lambda doc: " " + doc["continuation"],
                "target_delimiter": "",
            }
        case "choices":
            return common | {
                "output_type": "multiple_choice",
                "doc_to_text": lambda doc: doc["query"] + local.after,
                "doc_to_choice": lambda doc: doc["choices"],
                "doc_to_target": lambda doc: doc["gold"],
            }
        case "contexts":
            return common | {
                "output_type": "multiple_choice",
                "doc_to_text": lambda doc: doc["gold"],
                "doc_to_choice": lambda doc: doc["context_options"],
                "doc_to_target": lambda doc: doc["continuation"],
            }


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress lm-eval's progress bars, logs and warnings, and undo its changes to the seeds."""
    import random

    import torch
    from transformers.utils import logging as transformers_logging

    state, numbers = random.getstate(), np.random.get_state()
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)
        logging.disable(before)
        if bars:
            transformers_logging.enable_progress_bar()
