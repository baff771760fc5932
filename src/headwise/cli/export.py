"""`headwise export`: a model as another engine loads it."""

from __future__ import annotations

import typer

import headwise as hw
from headwise.cli.console import say, show
from headwise.cli.options import Common, options_command
from headwise.recipe import ExportRecipe

MISSED = 1  # the exit code when the export was written, but is not the same model


@options_command(ExportRecipe, out="A file for gguf, a folder otherwise.")
def export(recipe: ExportRecipe, common: Common) -> None:
    """Export a model for another engine, and measure parity in that engine.

    Exit code 1 means that the exported model differs from ours by more than rounding. Run the same
    command again to resume after a kill. `headwise plan show` says which targets a plan fits.

    Example: headwise export smaller --to gguf --quantize Q8_0 -o smaller.gguf
    """
    made: hw.ExportResult = common.run(recipe)
    record = made.record
    document = {"out": str(made.out), **record.model_dump(mode="json"), "held": made.held}
    said = f"Wrote {made.out}, a model of class {record.architecture}."
    checked = "Parity was not checked." if record.parity is None else f"{record.parity}."
    show(document, as_json=common.as_json, render=f"{said}\n{checked[0].upper()}{checked[1:]}")
    for note in record.notes:
        say(f"Note: {note}")
    if not made.held:
        raise typer.Exit(MISSED)
