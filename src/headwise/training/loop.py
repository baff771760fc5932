"""The one training loop: from scratch, recovery after a cut and single-head students all use it.

It takes a model, a loss, batches that are a pure function of the step, and settings; it trains
the parameters that require gradients. With a run folder it writes a metrics row per step and
atomic checkpoints, and goes on from the newest one; a run that went on is the run that never
stopped, bit for bit on one CPU process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwise.errors import HeadwiseError
from headwise.training.checkpoint import Progress
from headwise.training.engine import Engine, Job
from headwise.training.interruption import Interruption, interruptions
from headwise.training.metrics import StepRecord
from headwise.training.run_folder import RunFolder
from headwise.training.settings import TrainSettings

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


class Observer:
    """Hears of a run in its first process; every method does nothing unless overridden."""

    def began(self, progress: Progress, settings: TrainSettings) -> None:
        """The run starts, or goes on, after `progress`."""

    def stepped(self, record: StepRecord) -> None:
        """A step is done and its row written."""

    def noted(self, message: str) -> None:
        """Something a person should know."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: all its steps done, or interrupted by a signal (else 0)."""

    progress: Progress
    last: StepRecord | None
    signal: int = 0


def run(
    job: Job,
    processes: Accelerator,
    *,
    folder: RunFolder | None = None,
    observer: Observer | None = None,
) -> Outcome:
    """Train the job's model in place; with a folder, go on from its newest checkpoint."""
    import torch

    watcher = observer or Observer()
    check_division(job.settings, processes.num_processes)
    devices = [torch.cuda.current_device()] if processes.device.type == "cuda" else []
    with torch.random.fork_rng(devices), interruptions() as interruption:
        engine = Engine(job, processes)
        progress = engine.restored(folder, watcher.noted)
        if processes.is_main_process:
            watcher.began(progress, job.settings)
        return _steps(engine, folder, progress, watcher, interruption)


def _steps(
    engine: Engine,
    folder: RunFolder | None,
    progress: Progress,
    watcher: Observer,
    interruption: Interruption,
) -> Outcome:
    settings, record = engine.job.settings, None
    started = time.perf_counter() - progress.seconds
    for index in range(progress.step, settings.steps):
        before = time.perf_counter()
        values, lr, grad_norm = engine.updated(index, folder)
        taken = time.perf_counter() - before
        done, last = index + 1, index + 1 == settings.steps
        validate = done % settings.eval_every == 0 or last
        held_out = engine.held_out_loss(done, folder) if validate else None
        record = StepRecord(
            step=done,
            loss=values.pop("loss"),
            lr=lr,
            grad_norm=grad_norm,
            tokens=done * settings.tokens_per_step,
            seconds=time.perf_counter() - started,
            tokens_per_second=settings.tokens_per_step / taken,
            held_out_loss=held_out,
            scalars=values,
        )
        progress = Progress(step=done, seconds=record.seconds)
        stop = engine.agreed_signal(interruption.signal)
        save = done % settings.save_every == 0 or last or bool(stop)
        engine.write(folder, record, progress if save else None)
        if engine.processes.is_main_process:
            watcher.stepped(record)
        if stop and not last:
            return Outcome(progress, record, stop)
    return Outcome(progress, record)


def check_division(settings: TrainSettings, world: int) -> None:
    """Refuse a global batch that has no equal parts."""
    if settings.batch_size % (world * settings.accumulate):
        raise HeadwiseError(
            f"batch-size must be a multiple of processes × accumulate = {world} × "
            f"{settings.accumulate}, got {settings.batch_size}; change one of them."
        )
