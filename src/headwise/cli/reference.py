"""The pages of all commands and of the Python API, written from the code itself.

`make docs` writes docs/commands.md and docs/api.md; a test fails when a committed page is not what
this makes. Names, types, texts and defaults are those that `--help` and `help()` show, so there is
one place for each.
"""

from __future__ import annotations

import inspect
import re
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


_API_INTRODUCTION = """\
# Python API

This page is written from the code by `make docs`; do not edit it by hand. `import headwise as hw`
loads nothing heavy; a verb loads what it needs when it is called. Errors that a user can cause are
`hw.HeadwiseError`, with one sentence that says what was expected, what was given and what to do.

`progress` is called with the name of the step, the amount done and the total (0 of 0: a message).
The library itself prints nothing.
"""
# The verbs whose further options are the fields of a recipe.
_VERBS = (
    *("compress", "profile", "fit", "sweep", "cut", "recover", "verify", "compare", "export"),
    *("new_plan", "design", "train", "evaluate", "generate", "run"),
)
_OTHERS = ("report", "load", "open_source", "runs_in", "push")


def commands(app: typer.Typer) -> dict[str, Any]:
    """Every command that does something, by its full name (`headwise plan new`), sorted."""
    return dict(sorted(_leaves(typer.main.get_command(app), "headwise")))


def _leaves(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(command, TyperGroup):
        yield words, command
        return
    context = typer.Context(command, info_name=words)
    for name in command.list_commands(context):
        yield from _leaves(command.get_command(context, name), f"{words} {name}")


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


def api_page() -> str:
    """docs/api.md."""
    import headwise
    from headwise.recipe import RECIPES, Budgets, Recipe

    recipes: dict[str, type[Recipe]] = {**RECIPES, "fit": Budgets}
    parts = [_API_INTRODUCTION, "## Verbs\n"]
    for name in (*_VERBS, *_OTHERS):
        function = getattr(headwise, name)
        parts.append(f"### hw.{name}\n")
        parts.append(f"```python\nhw.{name}{_signature(function)}\n```\n")
        parts.append(_docstring(function))
        if name in recipes:
            parts.append(_fields(recipes[name].options()))
    parts.append("## Records\n")
    for name in headwise.__all__:
        found = getattr(headwise, name)
        if isinstance(found, type) and not issubclass(found, BaseException):
            parts.append(f"### hw.{name}\n")
            parts.append(_docstring(found))
            parts.append(_attributes(found))
    return "\n".join(part for part in parts if part)


def _signature(function: Any) -> str:
    found = inspect.signature(function)
    bare = found.replace(
        parameters=[p.replace(annotation=p.empty) for p in found.parameters.values()],
        return_annotation=found.empty,
    )
    return re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", str(bare))


def _docstring(found: Any) -> str:
    text = inspect.cleandoc(found.__doc__ or "")
    said: list[str] = []
    example: list[str] = []
    for line in text.splitlines():
        (example if line.startswith((">>>", "...")) else said).append(line)
    shown = "\n".join(line[4:] for line in example).replace("as hw\n", "as hw\n\n")
    shown = shown.replace("  # doctest: +SKIP", "")
    block = ["```python", shown, "```", ""] if example else []
    return "\n".join([*said, "", *block]) if not example else "\n".join([*said, *block])


def _fields(options: Any) -> str:
    rows = [
        _row(f"`{name}`", (field.description or "").replace("|", "\\|"), _field_default(field))
        for name, field in options.items()
    ]
    return "\n".join([_row("option", "meaning", "default"), "|---|---|---|", *rows, ""])


def _field_default(field: Any) -> str:
    if field.is_required():
        return "required"
    return "" if field.default is None or field.default == () else f"`{field.default!r}`"


def _attributes(kind: type) -> str:
    """The fields and properties of a record."""
    names = list(getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", {}))
    own = [
        (name, inspect.cleandoc(member.__doc__ or "").splitlines()[0])
        for name, member in vars(kind).items()
        if not name.startswith("_")
        and (isinstance(member, property) or callable(getattr(kind, name)))
        and member.__doc__
        and name not in names
    ]
    rows = [_row(f"`{name}`", text.replace("|", "\\|")) for name, text in own]
    fields = f"Fields: {', '.join(f'`{n}`' for n in names if n != 'format')}.\n" if names else ""
    table = "\n".join([_row("also", "what it is"), "|---|---|", *rows, ""]) if rows else ""
    return "\n".join(part for part in (fields, table) if part)


def main() -> None:
    """Write a page into the file that is named: api.md, or that of the commands."""
    from headwise.cli.main import app

    path = Path(sys.argv[1])
    write_text(path, api_page() if path.name == "api.md" else page(app), force=True)


if __name__ == "__main__":
    main()
