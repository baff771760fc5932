"""How every verb speaks: results on stdout, messages on stderr, errors as one sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
ForceFlag = Annotated[bool, typer.Option("--force", help="Overwrite an existing output.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Also draw it: a .png, .svg or .html file.")
]


def out() -> Console:
    """The console for results."""
    from rich.console import Console

    return Console(highlight=False)


def err() -> Console:
    """The console for messages."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(message: str) -> None:
    """A message to the person, on stderr."""
    err().print(message, soft_wrap=True, markup=False)


def show(document: dict[str, Any], *, as_json: bool, render: RenderableType | str) -> None:
    """The result: one JSON document, or what people read."""
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    else:
        out().print(render, markup=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """A titled table; columns whose name starts with `>` are aligned to the right."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    body = Table()
    for name in columns:
        body.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    for row in rows:
        body.add_row(*map(Text, row))  # never markup: names and paths may hold brackets
    return Group(Text(title, style="bold"), body)


def draw(path: Path, chart: Callable[[ModuleType], Any], *, force: bool) -> None:
    """Draw a chart of `headwise.report.charts` into a file; called before the result is shown."""
    from headwise.report import charts

    charts.save_chart(chart(charts), path, force=force)
    say(f"Wrote {path}.")


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
