"""Models under disturbed input: the clean loss of each, and what every disturbance adds to it.

Trained here on documentation (the beginning of the built-in text); shifted text is source code of
the standard library, which none of them has seen.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headwise.measure.robustness import Attack, greedily_swapped, noisy, sequence_losses
from headwise.reproduce.claim import ReproduceError, Values
from headwise.reproduce.pretrained import CHARACTERS, TEXT, batches

NOISE = (0.05, 0.2)
PROSE = 450_000  # characters at the beginning of the built-in text that are documentation

LONG_LINE = 40  # characters: two texts with such a line in common have more in common


@dataclass(frozen=True, slots=True)
class Stage:
    """Windows of clean and of shifted text (one token longer than what is read), and the attack."""

    clean: np.ndarray
    shifted: np.ndarray
    vocab_size: int
    attacked: int  # of the clean windows
    attack: Attack
    seed: int


def conditions(swaps: int) -> tuple[str, ...]:
    """The names of the disturbances, as in `disturbed`."""
    return ("shifted text", *(f"noise {100 * s:g}%" for s in NOISE), f"{swaps} greedy swaps")


def disturbed(model: Any, stage: Stage) -> Values:
    """The loss on clean text; by disturbance the loss, and how much higher it is on its windows."""
    inputs, labels = (torch.from_numpy(x) for x in (stage.clean[:, :-1], stage.clean[:, 1:]))
    clean = _losses(model, inputs.numpy(), labels.numpy())
    other = _losses(model, stage.shifted[:, :-1], stage.shifted[:, 1:])
    found = [(other.mean(), other.mean() - clean.mean())]
    for share in NOISE:
        changed = noisy(inputs, share, stage.vocab_size, stage.seed)
        losses = _losses(model, changed.numpy(), labels.numpy())
        found.append((losses.mean(), (losses - clean).mean()))
    few, targets = inputs[: stage.attacked], labels[: stage.attacked]
    swapped = greedily_swapped(model, few, targets, stage.attack)
    losses = _losses(model, swapped.numpy(), targets.numpy())
    found.append((losses.mean(), (losses - clean[: stage.attacked]).mean()))
    names = conditions(stage.attack.swaps)
    both = {
        name: {"loss": float(loss), "rise": float(rise)}
        for name, (loss, rise) in zip(names, found, strict=True)
    }
    return {"clean": float(clean.mean()), "disturbed": both}


def _losses(model: Any, inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    pairs = zip(batches(inputs), batches(labels), strict=True)
    return torch.cat([sequence_losses(model, x, y) for x, y in pairs]).double().numpy()


@functools.lru_cache(maxsize=1)
def source_stream(characters: int, vocab_size: int, most: int) -> np.ndarray:
    """Source code in the tokens of a model that was trained on the first `characters` of the text.

    The built-in text begins with documentation and goes on with source: its second half is that.
    """
    from headwise.data.split import held_out_split
    from headwise.data.text import read_source
    from headwise.data.tokens import token_stream, trained_tokenizer
    from headwise.reproduce.scratch_training import HELD_OUT_SHARE

    first = read_source(TEXT, characters)
    words = trained_tokenizer(held_out_split(first.documents, HELD_OUT_SHARE).train, vocab_size)
    return token_stream(words, source_documents(), most=most)


@functools.lru_cache(maxsize=1)
def prose_documents() -> tuple[str, ...]:
    """Documents of documentation, whole ones only."""
    from headwise.data.text import read_source

    return read_source(TEXT, PROSE).documents[:-1]


@functools.lru_cache(maxsize=1)
def source_documents() -> tuple[str, ...]:
    """Documents of source code."""
    from headwise.data.text import read_source

    found = read_source(TEXT, CHARACTERS).documents
    return found[len(found) // 2 :]


def apart(documents: tuple[str, ...], scored: tuple[str, ...]) -> tuple[str, ...]:
    """The documents that share no long line with those to score on.

    Topics of the documentation hold others word for word.
    """
    lines = {line for d in scored for line in _long_lines(d)}
    return tuple(d for d in documents if lines.isdisjoint(_long_lines(d)))


def _long_lines(document: str) -> set[str]:
    lines = (line.strip() for line in document.splitlines())
    return {line for line in lines if len(line) >= LONG_LINE}


def random_windows(stream: np.ndarray, length: int, count: int, seed: int) -> np.ndarray:
    """Random windows of a stream, none twice; a stream with fewer of them is an error."""
    there = len(stream) // length
    if there < count:
        raise ReproduceError(
            f"{count} windows of {length} tokens were asked for, but the text has {there}; ask for "
            "fewer, or for more text."
        )
    places = np.random.default_rng(seed).permutation(there)[:count]
    return np.stack([stream[i * length : (i + 1) * length] for i in places]).astype(np.int64)
