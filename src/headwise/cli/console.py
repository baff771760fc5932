"""How every verb speaks: results on stdout, messages on stderr, errors as one sentence."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headwise.errors import HeadwiseError, printable
from headwise.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

EVERY_SECONDS = 20.0  # between plain lines of progress
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
ForceFlag = Annotated[bool, typer.Option("--force", help="Overwrite an existing output.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Also draw it: a .png, .svg or .html file.")
]


def out() -> Console:
    """The console for results."""
    from rich.console import Console

    return Console(highlight=False, emoji=False)


def err() -> Console:
    """The console for messages."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, emoji=False)


def say(message: str) -> None:
    """A message to the person, on stderr."""
    err().print(printable(message), soft_wrap=True, markup=False)


def show(document: dict[str, Any], *, as_json: bool, render: RenderableType | str) -> None:
    """The result: one JSON document, or what people read."""
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
    """What is shown, with nothing in it that a terminal would obey instead of show."""
    from rich.console import ConsoleOptions, RenderResult
    from rich.segment import Segment

    class Cleaned:
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for segment in console.render(render, options):
                yield Segment(printable(segment.text), segment.style)

    return printable(render) if isinstance(render, str) else Cleaned()


def draw(path: Path, chart: Callable[[ModuleType], Any], *, force: bool) -> None:
    """Draw a chart of `headwise.reporting.charts`; called before the result is shown."""
    from headwise.reporting import charts

    charts.save_chart(chart(charts), path, force=force)
    say(f"Wrote {path}.")


@contextlib.contextmanager
def shown() -> Iterator[Progress]:
    """Long work while it runs, on stderr: a bar on a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        spoken = time.monotonic()

        def line(what: str, done: int, total: int) -> None:
            nonlocal spoken
            if time.monotonic() - spoken >= EVERY_SECONDS:
                spoken = time.monotonic()
                say(f"{what}: {done} of {total}")

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=err(), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def bar(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield bar


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of `choices`."""
    if value not in choices:
        raise HeadwiseError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")


def quiet_transformers() -> None:
    """No bars and no advice from transformers; its errors are still raised."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def read_text(path: Path, what: str) -> str:
    """The text of a file the user named."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise HeadwiseError(f"{path} does not exist; give the path of {what}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise HeadwiseError(f"{path} cannot be read as {what} ({error}); check it.") from error


def command_line() -> str:
    """The command as typed, for provenance."""
    import shlex

    return shlex.join(["headwise", *sys.argv[1:]])
