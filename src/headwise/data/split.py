"""Which part of a text is never trained on.

    many documents   a document is held out when the SHA-256 of its text falls below the share,
                     so copies of one document never stand on both sides
    few documents    the last part of the stream, cut after a line end where one is near

The rule is deterministic and does not depend on the seed, so runs with different seeds compare.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from headwise.errors import HeadwiseError

MANY_DOCUMENTS = 100  # below this, hashing could easily hold out nothing, or too much


@dataclass(frozen=True, slots=True)
class Split:
    """Documents to train on, documents held out, and the rule in words."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    rule: str


def held_out_split(documents: tuple[str, ...], share: float) -> Split:
    """Hold out about `share` of the documents, or of the characters when documents are few."""
    if not 0 <= share < 1:
        raise HeadwiseError(f"held-out must be a share from 0 up to 1, got {share}.")
    if share == 0:
        return Split(train=documents, held_out=(), rule="nothing held out")
    if len(documents) >= MANY_DOCUMENTS:
        chosen = [_position(d) < share for d in documents]
        if any(chosen) and not all(chosen):
            train = tuple(d for d, out in zip(documents, chosen, strict=True) if not out)
            held = tuple(d for d, out in zip(documents, chosen, strict=True) if out)
            return Split(train, held, f"documents whose hash is below {share:g}")
    return _last_part(documents, share)


def _position(document: str) -> float:
    """A document's place in [0, 1), decided by its text."""
    digest = hashlib.sha256(document.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _last_part(documents: tuple[str, ...], share: float) -> Split:
    cut = round(sum(map(len, documents)) * (1 - share))
    train, held, seen = [], [], 0
    for document in documents:
        at = min(max(cut - seen, 0), len(document))
        if 0 < at < len(document):
            line_end = document.find("\n", at, at + 200)
            at = line_end + 1 if 0 <= line_end < len(document) - 1 else at
        train += [document[:at]] if at else []
        held += [document[at:]] if at < len(document) else []
        seen += len(document)
    return Split(tuple(train), tuple(held), f"the last {share:.3g} of the text")
