"""Training from scratch: the loop on a prepared run folder, and the finished model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.artifacts import atomic_folder, sha256
from headwise.errors import HeadwiseError
from headwise.plan import Plan
from headwise.training.batches import WindowBatches, held_out_batches
from headwise.training.engine import DivergenceError, Job
from headwise.training.loop import Observer, Outcome, run
from headwise.training.losses import next_token_loss
from headwise.training.metrics import read_rows
from headwise.training.preparation import STREAMS, built_model
from headwise.training.processes import on_main
from headwise.training.run_folder import RunFolder
from headwise.training.settings import TrainSettings

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


def train_prepared(
    folder: RunFolder, settings: TrainSettings, processes: Accelerator, observer: Observer
) -> Outcome:
    """Train, or go on training, the run in `folder`; the finished model lands in its model/."""
    on_main(processes, lambda: _begin(folder, settings))
    job = _job(folder, settings)
    try:
        outcome = run(job, processes, folder=folder, observer=observer)
    except DivergenceError as error:
        reason = str(error)
        on_main(processes, lambda: folder.update_record(status="diverged", reason=reason))
        raise
    on_main(processes, lambda: _conclude(folder, job, outcome))
    return outcome


def _begin(folder: RunFolder, settings: TrainSettings) -> None:
    """Before (re)starting: the tokens are intact, leftovers are gone, the record says running."""
    record = folder.read_record()
    for name, expected in record["tokens_sha256"].items():
        path = folder.tokens / name
        if not path.is_file() or sha256(path) != expected:
            raise HeadwiseError(
                f"{path} is missing or damaged, so the run cannot go on to the same result; "
                "restore it, or start again with --force."
            )
    folder.sweep()
    folder.update_record(status="running", settings=settings.to_dict())


def _job(folder: RunFolder, settings: TrainSettings) -> Job:
    if not folder.record.exists():
        raise HeadwiseError(
            f"{folder.path} is not visible to every process; put the run on shared storage."
        )
    plan = Plan.from_json(folder.plan.read_text(encoding="utf-8"), str(folder.plan))
    train, held_out = (np.load(folder.tokens / name, mmap_mode="r") for name in STREAMS)
    assert settings.context is not None
    return Job(
        model=built_model(plan, folder.read_record()["special_tokens"], seed=settings.seed),
        loss=next_token_loss,
        batches=WindowBatches(
            train,
            context=settings.context,
            batch_size=settings.batch_size,
            seed=settings.seed,
        ),
        settings=settings,
        held_out=held_out_batches(
            held_out,
            context=settings.context,
            batch_size=max(1, settings.batch_size // settings.accumulate),
            most=settings.eval_windows,
        ),
    )


def _conclude(folder: RunFolder, job: Job, outcome: Outcome) -> None:
    """Save the finished model and say in the record how the run ended."""
    rows = read_rows(folder.metrics)  # a run killed after its last step has no newer record
    last = rows[-1] if rows else None
    if outcome.signal:
        folder.update_record(status="interrupted", last=last)
        return
    save_model(job.model, folder.tokenizer, folder.model)
    folder.update_record(status="finished", last=last)


def save_model(model: Any, tokenizer: Path, path: Path) -> None:
    """Write a Hugging Face folder: model and tokenizer, whole or not at all."""
    with atomic_folder(path, force=True) as temporary:
        model.save_pretrained(temporary)
        for file in tokenizer.iterdir():
            shutil.copyfile(file, temporary / file.name)
