"""A model against the one it was made from, on the same windows of the same text.

Per token, where p are the reference's next-token probabilities and q the model's:

    nll           −log q(next) and −log p(next); the ratio of perplexities is e to their difference
    top agreement whether both rank the same token first
    kl            Σ p·log(p/q), what the cut changed, whatever the text says

The mean is over tokens. `drift` is the KL by the number of tokens before the prediction, in
doubling steps (1, 2, 3–4, 5–8, …): an error that builds up along the sequence shows there.
`window_kl` is the mean of each window: a cut can fail altogether on a few that begin unluckily.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Integer

from headwise.errors import HeadwiseError
from headwise.measure.likelihood import (
    DEFAULT_WINDOW,
    Tick,
    Window,
    batched_windows,
    check_vocabulary,
    check_windows,
    last_logits,
    sliding_windows,
    windows_at_once,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ROWS = 256  # positions whose probabilities are compared at once


@dataclass(frozen=True, slots=True)
class Drift:
    """Mean KL of the predictions made after `first … last` tokens."""

    first: int
    last: int
    tokens: int
    kl: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Means over all scored tokens."""

    tokens: int
    window: int
    stride: int
    nll: float
    reference_nll: float
    top_agreement: float
    kl: float
    drift: tuple[Drift, ...]
    window_kl: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Perplexity ÷ the reference's; infinity where that is beyond a float."""
        gap = self.nll - self.reference_nll
        return math.exp(gap) if gap < 709 else math.inf


def comparison(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    stream: Integer[np.ndarray, " n"],
    *,
    window: int = DEFAULT_WINDOW,
    stride: int | None = None,
    tick: Tick | None = None,
) -> Comparison:
    """Score every token of `stream` but the first with both models.

    `stride` is `window` unless given: then each position of a window is scored equally often.
    """
    stride = window if stride is None else stride
    check_windows(stream, window, stride)
    for one in (model, reference):
        check_vocabulary(one, stream)
    n_tokens = len(stream) - 1
    sums = np.zeros((n_tokens.bit_length() + 1, 5))  # by bucket: tokens, nll, nll, agreed, kl
    window_kl: list[float] = []
    at_once = max(1, windows_at_once(reference, window) // 2)
    for group in batched_windows(sliding_windows(n_tokens, window, stride), at_once):
        window_kl += _add(sums, model, reference, stream, group)
        if tick is not None:
            tick(group[-1].end, n_tokens)
    if not np.isfinite(sums).all():
        raise HeadwiseError(
            "a model's predictions on this text are not numbers (NaN or infinity); a cut or "
            "trained model that does this is broken, in half precision try --dtype fp32."
        )
    _, nll, reference_nll, agreed, kl = (sums.sum(0) / n_tokens).tolist()
    drift = tuple(
        Drift(2**b // 2 + 1 if b else 1, 2**b, int(row[0]), float(row[4] / row[0]))
        for b, row in enumerate(sums)
        if row[0]
    )
    return Comparison(
        n_tokens, window, stride, nll, reference_nll, agreed, kl, drift, tuple(window_kl)
    )


def embedding_cosines(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    *,
    max_length: int = 128,
    tick: Tick | None = None,
) -> list[float]:
    """The cosine between both encoders' mean-pooled embeddings, sentence by sentence."""
    import torch

    found: list[float] = []
    for start in range(0, len(sentences), 32):
        some = list(sentences[start : start + 32])
        batch = tokenizer(
            some, padding=True, truncation=True, max_length=max_length, return_tensors="pt"
        ).to(model.device)
        with torch.inference_mode():
            own, other = (_pooled(one, batch).double() for one in (model, reference))
            found += torch.nn.functional.cosine_similarity(own, other).tolist()
        if tick is not None:
            tick(len(found), len(sentences))
    return found


def _add(
    sums: np.ndarray,
    model: PreTrainedModel,
    reference: PreTrainedModel,
    stream: Integer[np.ndarray, " n"],
    group: Sequence[Window],
) -> list[float]:
    """Add the scored tokens of windows of one length to the sums of their buckets.

    Returns each window's mean KL.
    """
    import torch

    window_kl = []
    rows = np.stack([stream[w.start : w.end + 1] for w in group]).astype(np.int64)
    whole = torch.from_numpy(rows)
    longest = max(w.end + 1 - w.scored_from for w in group)
    with torch.inference_mode():
        inputs = whole[:, :-1]
        own = last_logits(model, inputs.to(model.device), longest)
        other = last_logits(reference, inputs.to(reference.device), longest)
        if own.shape[-1] != other.shape[-1]:
            raise HeadwiseError(
                f"both models must have one vocabulary, got {own.shape[-1]} and "
                f"{other.shape[-1]} tokens; give the model this one was made from."
            )
        for i, w in enumerate(group):
            kl = 0.0
            for end in range(w.end, w.scored_from - 1, -_ROWS):
                n = min(_ROWS, end - w.scored_from + 1)
                at = slice(own.shape[1] - (w.end - end) - n, own.shape[1] - (w.end - end))
                targets = whole[i, end - w.start - n + 1 : end - w.start + 1]
                columns = _columns(own[i, at], other[i, at], targets)
                seen = np.arange(end - n + 1, end + 1) - w.start  # tokens before each prediction
                buckets = np.ceil(np.log2(seen)).astype(int)
                np.add.at(sums, buckets, np.column_stack([np.ones(n), columns]))
                kl += float(columns[:, -1].sum())
            window_kl.append(kl / (w.end + 1 - w.scored_from))
    return window_kl


def _columns(own: Tensor, other: Tensor, targets: Tensor) -> np.ndarray:
    """(tokens, 4): both negative log-likelihoods, agreement of the top token, KL."""
    import torch

    q = own.float().log_softmax(-1)
    p = other.to(own.device).float().log_softmax(-1)
    next_one = targets.to(own.device)[:, None]
    kl = (p.exp() * (p - q)).sum(-1)
    parts = (-q.gather(1, next_one)[:, 0], -p.gather(1, next_one)[:, 0])
    agreed = (q.argmax(-1) == p.argmax(-1)).float()
    found: np.ndarray = torch.stack([*parts, agreed, kl], 1).double().cpu().numpy()
    return found


def _pooled(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """The mean of the last hidden states over the tokens that are not padding."""
    states: Tensor = model(**batch).last_hidden_state
    there = batch["attention_mask"][..., None].to(states.dtype)
    return (states * there).sum(1) / there.sum(1)
