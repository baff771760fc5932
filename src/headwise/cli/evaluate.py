"""`headwise eval`: how well a model predicts a text."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headwise.cli.console import JsonFlag, show


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
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Score only the first N tokens.")
    ] = None,
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

    from headwise.cli.progress import shown
    from headwise.data.text import read_source
    from headwise.measure.likelihood import DEFAULT_WINDOW, likelihood, scored_stream
    from headwise.measure.loading import load_model, model_context

    quiet_transformers()
    check_choice("dtype", dtype, ("auto", "fp32", "bf16"))
    source = read_source(text)
    loaded, words = load_model(
        model,
        device=device,
        dtype=dtype,  # type: ignore[arg-type]
        trust_remote_code=trust_remote_code,
        tokenizer=tokenizer,
    )
    context = model_context(loaded)
    chosen = window or min(context or DEFAULT_WINDOW, DEFAULT_WINDOW)
    check_window(chosen, context)
    started = time.perf_counter()
    with shown("scoring") as progress:
        stream, n_bytes = scored_stream(words, source, max_tokens)
        result = likelihood(loaded, stream, window=chosen, stride=stride, tick=progress.update)
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


def quiet_transformers() -> None:
    """No bars and no advice from transformers; its errors are still raised."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of `choices`."""
    from headwise.errors import HeadwiseError

    if value not in choices:
        raise HeadwiseError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")


def check_window(window: int, context: int | None) -> None:
    """Refuse windows beyond the model's context."""
    from headwise.errors import HeadwiseError

    if context is not None and window > context:
        raise HeadwiseError(
            f"window must be at most the model's context of {context} tokens, got {window}."
        )


def _lines(document: dict[str, Any]) -> str:
    perplexity = document["perplexity"]
    return (
        f"nll         {document['nll']:.4f} nats per token\n"
        f"perplexity  {'beyond any float' if perplexity is None else f'{perplexity:.4f}'}\n"
        f"bits/byte   {document['bits_per_byte']:.4f}\n"
        f"tokens      {document['tokens']}, window {document['window']}, "
        f"stride {document['stride']}"
    )
