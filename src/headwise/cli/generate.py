"""`headwise generate`: a quick look at what a model writes."""

from __future__ import annotations

import sys

import headwise as hw
from headwise.cli.console import show
from headwise.cli.options import Common, options_command
from headwise.errors import printable
from headwise.recipe import GenerateRecipe


@options_command(GenerateRecipe)
def generate(recipe: GenerateRecipe, common: Common) -> None:
    """Continue a prompt.

    Example: headwise generate ./model --prompt "The capital of France is"
    """
    written: hw.Continuation = common.run(recipe)
    if common.as_json:
        asked = recipe.model_dump(include={"model", "prompt", "seed"})
        document = {**asked, "continuation": written.text, "tokens": written.tokens}
        show(document, as_json=True, render="")
    else:
        # A model can write anything, escape sequences too.
        sys.stdout.write(f"{printable(recipe.prompt + written.text)}\n")
