"""The `headwise` command."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from headwise import __version__
from headwise.cli import (
    compress,
    demo,
    evaluate,
    generate,
    plan,
    plan_fit,
    profile,
    recover,
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
app.command("compress")(compress.compress)
app.command("demo")(demo.demo)
app.command("profile")(profile.profile)
app.command("recover")(recover.recover)
app.command("verify")(verify.verify)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
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
    try:
        code = app(standalone_mode=False)
    except HeadwiseError as error:
        _fail(str(error), 2)
    except typer.TyperException as error:
        _fail(error.format_message(), 2)
    except typer.Abort:
        _fail("Aborted.", 130)
    raise SystemExit(code if isinstance(code, int) else 0)


def _fail(sentence: str, code: int) -> NoReturn:
    if sentence:  # a command group without a command has printed its help already
        sys.stderr.write(f"Error: {sentence}\n")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
