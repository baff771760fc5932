"""How well a model predicts a text: negative log-likelihood per token, in sliding windows.

    tokens   ■ a b c d e f g h i         window 4, stride 2 (■ = start of text, never scored)
    1st      ■ a b c  → scores a b c d
    2nd          b c d e  → scores e f
    3rd              d e f g  → scores g h
    last               e f g h  → scores i

A bidirectional model reads the token it should predict, so its score would be meaningless and is
refused (it is scored on masked tokens).

Every token is scored exactly once. After the first window each has at least window − stride + 1
tokens before it. The mean is over tokens, not over windows or documents: a short document must
not weigh as much as a long one.

Masked tokens: the text is cut into windows without overlap; 15% of the tokens of each are
predicted, masked as in training (`headwise.data.masking`). The masks depend only on the window's
number, so two models with the same tokenizer predict the same tokens. The score is not a likelihood
of the text: it compares encoders with each other, not with causal models.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Integer

from headwise import memory
from headwise.data.masking import IGNORED, Masking
from headwise.data.text import Text
from headwise.data.tokens import refuse_unknown_tokens, token_stream
from headwise.errors import HeadwiseError
from headwise.progress import Progress, silent

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_WINDOW = 1024
SEES_NOTHING = 1e-4  # of the largest logit: rounding, where the next token is hidden


@dataclass(frozen=True, slots=True)
class Window:
    """Inputs `start … end − 1`; scores the predictions of tokens `scored_from … end`."""

    start: int
    end: int
    scored_from: int


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The sum over all scored tokens, and the sizes that turn it into means."""

    nll_sum: float
    tokens: int
    window: int
    stride: int

    @property
    def nll(self) -> float:
        """Nats per token."""
        return self.nll_sum / self.tokens

    @property
    def perplexity(self) -> float:
        """e to the nats per token; infinity where a float overflows."""
        return math.exp(self.nll) if self.nll < 709 else math.inf

    def bits_per_byte(self, n_bytes: int) -> float:
        """Bits per byte of the text, which compares models with different tokenizers."""
        return self.nll_sum / math.log(2) / n_bytes


def sliding_windows(n_tokens: int, window: int, stride: int) -> Iterator[Window]:
    """The windows that score tokens 1 … n_tokens once each; token 0 is only context."""
    done = 0
    while done < n_tokens:
        end = min(n_tokens, window if done == 0 else done + stride)
        yield Window(start=max(0, end - window), end=end, scored_from=done + 1)
        done = end


def check_windows(stream: Integer[np.ndarray, " n"], window: int, stride: int) -> None:
    """Refuse windows that leave tokens out, and a stream without a token to score."""
    if window < 1 or not 1 <= stride <= window:
        raise HeadwiseError(
            f"window must be at least 1 and stride from 1 to window, got window {window} and "
            f"stride {stride}."
        )
    if len(stream) < 2:
        raise HeadwiseError("the text has no token to score; give more text.")


def likelihood(
    model: PreTrainedModel,
    stream: Integer[np.ndarray, " n"],
    *,
    window: int = DEFAULT_WINDOW,
    stride: int | None = None,
    progress: Progress = silent,
) -> Likelihood:
    """Score every token of `stream` but the first, which is only context."""
    stride = window // 2 or 1 if stride is None else stride
    check_windows(stream, window, stride)
    check_vocabulary(model, stream)
    refuse_bidirectional(model, stream)
    total, done, n_tokens = 0.0, 0, len(stream) - 1
    for group in batched_windows(
        sliding_windows(n_tokens, window, stride), windows_at_once(model, window)
    ):
        total += _group_nll(model, stream, group)
        done = group[-1].end
        progress("scoring", done, n_tokens)
    if not math.isfinite(total):
        raise _no_numbers()
    return Likelihood(nll_sum=total, tokens=n_tokens, window=window, stride=stride)


def refuse_bidirectional(model: PreTrainedModel, stream: Integer[np.ndarray, " n"]) -> None:
    """Raise if the prediction after the first token depends on the second, the one to predict."""
    import torch

    first, second = int(stream[0]), int(stream[1])
    another = second - 1 if second else second + 1
    pair = [torch.tensor([[first, token]], device=model.device) for token in (second, another)]
    with torch.inference_mode():
        one, other = (model(input_ids=ids, use_cache=False).logits[0, 0].float() for ids in pair)
    if not bool((one.isfinite() & other.isfinite()).all()):
        raise _no_numbers()
    if not float((one - other).abs().max()) <= SEES_NOTHING * float(one.abs().max() + 1e-30):
        raise HeadwiseError(
            "this model is bidirectional: its prediction of the next token changes with that "
            "token, so a next-token score is meaningless; score an encoder on masked tokens with "
            "`headwise eval`, or compare its embeddings with `headwise verify`."
        )


def _no_numbers() -> HeadwiseError:
    return HeadwiseError(
        "the model's predictions are NaN or infinite on this text; its weights are broken or "
        "overflow in this number format."
    )


def start_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token before a text, as context of its first: begin of text, else end of text."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return None


def scored_stream(
    tokenizer: PreTrainedTokenizerBase, source: Text, max_tokens: int | None
) -> tuple[Integer[np.ndarray, " n"], int]:
    """The tokens to score after one token of context, and the bytes of text they decode to."""
    most = None if max_tokens is None else max_tokens + 1
    stream = token_stream(tokenizer, source.documents, most=most)
    n_bytes = sum(len(d.encode("utf-8", "surrogatepass")) for d in source.documents)
    if max_tokens is not None and len(stream) > max_tokens:
        stream = stream[:max_tokens]
        n_bytes = max(1, len(str(tokenizer.decode(stream, skip_special_tokens=True)).encode()))
    start = start_token(tokenizer)
    if start is not None:
        stream = np.concatenate([np.asarray([start], dtype=stream.dtype), stream])
    return stream, n_bytes


def _group_nll(
    model: PreTrainedModel, stream: Integer[np.ndarray, " n"], group: Sequence[Window]
) -> float:
    """The summed negative log-likelihood of windows of one length."""
    import torch
    from torch.nn.functional import cross_entropy

    rows = np.stack([stream[w.start : w.end + 1] for w in group]).astype(np.int64)
    whole = torch.from_numpy(rows).to(model.device)
    longest = max(w.end + 1 - w.scored_from for w in group)
    with torch.inference_mode():
        logits = last_logits(model, whole[:, :-1], longest)
        total = 0.0
        for row, targets, w in zip(logits, whole, group, strict=True):
            n = w.end + 1 - w.scored_from
            total += float(cross_entropy(row[-n:].float(), targets[-n:], reduction="sum"))
    return total


def last_logits(model: PreTrainedModel, inputs: Tensor, n: int) -> Tensor:
    """Logits of the last `n` positions; the others are not computed if the model allows it."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits: Tensor = model(input_ids=inputs, use_cache=False, logits_to_keep=n).logits
    else:
        logits = model(input_ids=inputs, use_cache=False).logits
    return logits


def batched_windows(windows: Iterator[Window], most: int) -> Iterator[list[Window]]:
    """Neighbouring windows of equal length, at most `most` together."""
    group: list[Window] = []
    for w in windows:
        if group and (len(group) == most or w.end - w.start != group[0].end - group[0].start):
            yield group
            group = []
        group.append(w)
    if group:
        yield group


def windows_at_once(model: PreTrainedModel, window: int) -> int:
    """How many windows run together: as many as LOGIT_BYTES of logits allow."""
    vocabulary: int = model.config.get_text_config().vocab_size
    return memory.windows_at_once(vocabulary, window)


def check_vocabulary(model: PreTrainedModel, stream: Integer[np.ndarray, " n"]) -> None:
    """Raise if a token of the stream is not in the model's vocabulary."""
    refuse_unknown_tokens(stream, model.get_input_embeddings().weight.size(0))  # type: ignore[operator]


def window_of(model: PreTrainedModel, window: int | None) -> int:
    """The given window or the default; never longer than the model's context."""
    context = model_context(model)
    if window is None:
        return min(context or DEFAULT_WINDOW, DEFAULT_WINDOW)
    if context is not None and window > context:
        raise HeadwiseError(
            f"window must be at most the model's context of {context} tokens, got {window}."
        )
    return window


def model_context(model: PreTrainedModel) -> int | None:
    """The longest input that the model's config states, if it states one."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


@dataclass(frozen=True, slots=True)
class MaskedScore:
    """The sum over all masked tokens, and what turns it into means."""

    nll_sum: float
    correct: int  # ranked first
    tokens: int  # masked
    read: int  # tokens of text in the windows
    window: int

    @property
    def nll(self) -> float:
        """Nats per masked token."""
        return self.nll_sum / self.tokens

    @property
    def accuracy(self) -> float:
        """The share of masked tokens that the model ranks first."""
        return self.correct / self.tokens


def masked_score(
    model: PreTrainedModel,
    stream: Integer[np.ndarray, " n"],
    masking: Masking,
    *,
    window: int,
    progress: Progress = silent,
) -> MaskedScore:
    """Score masked tokens in whole windows of `window` tokens; a shorter rest is one window."""
    import torch
    from torch.nn.functional import cross_entropy

    if len(stream) < 1:
        raise HeadwiseError("the text has no token to score; give more text.")
    check_vocabulary(model, stream)
    inside = min(masking.inside(window), len(stream))
    rows = stream[: len(stream) // inside * inside].reshape(-1, inside).astype(np.int64)
    total, correct, count = 0.0, 0, 0
    step = windows_at_once(model, window)
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        shown, labels = masking.windows(some, [(start + i,) for i in range(len(some))])
        chosen = torch.from_numpy(labels != IGNORED)
        with torch.inference_mode():
            logits = model(input_ids=torch.from_numpy(shown).to(model.device)).logits
            answers = logits.cpu()[chosen].float()
        targets = torch.from_numpy(labels)[chosen]
        total += float(cross_entropy(answers, targets, reduction="sum"))
        correct += int((answers.argmax(-1) == targets).sum())
        count += len(targets)
        progress("scoring", start + len(some), len(rows))
    if not math.isfinite(total):
        raise HeadwiseError(
            "the model's predictions are NaN or infinite on this text; its weights are broken or "
            "overflow in this number format."
        )
    return MaskedScore(total, correct, count, rows.size, window)
