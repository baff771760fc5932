"""The page of all commands, written from the commands themselves.

`make docs` writes docs/commands.md; a test fails when the committed page is not what this makes.
Names, types, texts and defaults are those that `--help` shows, so there is one place for each.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import typer.main
from typer.core import TyperGroup

from headwise.artifacts import write_text

EXAMPLE = "Example: "
_INTRODUCTION = """\
# Commands

This page is written from the code by `make docs`; do not edit it by hand. `headwise COMMAND --help`
says the same. A default in [brackets] depends on the other options or on the model.
"""


def commands(app: typer.Typer) -> dict[str, Any]:
    """Every command that does something, by its words (`headwise plan new`), sorted."""
    return dict(sorted(_leaves(typer.main.get_command(app), "headwise")))


def _leaves(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(command, TyperGroup):
        yield words, command
        return
    for name, below in command.commands.items():
        yield from _leaves(below, f"{words} {name}")


def paragraphs(command: Any) -> tuple[list[str], list[str]]:
    """What a command's help says, and its examples; each paragraph on one line."""
    blocks = inspect.cleandoc(command.help or "").split("\n\n")
    lines = [" ".join(block.split()) for block in blocks]
    said = [line for line in lines if not line.startswith(EXAMPLE)]
    return said, [line.removeprefix(EXAMPLE) for line in lines if line.startswith(EXAMPLE)]


def page(app: typer.Typer) -> str:
    """docs/commands.md."""
    found = commands(app)
    index = [
        _row(f"[`{words}`](#{words.replace(' ', '-')})", paragraphs(command)[0][0])
        for words, command in found.items()
    ]
    root = typer.main.get_command(app)
    parts = [
        _INTRODUCTION,
        "\n".join([_row("command", "what it does"), "|---|---|", *index, ""]),
        "## headwise\n",
        _parameters(root, "headwise"),
        *(_section(words, command) for words, command in found.items()),
    ]
    return "\n".join(parts)


def _section(words: str, command: Any) -> str:
    said, examples = paragraphs(command)
    shown = "\n".join(["```sh", *examples, "```", ""])
    return "\n".join(
        [f"## {words}\n", *(f"{p}\n" for p in said), shown, _parameters(command, words)]
    )


def _parameters(command: Any, words: str) -> str:
    """A table of the arguments and options of a command."""
    context = typer.Context(command, info_name=words)
    rows = []
    for parameter in command.params:
        shown = parameter.get_help_record(context)
        if shown is not None:  # a hidden one has no line
            cells = (f"`{shown[0]}`", parameter.help or "", _default(parameter))
            rows.append(_row(*(cell.replace("|", "\\|") for cell in cells)))
    return "\n".join([_row("option", "meaning", "default"), "|---|---|---|", *rows, ""])


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if value is None or callable(value):
        return ""
    if isinstance(value, bool):
        other = [*parameter.opts, *parameter.secondary_opts]
        return f"`{other[0] if value else other[-1]}`" if parameter.secondary_opts else ""
    return f"`{value}`"


def main() -> None:
    """Write the page into the file that is named."""
    from headwise.cli.main import app

    write_text(Path(sys.argv[1]), page(app), force=True)


if __name__ == "__main__":
    main()
