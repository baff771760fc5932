"""Text of several kinds, each with a weight, for calibration and training.

    --text notes.txt --text 0.5:code.txt         notes twice as many tokens as code
    --text builtin:mixed                         the built-in texts, one of each kind

A weight is a number and a colon before the name; the default is 1. A file whose own name
begins like that is written with its folder: ./0.5:code.txt.

Windows are ordered so that every prefix has the wanted shares. Each window is of one
kind, because models do not see jumps of topic within a window:

    notes ▮▮▮▮▮▮…  ─┐
                     ├─► n n c n n c n n c …
    code  ▯▯▯▯▯▯…  ─┘
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Integer, UInt32

from headwise.data.builtin import MIXED, MIXED_KINDS
from headwise.data.text import Text, held_out_split, name_and_weight, read_source
from headwise.data.tokens import token_stream
from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Share:
    """One text of a mixture, and its weight among them."""

    text: Text
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Mixture:
    """Several texts with their weights."""

    shares: tuple[Share, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The texts' names, with the weights that are not 1."""
        return tuple(_written(s.text.source, s.weight) for s in self.shares)

    @property
    def source(self) -> str:
        """The texts' names in one line."""
        return " + ".join(self.names)

    @property
    def sha256(self) -> str:
        """The hash of a single text, or a hash of several hashes and weights."""
        if len(self.shares) == 1:
            return self.shares[0].text.sha256
        total = math.fsum(self.weights)
        lines = (f"{s.text.sha256} {s.weight / total:.12f}\n" for s in self.shares)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def parts_sha256(self) -> tuple[str, ...]:
        """The hash of each text; () for a single text, whose hash is `sha256`."""
        several = len(self.shares) > 1
        return tuple(s.text.sha256 for s in self.shares) if several else ()

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of every text."""
        return tuple(s.weight for s in self.shares)

    @property
    def texts(self) -> tuple[Text, ...]:
        """The texts in order."""
        return tuple(s.text for s in self.shares)

    def split(self, share: float) -> tuple[Mixture, tuple[Text, ...]]:
        """The mixture without the held-out parts, and the part held out of each text."""
        if not share:
            return self, ()
        kept, held_out = [], []
        for one in self.shares:
            parts = held_out_split(one.text.documents, share)
            kept.append(Share(Text(one.text.source, parts.train), one.weight))
            held_out.append(Text(f"{one.text.source} (held out)", parts.held_out))
        return Mixture(tuple(kept)), tuple(held_out)


def as_mixture(text: Mixture | Text | str | Sequence[str], max_chars: int | None = None) -> Mixture:
    """A mixture from texts or names of texts; of names, the first `max_chars` of each text."""
    if isinstance(text, Mixture):
        return text
    if isinstance(text, Text):
        return Mixture((Share(text),))
    return read_mixture((text,) if isinstance(text, str) else text, max_chars)


def read_mixture(names: Sequence[str], max_chars: int | None = None) -> Mixture:
    """The texts of these names; each may begin with a weight and a colon."""
    shares = []
    for given in names:
        name, weight = name_and_weight(given)
        kinds = [f"builtin:{kind}" for kind in MIXED_KINDS] if name == MIXED else [name]
        shares += [Share(read_source(kind, max_chars), weight / len(kinds)) for kind in kinds]
    if not shares:
        raise HeadwiseError("at least one text is needed, got none; give --text.")
    _refuse_repeats(shares)
    return Mixture(tuple(shares))


def deal(weights: Sequence[float], available: Sequence[float], n: int) -> Integer[np.ndarray, " m"]:
    """The text of each of up to `n` windows; a text has `available` windows.

    The next window is from the text that is furthest behind its share so far. When a
    text is used up, the others share the rest.
    """
    left, owed = list(available), [0.0] * len(weights)
    dealt: list[int] = []
    while len(dealt) < n and any(count >= 1 for count in left):
        open_weights = [w if count >= 1 else 0.0 for w, count in zip(weights, left, strict=True)]
        total = math.fsum(open_weights)
        owed = [o + w / total for o, w in zip(owed, open_weights, strict=True)]
        chosen = max((i for i, w in enumerate(open_weights) if w), key=lambda i: (owed[i], -i))
        owed[chosen] -= 1
        left[chosen] -= 1
        dealt.append(chosen)
    return np.array(dealt, dtype=np.int64)


def token_windows(
    tokenizer: PreTrainedTokenizerBase,
    mixture: Mixture,
    *,
    length: int,
    tokens: int,
    vocab_size: int | None = None,
) -> UInt32[np.ndarray, "windows length"]:
    """Windows of up to `tokens` tokens in total; an incomplete last window is dropped."""
    streams = [
        token_stream(tokenizer, text.documents, most=tokens, vocab_size=vocab_size)
        for text in mixture.texts
    ]
    order = deal(mixture.weights, [len(s) // length for s in streams], tokens // length)
    if not len(order):
        longest = max(map(len, streams))
        raise HeadwiseError(
            f"{mixture.source} has {longest} tokens, but one sequence needs {length}; give more "
            "text or a smaller --length."
        )
    taken = [0] * len(streams)
    rows = []
    for i in order:
        rows.append(streams[i][taken[i] * length : (taken[i] + 1) * length])
        taken[i] += 1
    return np.stack(rows)


def _written(source: str, weight: float) -> str:
    return source if weight == 1 else f"{weight:g}:{source}"


def _refuse_repeats(shares: Sequence[Share]) -> None:
    """Refuse a text given twice: one copy could be trained on and the other held out."""
    seen: dict[str, str] = {}
    for share in shares:
        name = share.text.source
        first = seen.setdefault(share.text.sha256, name)
        if first is not name or sum(s.text.source == name for s in shares) > 1:
            other = "twice" if first == name else f"and as {first}"
            raise HeadwiseError(
                f"a text must be given once, got {name} {other}; give it a weight instead, such "
                f"as 2:{Path(name).name}."
            )
