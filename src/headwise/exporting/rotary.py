"""Kept rotary planes expressed in the position settings of other engines.

    default    frequencies base^(−2j/w): all planes of the source, or every s-th from the first
    linear     the same divided by a factor: every s-th plane from another one on
    longrope   any list, stated as factors on base^(−2j/w); a position-free pair has a huge factor

The first that expresses the kept frequencies is used: plain rotary positions survive every
converter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headwise.exporting.layout import HeadShape
from headwise.exporting.reading import Rotary

STILL = 1e30  # a plane slowed down by this does not turn within any text
_SAME = 1e-6  # relative; frequencies are computed in float32


@dataclass(frozen=True, slots=True)
class RotaryForm:
    """The frequencies in an engine's settings: a base, a linear factor, or factors per slot."""

    base: float
    factor: float = 1.0
    factors: tuple[float, ...] | None = None

    def parameters(self, context: int) -> dict[str, Any]:
        """transformers' rope_parameters."""
        if self.factors is not None:
            listed = list(self.factors)
            return {
                "rope_type": "longrope",
                "rope_theta": self.base,
                "factor": 1.0,
                "attention_factor": 1.0,
                "short_factor": listed,
                "long_factor": listed,
                "original_max_position_embeddings": context,
            }
        if self.factor != 1.0:
            return {"rope_type": "linear", "rope_theta": self.base, "factor": self.factor}
        return {"rope_type": "default", "rope_theta": self.base}


def rotary_form(rotary: Rotary, shape: HeadShape) -> RotaryForm:
    """The simplest expression of the frequencies of a head shape's slots."""
    found = [None if p is None else rotary.frequencies[p] for p in shape.slots]
    width = 2 * len(found)
    turning = [f for f in found if f is not None]
    if len(turning) == len(found):
        for base, factor in _progressions(turning, rotary.base, width):
            if all(_same(base ** (-2 * j / width) / factor, f) for j, f in enumerate(turning)):
                return RotaryForm(base, factor)
    factors = tuple(
        STILL if f is None else rotary.base ** (-2 * j / width) / f for j, f in enumerate(found)
    )
    return RotaryForm(rotary.base, factors=factors)


def _progressions(frequencies: list[float], base: float, width: int) -> list[tuple[float, float]]:
    """Bases and linear factors under which the frequencies might be a plain progression."""
    candidates = [(base, 1.0)]
    if len(frequencies) > 1:
        last = len(frequencies) - 1
        slope = math.log(frequencies[0] / frequencies[-1]) / last
        own, factor = math.exp(slope * width / 2), 1 / frequencies[0]
        candidates.append((own, 1.0 if _same(factor, 1.0) else factor))
    return candidates


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= _SAME * abs(b)
