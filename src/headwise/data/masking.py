"""Masked tokens: what an encoder is trained and scored on.

    window   [CLS]  t  t  t  t  t  t  t  [SEP]
    shown    [CLS]  t  ■  t  t  x  t  t  [SEP]     15% of the tokens are to be predicted:
    label      –    –  t  –  –  t  –  –    –       8 in 10 are masked, 1 is another, 1 is left

A bidirectional model cannot be trained on the next token: it would read the
answer. The tokens that stay or change keep the model from trusting its input.

Every window has the same number of masked positions, so the mean over equal parts of a batch is the
mean over the batch. The positions and their contents are a pure function of a window's seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int64

from headwise.errors import HeadwiseError
from headwise.records import Frozen

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MASKED_SHARE = 0.15
SHOWN_AS_MASK, SHOWN_AS_ANOTHER = 0.8, 0.1  # of the tokens to be predicted
IGNORED = -100  # the label of a token that is not to be predicted, as in transformers


class Masking(Frozen):
    """The tokens that masking needs: the mask, the ends of a window, and excluded tokens."""

    mask: int
    first: int | None  # before a window, after it; None: nothing
    last: int | None
    special: tuple[int, ...]
    vocab_size: int

    @property
    def ends(self) -> int:
        """The number of special tokens around the text of a window."""
        return (self.first is not None) + (self.last is not None)

    def inside(self, context: int) -> int:
        """How many tokens of text a window of `context` tokens holds."""
        if context - self.ends < 1:
            raise HeadwiseError(
                f"a window of {context} tokens has no room for text between its {self.ends} end "
                "tokens; give a longer --context."
            )
        return context - self.ends

    def windows(
        self, text: Int64[np.ndarray, "rows length"], seeds: Iterable[Sequence[int]]
    ) -> tuple[Int64[np.ndarray, "rows context"], Int64[np.ndarray, "rows context"]]:
        """The model's inputs and labels for rows of text, with one seed each."""
        others = np.setdiff1d(np.arange(self.vocab_size), self.special)
        pairs = [self._masked(row, others, seed) for row, seed in zip(text, seeds, strict=True)]
        shown, labels = (np.stack(part) for part in zip(*pairs, strict=True))
        for token, before in ((self.first, True), (self.last, False)):
            if token is not None:
                shown = _beside(shown, token, before=before)
                labels = _beside(labels, IGNORED, before=before)
        return shown, labels

    def _masked(
        self,
        row: Int64[np.ndarray, " length"],
        others: Int64[np.ndarray, " others"],
        seed: Sequence[int],
    ) -> tuple[Int64[np.ndarray, " length"], Int64[np.ndarray, " length"]]:
        rng = np.random.default_rng(list(seed))
        # Special tokens come last in the draw: they are chosen only where nothing else is left.
        order = rng.random(len(row)) + np.isin(row, self.special)
        chosen = np.argsort(order)[: max(1, round(MASKED_SHARE * len(row)))]
        labels = np.full_like(row, IGNORED)
        labels[chosen] = row[chosen]
        fate, shown = rng.random(len(chosen)), row.copy()
        another = rng.choice(others, len(chosen)) if len(others) else row[chosen]
        kept = np.where(fate < SHOWN_AS_MASK + SHOWN_AS_ANOTHER, another, row[chosen])
        shown[chosen] = np.where(fate < SHOWN_AS_MASK, self.mask, kept)
        return shown, labels


def masking_of(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Masking:
    """The masking of a tokenizer; an error if it has no mask token."""
    if tokenizer.mask_token_id is None:
        raise HeadwiseError(
            "this model is bidirectional, so it predicts masked tokens, but its tokenizer has no "
            "mask token; give the tokenizer of an encoder, or none to train one on the text."
        )
    return Masking(
        mask=tokenizer.mask_token_id,
        first=tokenizer.cls_token_id,
        last=tokenizer.sep_token_id,
        special=tuple(sorted({int(i) for i in tokenizer.all_special_ids})),
        vocab_size=min(vocab_size, len(tokenizer)),
    )


def _beside(
    rows: Int64[np.ndarray, "rows length"], token: int, *, before: bool
) -> Int64[np.ndarray, "rows longer"]:
    column = np.full((len(rows), 1), token, dtype=rows.dtype)
    return np.hstack([column, rows] if before else [rows, column])
