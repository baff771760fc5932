"""A model against the one it was made from, on the same windows of text, sentences or images.

Per token, where p are the reference's next-token probabilities and q the model's:

    nll           −log q(next) and −log p(next); the ratio of perplexities is e to their difference
    top agreement whether both rank the same token first
    kl            Σ p·log(p/q), the effect of the cut, independent of the actual text

The mean is over tokens. `drift` is the KL by the number of tokens before the prediction, in
doubling steps (1, 2, 3–4, 5–8, …): it shows errors that build up along the sequence.
`window_kl` is the mean of each window: a cut can fail completely on a few windows.

Encoders and image models are compared by the cosine between their embeddings, the means of the
last hidden states; for classifiers, agreement and KL are those of the classes.

If only one of the two models fits in memory, the predictions of the first are kept on disk:

reference ─► logits of every group of windows ─► file ─┐
(freed)                                                ├─► the same comparison, the same numbers
model ─────► logits, group by group ───────────────────┘
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Float16, Integer

from headwise.data.images import PIXELS
from headwise.data.tokens import tokenizing
from headwise.errors import HeadwiseError
from headwise.measure.likelihood import (
    DEFAULT_WINDOW,
    Window,
    batched_windows,
    check_vocabulary,
    check_windows,
    last_logits,
    sliding_windows,
    windows_at_once,
)
from headwise.measure.record import Drift, ImageQuality
from headwise.memory import size
from headwise.progress import Progress, silent

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(slots=True)
class StoredLogits:
    """The logits of a text's groups of windows, read once in the order they were written."""

    file: Path
    at_once: int  # windows in a group
    _shapes: list[tuple[int, ...]] = field(default_factory=list)
    _read: int = 0  # bytes so far

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        stream: Integer[np.ndarray, " n"],
        file: Path,
        *,
        window: int,
        stride: int | None = None,
    ) -> StoredLogits:
        """Run a model over a text and keep its logits, in float32."""
        import torch

        stride = window if stride is None else stride
        check_windows(stream, window, stride)
        check_vocabulary(model, stream)
        vocabulary: int = model.config.get_text_config().vocab_size
        _check_space(file, 4 * vocabulary * len(stream) * max(1, window // stride))
        found = cls(file, groups_at_once(model, window))
        with file.open("wb") as target, torch.inference_mode():
            for group in groups(len(stream) - 1, window, stride, found.at_once):
                inputs = torch.from_numpy(rows_of(stream, group))[:, :-1]
                logits = last_logits(model, inputs.to(model.device), longest(group))
                numbers = logits.float().cpu().numpy()
                found._shapes.append(numbers.shape)
                target.write(np.ascontiguousarray(numbers).data)
        return found

    def next(self) -> torch.Tensor:
        """The logits of the next group."""
        import torch

        shape = self._shapes.pop(0)
        count = int(np.prod(shape))
        numbers = np.fromfile(self.file, np.float32, count, offset=self._read)
        self._read += numbers.nbytes
        if not self._shapes:
            self.file.unlink()
        return torch.from_numpy(numbers.reshape(shape))


def groups(n_tokens: int, window: int, stride: int, at_once: int) -> Iterator[list[Window]]:
    """The windows of a text, some of them together."""
    return batched_windows(sliding_windows(n_tokens, window, stride), at_once)


def groups_at_once(model: PreTrainedModel, window: int) -> int:
    """How many windows run together when the logits of two models are in memory."""
    return max(1, windows_at_once(model, window) // 2)


def rows_of(
    stream: Integer[np.ndarray, " n"], group: list[Window]
) -> Integer[np.ndarray, "rows length"]:
    """The tokens of windows of one length, each with the token after its last."""
    return np.stack([stream[w.start : w.end + 1] for w in group]).astype(np.int64)


def longest(group: list[Window]) -> int:
    """How many of a group's last positions are scored."""
    return max(w.end + 1 - w.scored_from for w in group)


def _check_space(file: Path, wanted: int) -> None:
    left = shutil.disk_usage(file.parent).free
    if wanted > left:
        raise HeadwiseError(
            f"only one of the two models fits in memory, and the predictions of the other need "
            f"{size(wanted)} in {file.parent}, which has {size(left)} free; use fewer --tokens, or "
            "free space."
        )


_ROWS = 256  # positions whose probabilities are compared at once
_IMAGES = 16  # images run together


@dataclass(frozen=True, slots=True)
class TextComparison:
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
        """Perplexity ÷ the reference's; infinite where that overflows a float."""
        gap = self.nll - self.reference_nll
        return math.exp(gap) if gap < 709 else math.inf


def text_comparison(
    model: PreTrainedModel,
    reference: PreTrainedModel | StoredLogits,
    stream: Integer[np.ndarray, " n"],
    *,
    window: int = DEFAULT_WINDOW,
    stride: int | None = None,
    progress: Progress = silent,
) -> TextComparison:
    """Score every token of `stream` but the first with both models.

    `stride` defaults to `window`: then each position of a window is scored equally often. The
    reference may be its stored logits on this text, with the same window and stride.
    """
    stride = window if stride is None else stride
    check_windows(stream, window, stride)
    check_vocabulary(model, stream)
    if isinstance(reference, StoredLogits):
        at_once = reference.at_once
    else:
        check_vocabulary(reference, stream)
        at_once = groups_at_once(reference, window)
    n_tokens = len(stream) - 1
    sums = np.zeros((n_tokens.bit_length() + 1, 5))  # by bucket: tokens, nll, nll, agreed, kl
    window_kl: list[float] = []
    for group in groups(n_tokens, window, stride, at_once):
        window_kl += _add(sums, model, reference, stream, group)
        progress("scoring", group[-1].end, n_tokens)
    if not np.isfinite(sums).all():
        raise HeadwiseError(
            "a model's predictions on this text are NaN or infinite; its weights are broken, or "
            "overflow in half precision: try --dtype fp32."
        )
    _, nll, reference_nll, agreed, kl = (sums.sum(0) / n_tokens).tolist()
    drift = tuple(
        Drift(
            first=2**b // 2 + 1 if b else 1,
            last=2**b,
            tokens=int(row[0]),
            kl=float(row[4] / row[0]),
        )
        for b, row in enumerate(sums)
        if row[0]
    )
    return TextComparison(
        n_tokens, window, stride, nll, reference_nll, agreed, kl, drift, tuple(window_kl)
    )


def embedding_cosines(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    *,
    max_length: int = 128,
    progress: Progress = silent,
) -> list[float]:
    """The cosine between both encoders' mean-pooled embeddings, sentence by sentence."""
    import torch

    found: list[float] = []
    for start in range(0, len(sentences), 32):
        some = sentences[start : start + 32]
        batch = _sentences(tokenizer, some, max_length).to(model.device)
        with torch.inference_mode():
            own, other = (_pooled(one, batch).double() for one in (model, reference))
            found += torch.nn.functional.cosine_similarity(own, other).tolist()
        progress("embedding", len(found), len(sentences))
    return found


def _add(
    sums: np.ndarray,
    model: PreTrainedModel,
    reference: PreTrainedModel | StoredLogits,
    stream: Integer[np.ndarray, " n"],
    group: list[Window],
) -> list[float]:
    """Add the scored tokens of windows of one length to the sums of their buckets.

    Returns each window's mean KL.
    """
    import torch

    window_kl = []
    whole, scored = torch.from_numpy(rows_of(stream, group)), longest(group)
    with torch.inference_mode():
        inputs = whole[:, :-1]
        own = last_logits(model, inputs.to(model.device), scored)
        if isinstance(reference, StoredLogits):
            other = reference.next()
        else:
            other = last_logits(reference, inputs.to(reference.device), scored)
        if own.shape[-1] != other.shape[-1]:
            raise HeadwiseError(
                f"both models must have the same vocabulary, got {own.shape[-1]} and "
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


def sentence_embeddings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str]
) -> Float[np.ndarray, "sentences dim"]:
    """An encoder's mean-pooled embeddings."""
    import torch

    found: list[np.ndarray] = []
    for start in range(0, len(sentences), 32):
        batch = _sentences(tokenizer, sentences[start : start + 32], 128).to(model.device)
        with torch.inference_mode():
            found.append(_pooled(model, batch).double().cpu().numpy())
    made = np.concatenate(found)
    if not np.isfinite(made).all():
        raise HeadwiseError(
            "a model's embeddings are NaN or infinite; its weights are broken, or overflow in half "
            "precision: try --dtype fp32."
        )
    return made


def _sentences(tokenizer: Any, sentences: Sequence[str], max_length: int) -> Any:
    options = {"padding": True, "truncation": True, "max_length": max_length}
    with tokenizing():
        return tokenizer(list(sentences), **options, return_tensors="pt")


def _pooled(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """The mean of the last hidden states over the tokens that are not padding."""
    states: Tensor = model(**batch).last_hidden_state
    there = batch["attention_mask"][..., None].to(states.dtype)
    return (states * there).sum(1) / there.sum(1)


@dataclass(frozen=True, slots=True)
class ImageComparison:
    """The results of every image."""

    cosines: tuple[float, ...]
    agreed: tuple[bool, ...]  # on the first class; empty without classes
    divergences: tuple[float, ...]

    def quality(self, **facts: Any) -> ImageQuality:
        """Means and the worst, with the facts about the images."""
        n = len(self.cosines)
        return ImageQuality(
            **facts,
            images=n,
            cosine=math.fsum(self.cosines) / n,
            least_cosine=min(self.cosines),
            top_agreement=sum(self.agreed) / n if self.agreed else None,
            kl=math.fsum(self.divergences) / n if self.agreed else None,
        )


def image_comparison(
    model: Any,
    reference: Any,
    pixels: Float16[np.ndarray, "images channels height width"],
    *,
    progress: Progress = silent,
) -> ImageComparison:
    """Both models on every image; classes are compared where the models have them."""
    import torch

    cosines: list[float] = []
    agreed: list[bool] = []
    divergences: list[float] = []
    for start in range(0, len(pixels), _IMAGES):
        some = torch.from_numpy(pixels[start : start + _IMAGES])
        with torch.inference_mode():
            (own, q), (other, p) = (_answer(one, some) for one in (model, reference))
            cosines += torch.nn.functional.cosine_similarity(own, other).tolist()
            if p is not None and q is not None:
                agreed += (p.argmax(-1) == q.argmax(-1)).tolist()
                divergences += (p.exp() * (p - q)).sum(-1).tolist()
        progress("comparing", len(cosines), len(pixels))
    if not np.isfinite([*cosines, *divergences]).all():
        raise HeadwiseError(
            "a model's outputs for these images are NaN or infinite; its weights are broken, or "
            "overflow in half precision: try --dtype fp32."
        )
    return ImageComparison(tuple(cosines), tuple(agreed), tuple(divergences))


def _answer(model: Any, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
    """Embeddings, and the logarithms of the classes' probabilities if the model has classes."""
    states: list[Tensor] = []
    with _last_states(model, states):
        output = model(**{PIXELS: pixels.to(model.device, model.dtype)})
    logits = output.get("logits")
    embeddings = states[0].double().mean(1).cpu()
    return embeddings, None if logits is None else logits.double().log_softmax(-1).cpu()


@contextmanager
def _last_states(model: Any, states: list[Tensor]) -> Iterator[None]:
    """The last hidden states, also of a model with a head, recorded by a hook."""
    from headwise.models.backbones_headwise import base_of
    from headwise.models.build import inner

    def note(module: Any, args: Any, output: Any) -> None:
        states.append(output.last_hidden_state)

    handle = base_of(inner(model)).register_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()
