"""`headwise recover`: train a cut model on the predictions of the model it was cut from."""

from __future__ import annotations

import headwise as hw
from headwise.cli.console import say, show
from headwise.cli.options import Common, options_command
from headwise.errors import StoppedError
from headwise.recipe import RecoverRecipe


@options_command(RecoverRecipe, out="The recovered model's folder.")
def recover(recipe: RecoverRecipe, common: Common) -> None:
    """Train the attention of a cut model on the predictions of the dense one.

    Run the same command again to resume after a kill; torchrun shares the work.

    Example: headwise recover smaller --against ./model --text notes.txt -o recovered
    """
    result: hw.RecoverResult = common.run(recipe)
    if result.signal:
        raise StoppedError(result.signal)
    say(f"Wrote {result.folder}.")
    found = {"loss": result.loss, "held_out_loss": result.held_out_loss}
    document = {"out": str(result.folder), "steps": result.steps, **found}
    lines = [f"{name}: {value}" for name, value in document.items()]
    show(document, as_json=common.as_json, render="\n".join(lines))
