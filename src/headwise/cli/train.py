"""`headwise train`: a plan and a text become a model."""

from __future__ import annotations

from typing import Annotated

import typer

import headwise as hw
from headwise.cli.console import command_line, quiet_transformers, say, show, stderr_progress
from headwise.cli.options import Common, options_command
from headwise.recipe import TrainRecipe

Resume = Annotated[
    bool, typer.Option("--resume", help="Resume the run in OUT with its own settings.")
]


@options_command(TrainRecipe, out="The run's folder.", argument="plan", resume=Resume)
def train(recipe: TrainRecipe, common: Common) -> None:
    """Train a plan's model from scratch; under torchrun, on several processes.

    Run the same command again to resume after a kill; with --resume, -o alone is enough.

    Example: headwise train plan.json --text notes.txt --steps 300 -o run

    Example: headwise train -o run --resume
    """
    assert common.out is not None
    quiet_transformers()
    with stderr_progress() as progress:
        result = hw.train(
            **recipe.stated,
            out=common.out,
            resume=common.extra.get("resume", False),
            force=common.force,
            progress=progress,
            command=command_line(),
        )
    if result.signal:
        say(
            f"Stopped; the newest step is saved. Run the same command again, or "
            f"`headwise train -o {result.folder} --resume`, to resume."
        )
    else:
        say(f"{result.folder} is finished; the model is in {result.model}.")
    last = {} if result.last is None else result.last.row()
    document = {
        "run": str(result.folder),
        "model": None if result.model is None else str(result.model),
        "status": result.status,
        **{k: last.get(k) for k in ("step", "loss", "held_out_loss", "tokens", "seconds")},
    }
    line = f"{result.status} at step {last.get('step')}, loss {last.get('loss', 0):.4f}"
    line += f", held-out loss {last['held_out_loss']:.4f}" if "held_out_loss" in last else ""
    show(document, as_json=common.as_json, render=line)
    if result.signal:
        raise typer.Exit(128 + result.signal)
