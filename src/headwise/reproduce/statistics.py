"""Means with their spread, and when a difference is more than the spread.

Experiments are repeated over seeds, and what is compared shares its seed (the same data, the same
order), so differences are taken seed by seed: what all experiments of a seed have in common drops
out. "Lowest at 8" is then a statement about each rival's difference from 8:

    difference ──┼────[───•───]──►   the 95% interval of its mean lies right of 0: 8 is lower
    difference ──[─┼──•───────]──►   it covers 0: within the spread, a tie as far as we can say

The interval is Student's; with k rivals each is made at 1 − 0.05/k (Bonferroni), so that all k
statements together are wrong in at most 5% of the cases. A single seed separates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

CONFIDENCE = 0.95
TINY = 1e-30  # stands for 0 where logarithms are taken
Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, standard deviation (0 of a single value), number, least and largest of the values."""

    mean: float
    sd: float
    n: int
    low: float
    high: float

    def __str__(self) -> str:
        shown = f"{self.mean:.4g}"
        return shown if self.n == 1 else f"{shown} ± {self.sd:.2g}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of paired differences with its interval; infinite from a single pair."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.mean:+.3g} (one seed: no interval)"
        return f"{self.mean:+.3g} [{self.low:+.2g}, {self.high:+.2g}]"

    @property
    def positive(self) -> bool:
        """Whether it is above 0 by more than the spread."""
        return self.low > 0

    @property
    def negative(self) -> bool:
        """Whether it is below 0 by more than the spread."""
        return self.high < 0


@dataclass(frozen=True, slots=True)
class Lowest:
    """Where a curve is lowest on average, and which other places the spread cannot tell from it."""

    at: str | int | float
    tied: tuple[str | int | float, ...]
    wins: int  # seeds at which it is the lowest of all
    seeds: int

    @property
    def certain(self) -> bool:
        """Whether it is lower than everything else by more than the spread."""
        return not self.tied

    def __str__(self) -> str:
        tied = f"within the spread of {', '.join(map(str, self.tied))}; " if self.tied else ""
        return f"{tied}lowest at {self.wins} of {self.seeds} seeds"


@dataclass(frozen=True, slots=True)
class Line:
    """A least-squares line and the share of the variance it explains."""

    slope: float
    intercept: float
    r_squared: float


def summary(values: Sequence[float]) -> Summary:
    """Mean and spread over seeds."""
    numbers = np.asarray(values, dtype=np.float64)
    assert numbers.ndim == 1
    assert numbers.size
    sd = float(numbers.std(ddof=1)) if numbers.size > 1 else 0.0
    ends = float(numbers.min()), float(numbers.max())
    return Summary(float(numbers.mean()), sd, int(numbers.size), *ends)


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, confidence: float = CONFIDENCE
) -> Difference:
    """a − b, pair by pair: the mean and Student's interval of it."""
    import scipy.stats

    assert len(a) == len(b)
    gaps = summary([float(x) - float(y) for x, y in zip(a, b, strict=True)])
    if gaps.n == 1:
        return Difference(gaps.mean, -math.inf, math.inf)
    reach = float(scipy.stats.t.ppf(0.5 + confidence / 2, gaps.n - 1)) * gaps.sd / gaps.n**0.5
    return Difference(gaps.mean, gaps.mean - reach, gaps.mean + reach)


def logs(values: Sequence[float]) -> list[float]:
    """Logarithms of errors; one of exactly 0 counts as the least number there is."""
    return [math.log(max(value, TINY)) for value in values]


def lowest(errors: Mapping[Key, Sequence[float]]) -> Lowest:
    """The place of the lowest errors; ``tied`` are those not above it by more than the spread.

    Every place holds its errors in the order of the same seeds. They are compared by their
    logarithms: along a curve errors differ by powers of ten, and so do their spreads.
    """
    curve = {place: logs(values) for place, values in errors.items()}
    means = {place: summary(values).mean for place, values in curve.items()}
    best = min(means, key=lambda place: means[place])
    rivals = [place for place in curve if place != best]
    level = 1 - (1 - CONFIDENCE) / max(1, len(rivals))
    tied = tuple(
        place
        for place in rivals
        if not paired_difference(curve[place], curve[best], confidence=level).positive
    )
    firsts = [min(curve, key=lambda place: curve[place][i]) for i in range(len(curve[best]))]
    return Lowest(best, tied, firsts.count(best), len(firsts))  # type: ignore[arg-type]


def line(x: Sequence[float | int], y: Sequence[float | int]) -> Line:
    """The straight line through points; R² is 1 for points on a line, 0 for a flat fit."""
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    slope, intercept = np.polyfit(xs, ys, 1)
    total = float(np.square(ys - ys.mean()).sum())
    rest = float(np.square(ys - slope * xs - intercept).sum())
    return Line(float(slope), float(intercept), 1 - rest / total if total > 0 else 0.0)
