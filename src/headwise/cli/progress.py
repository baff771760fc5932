"""Long work while it runs, on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from headwise.cli.console import err, say
from headwise.errors import printable

EVERY_SECONDS = 20.0  # between plain lines

Tick = Callable[[int, int], None]  # done, in all


class Shown:
    """A task whose state is a count, a total and a few words."""

    def __init__(self, label: str, bar: Any = None) -> None:
        self.label, self.bar = label, bar
        self.task = None if bar is None else bar.add_task(label, total=None, words="")
        self.spoken = time.monotonic()

    def update(self, done: int, total: int, words: str = "") -> None:
        """Show the state; without a bar, only when some time has passed."""
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total, words=printable(words))
            return
        now = time.monotonic()
        if now - self.spoken >= EVERY_SECONDS:
            self.spoken = now
            say(f"{self.label}: {done} of {total} {words}".rstrip())

    def report(self, what: str, done: int, total: int) -> None:
        """Show what the library reports (`headwise.progress.Progress`)."""
        self.update(done, total, what)

    def note(self, message: str) -> None:
        """A message above the bar."""
        if self.bar is not None:
            self.bar.console.print(printable(message), markup=False, soft_wrap=True)
        else:
            say(message)


@contextlib.contextmanager
def shown(label: str) -> Iterator[Shown]:
    """Show a task until it ends."""
    if not sys.stderr.isatty():
        yield Shown(label)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}", markup=False),  # names may hold brackets
    )
    with Progress(*columns, console=err(), transient=True) as bar:
        yield Shown(label, bar)
