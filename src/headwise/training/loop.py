"""The one training loop, for training from scratch and for recovery after a cut.

    batches(step) ─► this process's slice ─► micro-batches ─► loss ─► backward
                                                                        │ (mean over processes)
             row, checkpoint ◄─ held-out loss ◄─ AdamW ◄─ clip ◄─ finite? ◄┘

It takes a model, a loss, batches that are a pure function of the step, and settings; it trains
the parameters that require gradients. With a run folder it writes a metrics row per step and
atomic checkpoints, and resumes from the newest one. A resumed run equals an uninterrupted one,
bit for bit on one CPU process.

Random numbers (dropout) are seeded at each step from (seed, step, process), so the step
number is their only state. The mean over equal parts is the mean over the global batch, so
neither the number of processes nor `accumulate` changes the result beyond rounding.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.devices import Interruption, interruptions, on_main
from headwise.errors import HeadwiseError
from headwise.progress import Progress, note
from headwise.training.batches import Batch, Loss
from headwise.training.checkpoint import (
    CheckpointContent,
    Position,
    RunFolder,
    StepRecord,
    append_row,
    checkpoint_content,
    checkpoints_in,
    drop_older,
    drop_rows_after,
    newest_whole,
    restore_checkpoint,
    save_checkpoint,
)
from headwise.training.optimizer import adamw, set_learning_rate, trained_parameters
from headwise.training.settings import TrainSettings
from headwise.training.sharding import shard_model, unshard_model, whole_tensor

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from torch import Tensor, nn


class DivergenceError(HeadwiseError):
    """The loss or its gradient stopped being a number."""


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """The model, loss, batches and resolved settings of a training run."""

    model: nn.Module
    loss: Loss
    batches: Callable[[int], Batch]
    settings: TrainSettings
    held_out: tuple[Batch, ...] = ()
    shard: bool = False  # split the model over the processes


class Observer:
    """Receives events of a run in its first process; the methods do nothing unless overridden."""

    def began(self, position: Position, settings: TrainSettings) -> None:
        """The run starts, or resumes, after `position`."""

    def stepped(self, record: StepRecord) -> None:
        """A step is done and its row written."""

    def noted(self, message: str) -> None:
        """Something a person should know."""


class ProgressObserver(Observer):
    """Reports each step as progress, with its loss and speed as the detail."""

    def __init__(self, progress: Progress, what: str) -> None:
        self.progress, self.what = progress, what
        self.steps, self.held_out = 0, ""

    def began(self, position: Position, settings: TrainSettings) -> None:
        """Say where a run resumes."""
        self.steps = settings.steps
        if position.step:
            note(self.progress, f"Resuming after step {position.step} of {settings.steps}.")

    def stepped(self, record: StepRecord) -> None:
        """Report the newest numbers."""
        if record.held_out_loss is not None:
            self.held_out = f" · held out {record.held_out_loss:.4f}"
        speed = f"{record.tokens_per_second:,.0f} tokens/s"
        detail = f"loss {record.loss:.4f}{self.held_out} · {speed}"
        self.progress(f"{self.what}: {detail}", record.step, self.steps)

    def noted(self, message: str) -> None:
        """Pass a message on."""
        note(self.progress, message)


@dataclass(frozen=True, slots=True)
class LoopResult:
    """How a run ended: finished (signal 0), or interrupted by a signal."""

    position: Position
    last: StepRecord | None
    signal: int = 0


def train_model(
    job: TrainingJob,
    processes: Accelerator,
    *,
    folder: RunFolder | None = None,
    observer: Observer | None = None,
) -> LoopResult:
    """Train the job's model in place; with a folder, resume from its newest checkpoint."""
    import torch

    watcher = observer or Observer()
    check_division(job.settings, processes.num_processes)
    devices = [torch.cuda.current_device()] if processes.device.type == "cuda" else []
    with torch.random.fork_rng(devices), interruptions() as interruption:
        engine = _Engine(job, processes, folder)
        position = engine.restore(watcher.noted)
        if processes.is_main_process:
            watcher.began(position, job.settings)
        result = _steps(engine, position, watcher, interruption)
        if job.shard:
            unshard_model(engine.bare, keep=processes.is_main_process)
        return result


def _steps(
    engine: _Engine, position: Position, watcher: Observer, interruption: Interruption
) -> LoopResult:
    settings, record = engine.job.settings, None
    started = time.perf_counter() - position.seconds
    for index in range(position.step, settings.steps):
        before = time.perf_counter()
        values, lr, grad_norm = engine.update(index)
        taken = time.perf_counter() - before
        done, last = index + 1, index + 1 == settings.steps
        validate = done % settings.eval_every == 0 or last
        held_out = engine.held_out_loss(done) if validate else None
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
        position = Position(step=done, seconds=record.seconds)
        stop = engine.agreed_signal(interruption.signal)
        save = done % settings.save_every == 0 or last or bool(stop)
        engine.write(record, position if save else None)
        if engine.processes.is_main_process:
            watcher.stepped(record)
        if stop and not last:
            return LoopResult(position, record, stop)
    return LoopResult(position, record)


def check_division(settings: TrainSettings, world: int) -> None:
    """Refuse a global batch that cannot be divided into equal parts."""
    if settings.batch_size % (world * settings.accumulate):
        raise HeadwiseError(
            f"batch-size must be a multiple of processes × accumulate = {world} × "
            f"{settings.accumulate}, got {settings.batch_size}; change one of them."
        )


class _Engine:
    """A job on its processes: the wrapped model, its optimizer, and what one step does."""

    def __init__(self, job: TrainingJob, processes: Accelerator, folder: RunFolder | None) -> None:
        self.job, self.processes, self.folder = job, processes, folder
        self.split = job.shard and processes.num_processes > 1
        self.bare = (
            shard_model(job.model, processes) if self.split else job.model.to(processes.device)
        )
        self.parameters = list(trained_parameters(self.bare).values())
        self.optimizer = adamw(self.bare, job.settings)
        self.model = self.bare if self.split else processes.prepare(self.bare)

    def restore(self, note: Callable[[str], None]) -> Position:
        """Go back to the newest whole checkpoint, if there is one."""
        folder = self.folder
        if folder is None:
            return Position()
        heard = note if self.processes.is_main_process else lambda _: None
        found = newest_whole(folder.checkpoints, heard)
        position = Position()
        if found:
            path, position = found
            restore_checkpoint(path, self.bare, self.optimizer)

        def tidy() -> None:
            """Finish what a killed run left undone."""
            drop_rows_after(folder.metrics, position.step)
            if found:
                drop_older(found[0], keep=self.job.settings.keep)

        on_main(self.processes, tidy)
        return position

    def update(self, index: int) -> tuple[dict[str, float], float, float]:
        """One optimizer step: the loss and scalars over the global batch, the rate, the norm."""
        import torch

        settings, rank = self.job.settings, self.processes.process_index
        _seed(settings.seed, index, rank)
        self.model.train()
        lr = set_learning_rate(self.optimizer, index, settings)
        parts = list(self._micro_batches(self.job.batches(index)))
        sums: dict[str, Tensor] = {}
        for i, part in enumerate(parts):
            synced = i == len(parts) - 1
            with contextlib.nullcontext() if synced else self.processes.no_sync(self.model):
                with self._autocast():
                    loss, scalars = self.job.loss(self.model, part)
                self.processes.backward(loss / len(parts))
            for name, value in {"loss": loss, **scalars}.items():
                sums[name] = sums.get(name, 0) + value.detach().float() / len(parts)
        values = self._mean_over_processes(sums)
        clipped = torch.nn.utils.clip_grad_norm_(self.parameters, settings.clip)
        norm = float(whole_tensor(clipped))
        self._check_finite({**values, "gradient norm": norm}, index + 1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return values, lr, norm

    def held_out_loss(self, step: int) -> float | None:
        """The mean loss over the held-out batches, weighted by their rows."""
        import torch

        if not self.job.held_out:
            return None
        total = torch.zeros(2, dtype=torch.float64)
        self.model.eval()
        with torch.no_grad(), self._autocast():
            rank, world = self.processes.process_index, self.processes.num_processes
            # A split model runs in all processes at once, so each takes all batches.
            own = self.job.held_out if self.split else self.job.held_out[rank::world]
            for batch in own:
                mean, _ = self.job.loss(self.bare, self._placed(batch))
                rows = len(next(iter(batch.values())))
                total += torch.tensor([float(mean) * rows, rows], dtype=torch.float64)
        total = total.float() if self.processes.device.type == "mps" else total
        summed = self.processes.reduce(total.to(self.processes.device), "sum")
        loss = float(summed[0] / summed[1])
        self._check_finite({"held-out loss": loss}, step)
        return loss

    def agreed_signal(self, number: int) -> int:
        """The largest signal any process received; all stop at the same step."""
        if self.processes.num_processes == 1:
            return number
        import torch

        heard = torch.tensor([number], device=self.processes.device)
        return int(self.processes.gather(heard).max())

    def write(self, record: StepRecord, position: Position | None) -> None:
        """Write the row of a step, and its checkpoint where one is due."""
        folder = self.folder
        if folder is None:
            return

        content: CheckpointContent | None = None
        if position is not None:  # every process gives its part of what is split
            content = checkpoint_content(
                self.bare, self.optimizer, position, keep=self.processes.is_main_process
            )

        def action() -> None:
            append_row(folder.metrics, record)
            if content is not None:
                save_checkpoint(folder.checkpoints, content, keep=self.job.settings.keep)

        if position is not None:
            on_main(self.processes, action)
        elif self.processes.is_main_process:
            action()

    def _check_finite(self, values: dict[str, float], step: int) -> None:
        wrong = {name: value for name, value in values.items() if not math.isfinite(value)}
        if not wrong:
            return
        name, value = next(iter(wrong.items()))
        saved = checkpoints_in(self.folder.checkpoints) if self.folder else []
        kept = f"the last good state is {saved[-1]}" if saved else "no checkpoint was saved before"
        raise DivergenceError(
            f"the {name} was {value} at step {step}, so training stopped; {kept}; try a lower "
            "--lr, a longer --warmup or a smaller --clip in a new run."
        )

    def _micro_batches(self, batch: Batch) -> Iterator[Batch]:
        """This process's slice of the global batch, in `accumulate` equal parts."""
        parts = self.processes.num_processes * self.job.settings.accumulate
        first = self.processes.process_index * self.job.settings.accumulate
        for i in range(first, first + self.job.settings.accumulate):
            cut = {
                n: t[i * (len(t) // parts) : (i + 1) * (len(t) // parts)] for n, t in batch.items()
            }
            yield self._placed(cut)

    def _placed(self, batch: Batch) -> Batch:
        return {n: t.to(self.processes.device) for n, t in batch.items()}

    def _autocast(self) -> Any:
        import torch

        return torch.autocast(
            self.processes.device.type, torch.bfloat16, enabled=self.job.settings.dtype == "bf16"
        )

    def _mean_over_processes(self, sums: dict[str, Tensor]) -> dict[str, float]:
        import torch

        stacked = self.processes.reduce(torch.stack(list(sums.values())), "mean")
        return dict(zip(sums, stacked.tolist(), strict=True))


def _seed(seed: int, step: int, rank: int) -> None:
    import torch

    state = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]) >> 1)
