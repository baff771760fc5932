"""How well an encoder predicts masked tokens of a text.

The text is cut into windows without overlap; 15% of the tokens of each are to be predicted, shown
as in training (`headwise.data.masking`). The masks depend on the window's number only, so two
models with one tokenizer are asked for the same tokens. The score is no likelihood of the text: it
compares encoders with each other, never with causal models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Integer

from headwise.data.masking import IGNORED, Masking
from headwise.errors import HeadwiseError
from headwise.measure.likelihood import check_vocabulary, windows_at_once
from headwise.progress import Progress, silent

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
            "the model's predictions are not numbers (NaN or infinite) on this text; its weights "
            "are broken or overflow in this number format."
        )
    return MaskedScore(total, correct, count, rows.size, window)
