"""Output of all commands: results on stdout, messages on stderr, errors as one sentence.

Of several processes (torchrun), only the first one prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from headwise.errors import printable
from headwise.progress import Progress, silent

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

EVERY_SECONDS = 20.0  # between plain lines of progress


def is_first() -> bool:
    """Whether this is the process that prints; torchrun starts several."""
    return os.environ.get("RANK", "0") == "0" or not os.environ["RANK"].isdecimal()


def out() -> Console:
    """The console for results."""
    from rich.console import Console

    return Console(highlight=False, emoji=False)


def err() -> Console:
    """The console for messages."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, emoji=False)


def say(message: str) -> None:
    """Print a message on stderr."""
    if is_first():
        err().print(printable(message), soft_wrap=True, markup=False)


def show(document: dict[str, Any], *, as_json: bool, render: RenderableType | str) -> None:
    """Print the result: one JSON document, or text for people."""
    if not is_first():
        return
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    else:
        out().print(_cleaned(render), markup=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """A titled table; columns whose name starts with `>` are aligned to the right."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    body = Table()
    for name in columns:
        justify: Literal["left", "right"] = "right" if name.startswith(">") else "left"
        body.add_column(Text(printable(name.removeprefix(">"))), justify=justify)
    for row in rows:
        # Never markup: names and paths may hold brackets.
        body.add_row(*(Text(printable(cell)) for cell in row))
    return Group(Text(printable(title), style="bold"), body)


def _cleaned(render: RenderableType | str) -> RenderableType:
    """The output without control characters that a terminal would execute."""
    from rich.console import ConsoleOptions, RenderResult
    from rich.segment import Segment

    class Cleaned:
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for segment in console.render(render, options):
                yield Segment(printable(segment.text), segment.style)

    return printable(render) if isinstance(render, str) else Cleaned()


def draw(
    path: Path,
    chart: Callable[[ModuleType], Any],
    *,
    force: bool,
    inputs: Sequence[Path | str] = (),
) -> None:
    """Draw a chart of `headwise.reporting.charts`; called before the result is shown."""
    from headwise.reporting import charts

    charts.save_chart(chart(charts), path, force=force, inputs=inputs)
    say(f"Wrote {path}.")


@contextlib.contextmanager
def stderr_progress() -> Iterator[Progress]:
    """Show progress on stderr: a bar on a terminal, otherwise an occasional line."""
    if not is_first():
        yield silent
        return
    if not sys.stderr.isatty():
        spoken = time.monotonic()

        def line(what: str, done: int, total: int) -> None:
            nonlocal spoken
            if total == 0:
                say(what)
            elif time.monotonic() - spoken >= EVERY_SECONDS:
                spoken = time.monotonic()
                stage, _, detail = what.partition(": ")
                say(f"{stage}: {done} of {total} {detail}".rstrip())

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),  # names may hold brackets
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
    )
    with Bars(*columns, console=err(), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def bar(what: str, done: int, total: int) -> None:
            stage, _, detail = printable(what).partition(": ")
            if total == 0:
                bars.console.print(printable(what), markup=False, soft_wrap=True)
                return
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, detail="")
            bars.update(tasks[stage], completed=done, total=total, detail=detail)

        yield bar


def quiet_transformers() -> None:
    """Turn off progress bars and advice from transformers; errors are still raised."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def command_line() -> str:
    """The command as typed, for provenance."""
    return shlex.join(["headwise", *sys.argv[1:]])
