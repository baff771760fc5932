"""`headwise push`: a finished model on the Hugging Face hub."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.options import JsonFlag


def push(
    folder: Annotated[Path, typer.Argument(help="A folder that headwise wrote.")],
    repo: Annotated[str, typer.Argument(help="The repository on the hub: owner/name.")],
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository private.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Upload a model with its card and recipe to the Hugging Face hub.

    The only command that sends anything away. Log in first: hf auth login.

    Example: headwise push smaller my-name/smaller
    """
    from headwise.cli.console import show
    from headwise.verbs import push as push_verb

    made = push_verb(folder, repo, private=private)
    show(asdict(made), as_json=as_json, render=f"Pushed {len(made.files)} files to {made.url}.")
