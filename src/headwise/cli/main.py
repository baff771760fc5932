"""The `headwise` command: one group whose commands are imported when they are called."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.main
from typer.core import TyperGroup

from headwise import __version__
from headwise.cli.console import is_first
from headwise.cli.options import Common, options_command
from headwise.errors import (
    HeadwiseError,
    StoppedError,
    did_you_mean,
    is_out_of_memory,
    printable,
    quoted,
    reason_of,
    shortened,
)
from headwise.recipe import RunOptions, check_folder, read_recipe

# The module of each command, and its function or its group there.
COMMANDS = {
    "compare": ("headwise.cli.compare", "compare"),
    "compress": ("headwise.cli.compress", "compress"),
    "demo": ("headwise.cli.compress", "demo"),
    "eval": ("headwise.cli.evaluate", "evaluate"),
    "explore": ("headwise.cli.explore", "explore"),
    "export": ("headwise.cli.export", "export"),
    "generate": ("headwise.cli.generate", "generate"),
    "plan": ("headwise.cli.plan", "app"),
    "profile": ("headwise.cli.compress", "profile"),
    "push": ("headwise.cli.push", "push"),
    "recover": ("headwise.cli.recover", "recover"),
    "report": ("headwise.cli.report", "report"),
    "reproduce": ("headwise.cli.reproduce", "reproduce"),
    "run": ("headwise.cli.main", "run"),
    "theory": ("headwise.cli.theory", "app"),
    "train": ("headwise.cli.train", "train"),
    "verify": ("headwise.cli.verify", "verify"),
}

# Where recipes are run whose verb is not the name of a command.
PLANS = {
    "design": ("headwise.cli.plan", "design"),
    "fit": ("headwise.cli.plan", "fit"),
    "new_plan": ("headwise.cli.plan", "new"),
}


class LazyGroup(TyperGroup):
    """Imports a command's module when the command is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """One command, made from its module."""
        if cmd_name not in COMMANDS:
            hint = did_you_mean(cmd_name, COMMANDS)
            raise HeadwiseError(f"No such command {quoted(cmd_name)}. {hint}")
        module, name = COMMANDS[cmd_name]
        found = getattr(importlib.import_module(module), name)
        if not isinstance(found, typer.Typer):
            single = typer.Typer(add_completion=False, rich_markup_mode=None)
            single.command(cmd_name)(found)
            found = single
        command = typer.main.get_command(found)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=LazyGroup,
    name="headwise",
    help="Decide how many attention heads, and how wide, each layer of a Transformer deserves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(value: bool) -> None:
    if value:
        sys.stdout.write(f"headwise {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@options_command(RunOptions, out="The output folder or file.", argument="recipe", required=False)
def run(options: RunOptions, common: Common) -> None:
    """Run a recipe: the options of a command in a file.

    Every output folder holds the recipe.yaml that made it.

    Example: headwise run smaller/recipe.yaml -o again
    """
    found = read_recipe(Path(options.recipe), replacing=common.out if common.force else None)
    module, name = {**COMMANDS, **PLANS}[found.verb]
    check_folder(found, common.out)
    command = getattr(importlib.import_module(module), name)
    command.act(found, common)


def main() -> None:
    """Run a command; bad input becomes one sentence on stderr and exit code 2."""
    _prepare_streams()
    try:
        _check_arguments(sys.argv[1:])
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except StoppedError as error:
        _fail(str(error), 128 + error.signal)
    except HeadwiseError as error:
        _fail(str(error), 2)
    except typer.TyperException as error:
        _fail(_with_value(error.format_message()), 2)
    except typer.Abort:
        _fail("Aborted.", 130)
    except OSError as error:  # a place that cannot be read or written
        where = f" ({quoted(str(error.filename))})" if error.filename else ""
        _fail(f"{error.strerror or error}{where}; check the path and the free space.", 2)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _fail(
            f"this needs more memory than there is ({reason_of(error)}); ask for less at once "
            "(shorter windows, smaller batches, a smaller model), or give the process more.",
            2,
        )
    raise SystemExit(code if isinstance(code, int) else 0)


def _prepare_streams() -> None:
    """Make both streams writable: a closed one (`>&-`) discards; unencodable text becomes `?`."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # else the first file that is written would take the place of a closed stream
    os.close(opened)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):  # a terminal without Unicode still gets its table
            stream.reconfigure(errors="replace")


def _check_arguments(arguments: list[str]) -> None:
    """Refuse empty arguments (an unset shell variable) and arguments that are not text."""
    for before, word in zip(["", *arguments], arguments, strict=False):
        if word == "" and before != "--prompt":
            where = before if before.startswith("-") else "an argument"
            raise HeadwiseError(f"{where} must not be empty, got ''; give a value or leave it out.")
        try:
            word.encode()
        except UnicodeEncodeError:
            raise HeadwiseError(f"{word!r} is not valid UTF-8; write it another way.") from None


def _with_value(sentence: str) -> str:
    """typer's message about a wrong value, with the value itself."""
    match = re.match(r"Invalid value for '?(--[a-z-]+)", sentence)
    words = sys.argv[1:]
    if match and match[1] in words[:-1]:
        came = words[len(words) - 1 - words[::-1].index(match[1]) + 1]
        return f"{sentence.rstrip('.')}, got {quoted(came)}."
    return sentence


def _fail(sentence: str, code: int) -> NoReturn:
    # A command group without a command has printed its help; the first process speaks for all.
    if sentence and is_first():
        with contextlib.suppress(OSError):  # a full disk: the exit code still says it
            sys.stderr.write(f"Error: {printable(shortened(sentence), keep='')}\n")
            sys.stderr.flush()
    raise SystemExit(code)


if __name__ == "__main__":
    main()
