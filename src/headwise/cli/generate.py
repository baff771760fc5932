"""`headwise generate`: a quick look at what a model writes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headwise.cli.console import quiet_transformers, show
from headwise.cli.options import JsonFlag
from headwise.errors import printable


def generate(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder or name, dense or headwise.")],
    prompt: Annotated[str, typer.Option("--prompt", help="How the text begins.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 takes the likeliest token.")
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Sample from the likeliest tokens that add up to this."
        ),
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Random seed for sampling.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run model code found in the folder.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Continue a prompt.

    Example: headwise generate ./model --prompt "The capital of France is"
    """
    from headwise.measure.generation import continuation
    from headwise.source import open_source

    quiet_transformers()
    source = open_source(model, trust_remote_code=trust_remote_code)
    source.refuse_seeing_ahead("`headwise generate`")
    written = continuation(
        source.load("causal-lm", device=device),
        source.tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
    )
    if as_json:
        document = {
            "model": model,
            "prompt": prompt,
            "continuation": written.text,
            "tokens": written.tokens,
            "seed": seed,
        }
        show(document, as_json=True, render="")
    else:
        # A model can write anything, escape sequences too.
        sys.stdout.write(f"{printable(prompt + written.text)}\n")
