"""`headwise eval`: how well a model predicts a text, or an encoder the tokens masked in it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.console import JsonFlag, check_choice, quiet_transformers, show, shown
from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from headwise.data.text import Text
    from headwise.source import Source


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
    """Score a text: nats per token, perplexity, bits per byte; an encoder, nats per masked token.

    Example: headwise eval ./model --text notes.txt
    """
    from headwise.data.text import read_source
    from headwise.source import open_source

    quiet_transformers()
    check_choice("dtype", dtype, ("auto", "fp32", "bf16"))
    source = read_source(text)
    opened = open_source(model, tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    _ = opened.tokenizer  # if it cannot be read, that is said before the weights are
    started = time.perf_counter()
    placed = {"device": device, "dtype": dtype}
    if opened.sees_ahead:
        if stride is not None:
            raise HeadwiseError(
                f"--stride is for models that predict the next token, but {model} is an encoder, "
                "whose windows do not overlap; leave it out."
            )
        found = _masked(opened, source, tokens, window, placed)
    else:
        found = _next_tokens(opened, source, tokens, window, stride, placed)
    document = {
        "model": model,
        "text": text,
        "text_sha256": source.sha256,
        **found,
        "seconds": round(time.perf_counter() - started, 3),
    }
    show(document, as_json=as_json, render=_lines(document))


def _next_tokens(
    opened: Source,
    source: Text,
    tokens: int | None,
    window: int | None,
    stride: int | None,
    placed: dict[str, Any],
) -> dict[str, Any]:
    from headwise.measure.likelihood import likelihood, scored_stream, window_of

    loaded = opened.load("causal-lm", **placed)
    chosen = window_of(loaded, window)
    with shown() as progress:
        stream, n_bytes = scored_stream(opened.tokenizer, source, tokens)
        result = likelihood(loaded, stream, window=chosen, stride=stride, progress=progress)
    return {
        "objective": "next-token",
        "tokens": result.tokens,
        "bytes": n_bytes,
        "nll": result.nll,
        "perplexity": result.perplexity if result.perplexity < float("inf") else None,
        "bits_per_byte": result.bits_per_byte(n_bytes),
        "window": result.window,
        "stride": result.stride,
        **_where(loaded),
    }


def _masked(
    opened: Source,
    source: Text,
    tokens: int | None,
    window: int | None,
    placed: dict[str, Any],
) -> dict[str, Any]:
    from headwise.data.masking import masking_of
    from headwise.data.tokens import token_stream
    from headwise.measure.likelihood import window_of
    from headwise.measure.masked import masked_score

    if opened.saved_task != "masked-lm":
        head = "no head" if opened.saved_task == "bare" else f"a head for {opened.saved_task}"
        raise HeadwiseError(
            f"{opened.name} sees ahead, so it can only be asked for masked tokens, but it was "
            f"saved with {head}; train or fine-tune it on masked tokens, or compare its "
            "embeddings with `headwise verify`."
        )
    loaded = opened.load("masked-lm", **placed)
    masking = masking_of(opened.tokenizer, loaded.get_input_embeddings().weight.size(0))
    chosen = window_of(loaded, window)
    stream = token_stream(opened.tokenizer, source.documents, most=tokens)
    with shown() as progress:
        result = masked_score(loaded, stream, masking, window=chosen, progress=progress)
    return {
        "objective": "masked-token",
        "tokens": result.tokens,
        "tokens_read": result.read,
        "nll": result.nll,
        "accuracy": result.accuracy,
        "window": result.window,
        **_where(loaded),
    }


def _where(loaded: Any) -> dict[str, str]:
    return {"dtype": str(loaded.dtype).removeprefix("torch."), "device": loaded.device.type}


def _lines(document: dict[str, Any]) -> str:
    if document["objective"] == "masked-token":
        return (
            f"nll         {document['nll']:.4f} nats per masked token\n"
            f"accuracy    {document['accuracy']:.1%} of the masked tokens ranked first\n"
            f"tokens      {document['tokens']} masked of {document['tokens_read']}, "
            f"window {document['window']}"
        )
    perplexity = document["perplexity"]
    return (
        f"nll         {document['nll']:.4f} nats per token\n"
        f"perplexity  {'infinite' if perplexity is None else f'{perplexity:.4f}'}\n"
        f"bits/byte   {document['bits_per_byte']:.4f}\n"
        f"tokens      {document['tokens']}, window {document['window']}, "
        f"stride {document['stride']}"
    )
