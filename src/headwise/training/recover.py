"""Training after a cut: the cut model learns from the model it was cut from.

By default only the attention projections and the narrowed MLPs are trained (`trained`). The loss is
the divergence from the dense model's predictions, plus a share of the next-token loss. The loop
is the one that trains from scratch: a killed recovery resumes to the same losses, and torchrun
shares the batches.

    OUT.partial/   run.json, metrics.jsonl, checkpoints/; a killed run resumes from the newest
    OUT            the recovered model, there only when it is whole
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.artifacts import versions
from headwise.data.mixture import Mixture, as_mixture
from headwise.data.text import Text
from headwise.data.tokens import token_stream
from headwise.devices import accelerator, on_main
from headwise.errors import HeadwiseError
from headwise.memory import recover_need
from headwise.models.record import CUT_RECORD, CutRecord, RecoveryRecord, read_cut_record
from headwise.progress import silent
from headwise.records import write_record
from headwise.runs import Run, partial_of, resume
from headwise.source import Source, open_source
from headwise.training.batches import Batch, Loss, held_out_batches, mixed_batches
from headwise.training.checkpoint import RunFolder, StepRecord, read_rows
from headwise.training.loop import Observer, TrainingJob, check_division, train_model
from headwise.training.settings import RecoverSettings, Trained, TrainSettings
from headwise.training.sharding import shard_model
from headwise.training.trained import choose_trained, merge_trained

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from torch import nn
    from transformers import PreTrainedModel

KIND = "recover"
SECTION = "recovery"  # of headwise.json
NEXT_TOKEN_SHARE = 0.5  # of the next token's own loss, beside the whole divergence
HELD_OUT_WINDOWS = 32  # of held-out text are tokenised


@dataclass(frozen=True, slots=True)
class RecoverResult:
    """How a recovery ended: with a model in `folder` (signal 0), or interrupted by a signal."""

    folder: Path
    steps: int  # of the whole recovery
    tokens: int  # trained on so far
    loss: float | None
    held_out_loss: float | None
    signal: int = 0


def recover(
    cut: Path | str,
    against: str | Path | PreTrainedModel | Source,
    text: Mixture | Text | str | Sequence[str],
    out: Path | str,
    *,
    settings: RecoverSettings | None = None,
    force: bool = False,
    shard: bool = False,
    observer: Observer | None = None,
    finishing: Callable[[Path], None] | None = None,
    last: Collection[str] = (),
    command: str = "",
) -> RecoverResult:
    """Train the attention of a cut model on the predictions of the model it was cut from.

    `against` is what it was cut from: a folder, hub name, .gguf file or builtin name; `text` is a
    file, a folder, hub:owner/name or builtin:python, or several of them, each with an optional
    weight (0.5:code.txt). A killed recovery of the same inputs is
    resumed. `finishing` may add files to the new folder before it is renamed; `last` are
    files that the caller adds later (see `headwise.runs.resume`). Under torchrun all processes
    call this, and all get the result; `shard` then splits both models over them.
    """
    task, out = _task(cut, against, text, settings), Path(out)
    processes = accelerator(task.settings.device)
    check_division(task.settings, processes.num_processes)
    with contextlib.ExitStack() as held:
        opened: list[Run] = []  # in the first process, which writes
        job: TrainingJob

        def begin() -> bool:
            run = resume(
                out,
                KIND,
                task.inputs,
                record=CUT_RECORD,
                section=SECTION,
                force=force,
                reads=[task.cut.name, task.against.name, *(t.source for t in task.text.texts)],
                last=last,
                command=command,
            )
            opened.append(held.enter_context(run))
            return opened[0].finished

        def conclude() -> StepRecord:
            nonlocal job
            # The row on disk: a recovery killed after its last step has none in memory.
            newest = read_rows(folder.metrics)[-1]
            if not outcome.signal:
                with opened[0].finish() as made:
                    _write(task, job.model, opened[0].key, newest, made)
                    del job  # what finishes may need the memory
                    processes.free_memory()
                    if finishing is not None:
                        finishing(made)
            return newest

        folder, signal = RunFolder(partial_of(out)), 0
        if not on_main(processes, begin):
            sentence = _check_memory(task)
            job = _job(task, processes, shard=shard)
            if sentence and observer is not None:
                observer.noted(sentence)
            outcome = train_model(job, processes, folder=folder, observer=observer)
            newest, signal = on_main(processes, conclude), outcome.signal
    processes.end_training()
    done = newest if signal else read_cut_record(out).recovery
    assert done is not None
    found = (done.tokens, done.loss, done.held_out_loss)
    return RecoverResult(out, task.settings.steps, *found, signal)


@dataclass(frozen=True, slots=True)
class _Task:
    """A cut model, its teacher, a text, and resolved settings."""

    cut: Source
    against: Source
    record: CutRecord
    text: Mixture
    settings: TrainSettings
    train: Trained
    inputs: Mapping[str, Any]


def _task(
    cut: Path | str,
    against: str | Path | PreTrainedModel | Source,
    text: Mixture | Text | str | Sequence[str],
    settings: RecoverSettings | None,
) -> _Task:
    model, teacher = open_source(cut), open_source(against)
    folder = model.folder
    if folder is None or not (folder / CUT_RECORD).is_file():
        came = ", ".join(model.config.architectures or ["another model"])
        raise HeadwiseError(f"{cut} must be a model that headwise cut, got {came}.")
    model.refuse_bidirectional("a recovery")
    mixture = as_mixture(text)
    asked = settings or RecoverSettings()
    resolved = asked.on_this_machine()
    inputs = {
        "model": {"name": model.name, "sha256": model.weights_sha256},
        "against": {"name": teacher.name, "sha256": teacher.weights_sha256},
        "text": {"source": mixture.source, "sha256": mixture.sha256},
        "settings": resolved.to_dict() | {"train": asked.train},
    }
    return _Task(model, teacher, read_cut_record(folder), mixture, resolved, asked.train, inputs)


def _check_memory(task: _Task) -> str:
    """Raise if memory is short; returns the expected peak as a sentence."""
    settings = task.settings
    if settings.device != "cpu" or task.against.folder is None:
        return ""
    tokens = settings.tokens_per_step // settings.accumulate
    need = recover_need(task.cut.plan, task.against.plan, tokens=tokens)
    need.check(silent, advice="use a smaller --batch-size or --length")
    return need.sentence


def _job(task: _Task, processes: Accelerator, *, shard: bool) -> TrainingJob:
    """The cut model, its teacher and the tokens, loaded."""
    settings = task.settings
    assert settings.context is not None
    trained_on, held_out = task.text.split(settings.split)
    model: Any = task.cut.load("causal-lm", device="cpu", dtype="fp32")
    teacher: Any = task.against.load("causal-lm", device="cpu", dtype="fp32")
    tokenizer, known = task.cut.tokenizer, model.get_input_embeddings().weight.size(0)

    def streams(texts: Sequence[Text], most: int) -> list[Any]:
        return [token_stream(tokenizer, t.documents, most=most, vocab_size=known) for t in texts]

    most = settings.steps * settings.tokens_per_step + 2 * settings.context
    tokens = streams(trained_on.texts, most)
    unseen = streams(held_out, HELD_OUT_WINDOWS * settings.context // max(1, len(held_out)))
    choose_trained(model, task.train, seed=settings.seed)
    teacher = teacher.eval().requires_grad_(False)
    teacher = shard_model(teacher, processes) if shard else teacher.to(processes.device)
    sizes = {"context": settings.context, "batch_size": settings.batch_size}
    return TrainingJob(
        model=model,
        loss=divergence_loss(teacher),
        batches=mixed_batches(tokens, trained_on.weights, seed=settings.seed, **sizes),
        settings=settings,
        held_out=tuple(
            batch
            for stream in unseen
            for batch in held_out_batches(
                stream, most=max(1, settings.eval_windows // len(unseen)), **sizes
            )
        ),
        shard=shard,
    )


def divergence_loss(teacher: nn.Module) -> Loss:
    """Divergence of a model's predictions from the teacher's, plus a share of next-token loss."""
    import torch

    from headwise.training.divergence import divergence

    def loss(model: nn.Module, batch: Batch, /) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        with torch.no_grad():
            wanted = teacher(input_ids=batch["input_ids"], use_cache=False).logits
        given = model(input_ids=batch["input_ids"], use_cache=False).logits
        found, kl, nll = divergence(given, wanted, batch["labels"], share=NEXT_TOKEN_SHARE)
        return found, {"kl": kl, "nll": nll}

    return loss


def _write(task: _Task, model: Any, key: str, last: StepRecord, folder: Path) -> None:
    """Write the recovered model in the number format of the cut one, with its other files."""
    stored = next(one.dtype for one in task.cut.checkpoint.stored.values())
    merge_trained(model)
    # A number that came from bf16 goes back to the same bf16: only what was trained changes.
    model.to(stored).save_pretrained(folder)
    task.cut.copy_companions(folder)
    recovery = RecoveryRecord(
        key=key,
        text_sha256=task.text.sha256,
        parts_sha256=task.text.parts_sha256 or None,
        tokens=last.tokens,
        loss=last.loss,
        held_out_loss=last.held_out_loss,
        settings=task.settings.to_dict() | {"train": task.train},
        versions=dict(versions(("headwise", "torch", "transformers", "accelerate"))),
    )
    write_record(folder / CUT_RECORD, task.record.model_copy(update={"recovery": recovery}))
