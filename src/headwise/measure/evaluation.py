"""How well one model predicts texts, as a record.

A causal model is scored on every next token: nats per token, perplexity, bits per byte. A model
that is bidirectional would read the answer, so it is scored on masked tokens: nats and accuracy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from headwise.data.masking import masking_of
from headwise.data.text import Text
from headwise.data.tokens import token_stream
from headwise.devices import Dtype
from headwise.errors import HeadwiseError
from headwise.measure.likelihood import (
    Likelihood,
    MaskedScore,
    likelihood,
    masked_score,
    scored_stream,
    window_of,
)
from headwise.progress import Progress, silent
from headwise.records import Frozen, Record
from headwise.source import Source


class NextTokens(Frozen):
    """Every token of the text, scored by a causal model."""

    objective: Literal["next-token"] = "next-token"
    tokens: int
    bytes: int
    nll: float  # nats per token
    perplexity: float | None  # None: infinite
    bits_per_byte: float
    window: int
    stride: int


class MaskedTokens(Frozen):
    """The masked tokens of the text, scored by an encoder."""

    objective: Literal["masked-token"] = "masked-token"
    tokens: int
    tokens_read: int
    nll: float  # nats per masked token
    accuracy: float
    window: int


class ScoredText(Frozen):
    """A text and its score."""

    source: str
    sha256: str
    score: Annotated[NextTokens | MaskedTokens, Field(discriminator="objective")]


class Evaluation(Record):
    """Texts scored by a model; there is at least one."""

    format: Literal["headwise-eval/2"] = "headwise-eval/2"
    model: str
    texts: tuple[ScoredText, ...] = Field(min_length=1)
    dtype: str
    device: str
    seconds: float

    @property
    def nll(self) -> float:
        """Nats per scored token of the first text."""
        return self.texts[0].score.nll

    @property
    def perplexity(self) -> float | None:
        """Of the first text; None if it is infinite, or for an encoder, which has none."""
        return getattr(self.texts[0].score, "perplexity", None)


def evaluate_model(
    source: Source,
    texts: Sequence[Text],
    *,
    tokens: int | None = None,
    window: int | None = None,
    stride: int | None = None,
    device: str = "auto",
    dtype: Dtype = "auto",
    progress: Progress = silent,
) -> Evaluation:
    """Score texts with a causal model, or their masked tokens with an encoder."""
    _ = source.tokenizer  # a missing tokenizer is reported before the weights are read
    started = time.perf_counter()
    task = _masked_task(source, stride) if source.is_bidirectional else "causal-lm"
    model: Any = source.load(task, device=device, dtype=dtype)
    size = window_of(model, window)

    def score(text: Text) -> NextTokens | MaskedTokens:
        if source.is_bidirectional:
            stream = token_stream(source.tokenizer, text.documents, most=tokens)
            masking = masking_of(source.tokenizer, model.get_input_embeddings().weight.size(0))
            return _masked(masked_score(model, stream, masking, window=size, progress=progress))
        stream, n_bytes = scored_stream(source.tokenizer, text, tokens)
        found = likelihood(model, stream, window=size, stride=stride, progress=progress)
        return _next(found, n_bytes)

    scored = [ScoredText(source=t.source, sha256=t.sha256, score=score(t)) for t in texts]
    return Evaluation(
        model=source.name,
        texts=tuple(scored),
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        seconds=round(time.perf_counter() - started, 3),
    )


def _next(found: Likelihood, n_bytes: int) -> NextTokens:
    return NextTokens(
        tokens=found.tokens,
        bytes=n_bytes,
        nll=found.nll,
        perplexity=found.perplexity if math.isfinite(found.perplexity) else None,
        bits_per_byte=found.bits_per_byte(n_bytes),
        window=found.window,
        stride=found.stride,
    )


def _masked_task(source: Source, stride: int | None) -> Literal["masked-lm"]:
    """The task of an encoder; a model without a masked-token head is refused."""
    if stride is not None:
        raise HeadwiseError(
            f"--stride is for models that predict the next token, but {source.name} is an encoder, "
            "whose windows do not overlap; leave it out."
        )
    if source.saved_task != "masked-lm":
        head = "no head" if source.saved_task == "bare" else f"a head for {source.saved_task}"
        raise HeadwiseError(
            f"{source.name} is bidirectional, so it can only be scored on masked tokens, but it "
            f"was saved with {head}; train or fine-tune it on masked tokens, or compare its "
            "embeddings with `headwise verify`."
        )
    return "masked-lm"


def _masked(found: MaskedScore) -> MaskedTokens:
    return MaskedTokens(
        tokens=found.tokens,
        tokens_read=found.read,
        nll=found.nll,
        accuracy=found.accuracy,
        window=found.window,
    )
