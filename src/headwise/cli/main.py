"""The `headwise` command."""

from __future__ import annotations

import io
import re
import sys
from typing import Annotated, NoReturn

import typer

from headwise import __version__
from headwise.cli import (
    compare,
    compress,
    demo,
    evaluate,
    explore,
    generate,
    plan,
    plan_fit,
    profile,
    recover,
    report,
    reproduce,
    theory,
    train,
    verify,
)
from headwise.errors import HeadwiseError

app = typer.Typer(
    name="headwise",
    help="Decide how many attention heads, and how wide, each layer of a Transformer deserves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(plan.app, name="plan")
app.add_typer(theory.app, name="theory")
plan.app.command("fit")(plan_fit.fit)
app.command("compare")(compare.compare)
app.command("compress")(compress.compress)
app.command("demo")(demo.demo)
app.command("profile")(profile.profile)
app.command("recover")(recover.recover)
app.command("report")(report.report)
app.command("reproduce")(reproduce.reproduce)
app.command("verify")(verify.verify)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("explore")(explore.explore)
app.command("generate")(generate.generate)


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


def main() -> None:
    """Run a command; bad input becomes one sentence on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without Unicode still gets its table
            stream.reconfigure(errors="replace")
    try:
        _check_words(sys.argv[1:])
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except HeadwiseError as error:
        _fail(str(error), 2)
    except typer.TyperException as error:
        _fail(_with_value(error.format_message()), 2)
    except typer.Abort:
        _fail("Aborted.", 130)
    except OSError as error:  # a place that cannot be read or written
        where = f" ({_short(str(error.filename))})" if error.filename else ""
        _fail(f"{error.strerror or error}{where}; check the path and the space left.", 2)
    raise SystemExit(code if isinstance(code, int) else 0)


def _check_words(words: list[str]) -> None:
    """Refuse empty words (an unset shell variable) and words that are no text."""
    for before, word in zip(["", *words], words, strict=False):
        if word == "" and before != "--prompt":
            where = before if before.startswith("-") else "an argument"
            raise HeadwiseError(f"{where} must not be empty, got ''; give a value or leave it out.")
        try:
            word.encode()
        except UnicodeEncodeError:
            raise HeadwiseError(f"{word!r} is not valid UTF-8; write it another way.") from None


def _with_value(sentence: str) -> str:
    """typer's sentence about a wrong value, with the value that came."""
    match = re.match(r"Invalid value for '?(--[a-z-]+)", sentence)
    words = sys.argv[1:]
    if match and match[1] in words[:-1]:
        came = words[len(words) - 1 - words[::-1].index(match[1]) + 1]
        return f"{sentence.rstrip('.')}, got {_short(came)!r}."
    return sentence


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}…"


def _fail(sentence: str, code: int) -> NoReturn:
    if sentence:  # a command group without a command has printed its help already
        sys.stderr.write(f"Error: {sentence}\n")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
