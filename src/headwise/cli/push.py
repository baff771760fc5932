"""`headwise push`: a finished model on the Hugging Face hub."""

from __future__ import annotations

from dataclasses import asdict

import headwise as hw
from headwise.cli.console import show
from headwise.cli.options import Common, options_command
from headwise.recipe import PushOptions


@options_command(PushOptions, argument=("folder", "repo"))
def push(options: PushOptions, common: Common) -> None:
    """Upload a model with its card and recipe to the Hugging Face hub.

    No other command uploads anything. Log in first: hf auth login.

    Example: headwise push smaller my-name/smaller
    """
    made = hw.push(options.folder, options.repo, private=options.private)
    done = f"Pushed {len(made.files)} files to {made.url}."
    show(asdict(made), as_json=common.as_json, render=done)
