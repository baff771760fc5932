"""`headwise eval`: how well a model predicts texts, or an encoder the tokens masked in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.cli.console import show
from headwise.cli.options import Common, options_command
from headwise.recipe import EvaluateRecipe

if TYPE_CHECKING:
    from headwise.measure.evaluation import Evaluation, MaskedTokens, NextTokens


@options_command(EvaluateRecipe, out="Also write the JSON document here.", required=False)
def evaluate(recipe: EvaluateRecipe, common: Common) -> None:
    """Score texts: nats per token, perplexity, bits per byte; for encoders nats per masked token.

    Example: headwise eval ./model --text notes.txt
    """
    found: Evaluation = common.run(recipe)
    named = len(found.texts) > 1
    parts = [(f"{text.source}\n" if named else "") + _lines(text.score) for text in found.texts]
    document = found.model_dump(mode="json")
    show(document, as_json=common.as_json, render="\n\n".join(parts))


def _lines(score: NextTokens | MaskedTokens) -> str:
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
