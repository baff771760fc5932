"""`headwise eval`: how well a model predicts a text, or an encoder the tokens masked in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.cli.console import show
from headwise.cli.options import Common, recipe_command
from headwise.recipe import EvaluateRecipe

if TYPE_CHECKING:
    from headwise.measure.evaluation import Evaluation


@recipe_command(EvaluateRecipe, out="Also write the JSON document here.", required=False)
def evaluate(recipe: EvaluateRecipe, common: Common) -> None:
    """Score a text: nats per token, perplexity, bits per byte; an encoder, nats per masked token.

    Example: headwise eval ./model --text notes.txt
    """
    found: Evaluation = common.run(recipe)
    document = found.model_dump(mode="json", exclude={"score"})
    show(document | found.score.model_dump(), as_json=common.as_json, render=_lines(found))


def _lines(found: Evaluation) -> str:
    score = found.score
    if score.objective == "masked-token":
        return (
            f"nll         {score.nll:.4f} nats per masked token\n"
            f"accuracy    {score.accuracy:.1%} of the masked tokens ranked first\n"
            f"tokens      {score.tokens} masked of {score.tokens_read}, window {score.window}"
        )
    perplexity = "infinite" if score.perplexity is None else f"{score.perplexity:.4f}"
    return (
        f"nll         {score.nll:.4f} nats per token\n"
        f"perplexity  {perplexity}\n"
        f"bits/byte   {score.bits_per_byte:.4f}\n"
        f"tokens      {score.tokens}, window {score.window}, stride {score.stride}"
    )
