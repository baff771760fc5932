"""The text a cut is fitted on, in batches: whole windows, and many short openings.

    windows    ▮▯▯▯▯▯▯▯▯▯▯▯▯▯▯▯▯▯▯▯…        one first token each
    openings   ▮▯▯▯  ▮▯▯▯  ▮▯▯▯  ▮▯▯▯  …    as many first tokens as there is room for

A causal model makes an attention sink of the first token it sees: heads that look for nothing look
there. Windows show few such tokens, and where a cut fails at one, it fails for the whole window.
(SmolLM2 at 50%, `benchmarks/lost_sinks.py`: of 1,536 unseen first tokens 79 were lost when it was
fitted on 192 windows alone, 4 with the openings and the log in `layer_task.missed`.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.compress.settings import CutSettings

OPENING = 4  # tokens
OPENINGS_EVERY = 6  # windows' batches
LEAST_BATCHES = 8  # of fewer, none is kept aside
CHECK_EVERY = 12  # one batch of so many is kept aside


@dataclass(frozen=True, slots=True)
class Calibration:
    """Batches of tokens or pixels; on those kept `aside` every choice is judged, none of few."""

    ids: list[Tensor]
    aside: tuple[int, ...]


def calibration(
    ids: Tensor, settings: CutSettings, *, causal: bool, length: int | None = None
) -> Calibration:
    """The batches of a profile's windows, or of its images, which are `length` tokens each."""
    rows = max(1, settings.batch_tokens // (length or ids.shape[1]))
    windows = list(torch.split(ids, rows))
    short = _openings(ids, len(windows) // OPENINGS_EVERY, settings) if causal else []
    aside = kept_aside(len(windows))
    openings_aside = [len(windows) + b for b in kept_aside(len(short))]
    return Calibration([*windows, *short], (*aside, *openings_aside))


def kept_aside(batches: int) -> range:
    """The numbers of the batches kept aside, of so many."""
    return range(CHECK_EVERY // 2, batches if batches >= LEAST_BATCHES else 0, CHECK_EVERY)


def _openings(ids: Tensor, batches: int, settings: CutSettings) -> list[Tensor]:
    """Short sequences from all over the text."""
    if not settings.openings or not batches or ids.shape[1] < 2 * OPENING:
        return []
    short = ids.reshape(-1)[: ids.numel() // OPENING * OPENING].view(-1, OPENING)
    rows = max(1, settings.batch_tokens // OPENING)
    chosen = torch.linspace(0, len(short) - 1, min(len(short), batches * rows)).long()
    return list(torch.split(short[chosen], rows))
