"""`headwise eval`: how well a model predicts a text."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headwise.cli.console import JsonFlag, check_choice, quiet_transformers, show, shown


def evaluate(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder or name, dense or headwise.")],
    text: Annotated[
        str, typer.Option("--text", help="File, folder, hub:owner/name or builtin:python.")
    ],
    window: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens the model sees at once [min(its context, 1024)]."),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens scored per window [half the window].")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to score [all].")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer folder or tokenizer.json [the model's].")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run model code found in the folder.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Score a text: nats per token, perplexity, bits per byte.

    Example: headwise eval ./model --text notes.txt
    """
    import time

    from headwise.data.text import read_source
    from headwise.measure.likelihood import likelihood, scored_stream, window_of
    from headwise.source import open_source

    quiet_transformers()
    check_choice("dtype", dtype, ("auto", "fp32", "bf16"))
    source = read_source(text)
    opened = open_source(model, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    reader = opened.tokenizer  # if it cannot be read, that is said before the weights are
    loaded = opened.load("causal-lm", device=device, dtype=dtype)  # type: ignore[arg-type]
    chosen = window_of(loaded, window)
    started = time.perf_counter()
    with shown() as progress:
        stream, n_bytes = scored_stream(reader, source, tokens)
        result = likelihood(loaded, stream, window=chosen, stride=stride, progress=progress)
    document = {
        "model": model,
        "text": text,
        "text_sha256": source.sha256,
        "tokens": result.tokens,
        "bytes": n_bytes,
        "nll": result.nll,
        "perplexity": result.perplexity if result.perplexity < float("inf") else None,
        "bits_per_byte": result.bits_per_byte(n_bytes),
        "window": result.window,
        "stride": result.stride,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": loaded.device.type,
        "seconds": round(time.perf_counter() - started, 3),
    }
    show(document, as_json=as_json, render=_lines(document))


def _lines(document: dict[str, Any]) -> str:
    perplexity = document["perplexity"]
    return (
        f"nll         {document['nll']:.4f} nats per token\n"
        f"perplexity  {'infinite' if perplexity is None else f'{perplexity:.4f}'}\n"
        f"bits/byte   {document['bits_per_byte']:.4f}\n"
        f"tokens      {document['tokens']}, window {document['window']}, "
        f"stride {document['stride']}"
    )
