"""Training batches: windows of a token stream, and the loss of a model on them.

A causal model predicts the next token of each token; a bidirectional model predicts masked tokens.

An epoch cuts the stream into windows of `context` predictions, from a shifted start, and shuffles
them; both depend only on the seed and the epoch. A batch is therefore a pure
function of (seed, step): a resumed run needs no sampler state, and every process of a
distributed run can make the same global batch and take its own slice.

A loss is any callable `(model, batch) -> (mean over tokens, scalars)`; the scalars are further
numbers for the metrics, averaged like the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from jaxtyping import Int64, Integer

from headwise.data.masking import IGNORED, Masking
from headwise.data.mixture import deal
from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch = dict[str, "Tensor"]  # the first axis of every tensor runs over the windows


class WindowBatches:
    """Called with a step, gives its global batch: `input_ids` and the `labels` one token on."""

    def __init__(
        self,
        tokens: Integer[np.ndarray, " n"],
        *,
        context: int,
        batch_size: int,
        seed: int | Sequence[int],
    ) -> None:
        if len(tokens) < context + 1:
            raise HeadwiseError(
                f"the training text has {len(tokens)} tokens, fewer than one window of "
                f"{context} + 1; give more text or a shorter --context."
            )
        self.tokens, self.context = tokens, context
        self.batch_size = batch_size
        self.seed = [seed] if isinstance(seed, int) else list(seed)
        # One window less than would fit leaves room to shift the cuts between epochs.
        self.windows = max(1, (len(tokens) - 1) // context - 1)
        self._epoch: tuple[int, Int64[np.ndarray, " windows"]] | None = None

    def starts(self, step: int) -> Int64[np.ndarray, " batch"]:
        """Where the windows of a step begin in the stream."""
        dealt = range(step * self.batch_size, (step + 1) * self.batch_size)
        return np.array([self.start(k) for k in dealt])

    def start(self, k: int) -> int:
        """Where the window dealt as number `k`, from 0, begins in the stream."""
        return int(self._order(k // self.windows)[k % self.windows])

    def __call__(self, step: int) -> Batch:
        """The global batch of a step."""
        return window_batch(self.tokens, self.starts(step), self.context)

    def _order(self, epoch: int) -> Int64[np.ndarray, " windows"]:
        if self._epoch is None or self._epoch[0] != epoch:
            rng = np.random.default_rng([*self.seed, epoch])
            room = len(self.tokens) - 1 - self.windows * self.context
            shift = int(rng.integers(room + 1))
            self._epoch = (epoch, shift + self.context * rng.permutation(self.windows))
        return self._epoch[1]


class MixedBatches:
    """Windows of several streams in the shares of their weights; an exhausted stream restarts."""

    def __init__(self, streams: Sequence[WindowBatches], weights: Sequence[float]) -> None:
        self.streams, self.weights = tuple(streams), tuple(weights)
        self.batch_size, self.context = streams[0].batch_size, streams[0].context
        self._dealt: Int64[np.ndarray, " windows"] = np.zeros(0, np.int64)

    def __call__(self, step: int) -> Batch:
        """The global batch of a step."""
        import torch

        first, last = step * self.batch_size, (step + 1) * self.batch_size
        if len(self._dealt) < last:  # dealing is cheap, and its first part never changes
            without_end = [math.inf] * len(self.streams)
            self._dealt = deal(self.weights, without_end, 2 * last)
        rows = []
        for k in range(first, last):
            stream = self.streams[self._dealt[k]]
            place = int((self._dealt[:k] == self._dealt[k]).sum())
            rows.append(window_batch(stream.tokens, [stream.start(place)], self.context))
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def mixed_batches(
    streams: Sequence[Integer[np.ndarray, " n"]],
    weights: Sequence[float],
    *,
    context: int,
    batch_size: int,
    seed: int,
) -> WindowBatches | MixedBatches:
    """The batches of one stream, or of several mixed."""
    several = len(streams) > 1
    kinds = [
        WindowBatches(
            stream, context=context, batch_size=batch_size, seed=[seed, i] if several else seed
        )
        for i, stream in enumerate(streams)
    ]
    return MixedBatches(kinds, weights) if several else kinds[0]


def held_out_batches(
    tokens: Integer[np.ndarray, " n"], *, context: int, batch_size: int, most: int
) -> tuple[Batch, ...]:
    """Up to `most` windows without overlap, evenly spread over the held-out stream.

    A stream shorter than one window is one shorter window; of fewer than two tokens, none.
    """
    if len(tokens) < 2:
        return ()
    context = min(context, len(tokens) - 1)
    fitting = (len(tokens) - 1) // context
    chosen = np.unique(np.linspace(0, fitting - 1, min(most, fitting)).round().astype(np.int64))
    starts = chosen * context
    return tuple(
        window_batch(tokens, starts[i : i + batch_size], context)
        for i in range(0, len(starts), batch_size)
    )


def window_batch(
    tokens: Integer[np.ndarray, " n"], starts: Sequence[int] | Int64[np.ndarray, " b"], context: int
) -> Batch:
    """The windows that begin at `starts`, as inputs and as the labels one token further on."""
    import torch

    rows = np.stack([tokens[s : s + context + 1] for s in starts]).astype(np.int64)
    whole = torch.from_numpy(rows)
    return {"input_ids": whole[:, :-1], "labels": whole[:, 1:]}


class MaskedBatches:
    """Called with a step, gives its global batch: windows with masked tokens, and their labels."""

    def __init__(
        self, windows: WindowBatches | MixedBatches, masking: Masking, *, seed: int
    ) -> None:
        self.text, self.masking, self.seed = windows, masking, seed

    def __call__(self, step: int) -> Batch:
        """The global batch of a step; a repeated window is masked anew."""
        batch = self.text(step)
        # The 1 keeps these draws apart from those of the windows' order.
        return masked_batch(
            batch,
            self.masking,
            [(self.seed, 1, step, row) for row in range(len(batch["input_ids"]))],
        )


def masked_held_out(
    tokens: Integer[np.ndarray, " n"],
    masking: Masking,
    *,
    context: int,
    batch_size: int,
    most: int,
) -> tuple[Batch, ...]:
    """Held-out windows, with the same masks at every validation and in every run."""
    inside = masking.inside(context)
    found = held_out_batches(tokens, context=inside, batch_size=batch_size, most=most)
    return tuple(
        masked_batch(batch, masking, [(i, row) for row in range(len(batch["input_ids"]))])
        for i, batch in enumerate(found)
    )


def masked_batch(batch: Batch, masking: Masking, seeds: Sequence[Sequence[int]]) -> Batch:
    """The windows of a batch, masked, with the tokens to be predicted as labels."""
    import torch

    shown, labels = masking.windows(batch["input_ids"].numpy(), seeds)
    return {"input_ids": torch.from_numpy(shown), "labels": torch.from_numpy(labels)}


class Loss(Protocol):
    """A mean over the batch's tokens, and further scalars to record."""

    def __call__(self, model: nn.Module, batch: Batch, /) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of `model` on `batch`."""
        ...


def next_token_loss(model: nn.Module, batch: Batch, /) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Cross-entropy of the next token; logits in fp32, whatever the model computes in."""
    from torch.nn.functional import cross_entropy

    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten()), {}


def masked_token_loss(model: nn.Module, batch: Batch, /) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Cross-entropy of the masked tokens; every window has equally many."""
    from torch.nn.functional import cross_entropy

    logits = model(input_ids=batch["input_ids"]).logits.float().flatten(0, 1)
    return cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORED), {}
