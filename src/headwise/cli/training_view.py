"""A training run as it is watched: loss, tokens per second, time left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headwise.cli.progress import Shown, shown
from headwise.training.loop import Observer

if TYPE_CHECKING:
    from headwise.training.checkpoint import Position, StepRecord
    from headwise.training.settings import TrainSettings


class TrainingView(Observer):
    """Shows each step on stderr."""

    def __init__(self, progress: Shown) -> None:
        self.progress, self.steps = progress, 0
        self.held_out = ""

    def began(self, position: Position, settings: TrainSettings) -> None:
        """Say where a run resumes."""
        self.steps = settings.steps
        if position.step:
            self.progress.note(f"Resuming after step {position.step} of {settings.steps}.")

    def stepped(self, record: StepRecord) -> None:
        """Show the newest numbers."""
        if record.held_out_loss is not None:
            self.held_out = f" · held out {record.held_out_loss:.4f}"
        words = f"loss {record.loss:.4f}{self.held_out} · {record.tokens_per_second:,.0f} tokens/s"
        self.progress.update(record.step, self.steps, words)

    def prepared(self, what: str, done: int, total: int) -> None:
        """Show how far the work before the first step is."""
        self.progress.update(done, total, what)

    def noted(self, message: str) -> None:
        """Pass a message on."""
        self.progress.note(message)


@contextlib.contextmanager
def training_view(main: bool) -> Iterator[Observer]:
    """The view in the first process; the others show nothing."""
    if not main:
        yield Observer()
        return
    with shown("training") as progress:
        yield TrainingView(progress)
