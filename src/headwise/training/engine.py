"""A job on its processes, and what one step does.

    batches(step) ─► this process's slice ─► micro-batches ─► loss ─► backward
                                                                        │ (mean over processes)
                              held-out loss ◄─ AdamW ◄─ clip ◄─ finite? ◄┘

Random numbers (dropout) are seeded anew at each step from (seed, step, process), so the step
number is all the state they have. The mean over equal parts is the mean over the global batch, so
neither the number of processes nor `accumulate` changes what is computed beyond rounding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.errors import HeadwiseError
from headwise.training.checkpoint import (
    Progress,
    newest_whole,
    restore_checkpoint,
    save_checkpoint,
    steps_on_disk,
)
from headwise.training.losses import Loss
from headwise.training.metrics import StepRecord, append_row, drop_rows_after
from headwise.training.optimizer import adamw, trained_parameters
from headwise.training.processes import on_main
from headwise.training.run_folder import RunFolder
from headwise.training.schedule import learning_rate
from headwise.training.settings import TrainSettings

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from torch import Tensor, nn

    from headwise.training.batches import Batch


class DivergenceError(HeadwiseError):
    """The loss or its gradient stopped being a number."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to train, on what. The settings are resolved ones."""

    model: nn.Module
    loss: Loss
    batches: Callable[[int], Batch]
    settings: TrainSettings
    held_out: tuple[Batch, ...] = ()


class Engine:
    """A job on its processes: the wrapped model, its optimizer, and what one step does."""

    def __init__(self, job: Job, processes: Accelerator) -> None:
        self.job, self.processes = job, processes
        self.bare = job.model.to(processes.device)
        self.parameters = list(trained_parameters(self.bare).values())
        self.optimizer = adamw(self.bare, job.settings)
        self.model = processes.prepare(self.bare)

    def restored(self, folder: RunFolder | None, note: Callable[[str], None]) -> Progress:
        """Go back to the newest whole checkpoint, if there is one."""
        if folder is None:
            return Progress()
        heard = note if self.processes.is_main_process else lambda _: None
        found = newest_whole(folder.checkpoints, heard)
        if found:
            restore_checkpoint(found[0], self.bare, self.optimizer)
        progress = found[1] if found else Progress()
        on_main(self.processes, lambda: drop_rows_after(folder.metrics, progress.step))
        return progress

    def updated(
        self, index: int, folder: RunFolder | None
    ) -> tuple[dict[str, float], float, float]:
        """One optimizer step: the loss and scalars over the global batch, the rate, the norm."""
        settings, rank = self.job.settings, self.processes.process_index
        _seed(settings.seed, index, rank)
        self.model.train()
        lr = learning_rate(index, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["scale"]
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
        norm = float(self.processes.clip_grad_norm_(self.parameters, settings.clip))
        _check_finite({**values, "gradient norm": norm}, index + 1, folder)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return values, lr, norm

    def held_out_loss(self, step: int, folder: RunFolder | None) -> float | None:
        """The mean loss over the held-out batches, weighted by their rows."""
        import torch

        if not self.job.held_out:
            return None
        total = torch.zeros(2, dtype=torch.float64)
        self.model.eval()
        with torch.no_grad(), self._autocast():
            rank, world = self.processes.process_index, self.processes.num_processes
            for batch in self.job.held_out[rank::world]:
                mean, _ = self.job.loss(self.bare, self._placed(batch))
                rows = len(next(iter(batch.values())))
                total += torch.tensor([float(mean) * rows, rows], dtype=torch.float64)
        total = total.float() if self.processes.device.type == "mps" else total
        summed = self.processes.reduce(total.to(self.processes.device), "sum")
        loss = float(summed[0] / summed[1])
        _check_finite({"held-out loss": loss}, step, folder)
        return loss

    def agreed_signal(self, number: int) -> int:
        """The largest signal any process received; all stop at the same step."""
        if self.processes.num_processes == 1:
            return number
        import torch

        heard = torch.tensor([number], device=self.processes.device)
        return int(self.processes.gather(heard).max())

    def write(
        self, folder: RunFolder | None, record: StepRecord, progress: Progress | None
    ) -> None:
        """The row of a step, and its checkpoint where one is due."""
        if folder is None:
            return

        def action() -> None:
            append_row(folder.metrics, record)
            if progress is not None:
                keep = self.job.settings.keep
                save_checkpoint(folder.checkpoints, self.bare, self.optimizer, progress, keep=keep)

        if progress is not None:
            on_main(self.processes, action)
        elif self.processes.is_main_process:
            action()

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


def _check_finite(values: dict[str, float], step: int, folder: RunFolder | None) -> None:
    odd = {name: value for name, value in values.items() if not math.isfinite(value)}
    if not odd:
        return
    name, value = next(iter(odd.items()))
    saved = steps_on_disk(folder.checkpoints) if folder else []
    kept = f"the last good state is {saved[-1]}" if saved else "no checkpoint was due before it"
    raise DivergenceError(
        f"the {name} was {value} at step {step}, so training stopped; {kept}; try a lower --lr, a "
        "longer --warmup or a smaller --clip in a new run."
    )
