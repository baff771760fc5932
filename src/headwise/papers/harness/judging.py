"""Means with their spread, answers to questions of size, and verdicts made of such answers.

Experiments are repeated over seeds, and what is compared shares its seed (the same data in the
same order). So differences are taken seed by seed, and what all experiments of a seed have in
common cancels. "Lowest at 8" is then a statement about each rival's difference from 8:

    difference ──┼────[───•───]──►   the 95% interval of its mean lies above 0: 8 is lower
    difference ──[─┼──•───────]──►   the interval covers 0: within the spread, a tie

The interval is Student's. With k rivals each interval is made at 1 − 0.05/k (Bonferroni), so that
all k statements together are wrong in at most 5% of the cases. A single seed separates nothing.

"Is a larger than b?" has three answers:

    difference ──┼──┊[──•──]───────►   yes: above 0 by more than the spread
    difference ─[┼•]┊──────────────►   no: whatever it is, it is negligible
    difference ──[──┼┊──•─────]────►   open: the spread hides it
                    └ the margin: a tenth of the larger unless a claim says otherwise

An interval below the margin is a "no" even where it lies above 0: a difference may be certain and
yet too small to carry a claim. An open question counts neither for a claim nor against it: few
seeds must not refute what many might show, and what was not seen to fail is not thereby shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from headwise.papers.harness.claim import Verdict

CONFIDENCE = 0.95
MARGIN = 0.1  # of the larger: less than that is called equal
TINY = 1e-30  # stands for 0 where logarithms are taken
Key = TypeVar("Key")
Answer = Literal["yes", "no", "open"]
NOT: dict[Answer, Answer] = {"yes": "no", "no": "yes", "open": "open"}
KINDEST_FIRST: tuple[Verdict, ...] = (
    "holds", "holds in part", "cannot be tested here", "does not hold",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, standard deviation (0 for a single value), count, least and largest of some values."""

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
    """The mean of paired differences with its interval, which is infinite for a single pair."""

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
    """Where a curve is lowest on average, and which other places the spread cannot rule out."""

    at: str | int | float
    tied: tuple[str | int | float, ...]
    wins: int  # seeds at which it is the lowest of all
    seeds: int

    @property
    def certain(self) -> bool:
        """Whether it is lower than everything else by more than the spread."""
        return not self.tied

    def __str__(self) -> str:
        tied = f"within the spread of {listed(self.tied)}; " if self.tied else ""
        return f"{tied}lowest at {self.wins} of {self.seeds} seeds"


@dataclass(frozen=True, slots=True)
class Line:
    """A least-squares line and the share of the variance it explains."""

    slope: float
    intercept: float
    r_squared: float


# --- numbers -----------------------------------------------------------------------------------


def summary(values: Sequence[float]) -> Summary:
    """Mean and spread over seeds."""
    numbers = np.asarray(values, dtype=np.float64)
    assert numbers.ndim == 1
    assert numbers.size
    sd = float(numbers.std(ddof=1)) if numbers.size > 1 else 0.0
    ends = float(numbers.min()), float(numbers.max())
    return Summary(float(numbers.mean()), sd, int(numbers.size), *ends)


def joint_confidence(n_intervals: int) -> float:
    """The level of each of several intervals that are to hold together (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / max(1, n_intervals)


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, confidence: float = CONFIDENCE
) -> Difference:
    """a − b, pair by pair: the mean and its Student interval."""
    import scipy.stats

    assert len(a) == len(b)
    gaps = summary([float(x) - float(y) for x, y in zip(a, b, strict=True)])
    if gaps.n == 1:
        return Difference(gaps.mean, -math.inf, math.inf)
    reach = float(scipy.stats.t.ppf(0.5 + confidence / 2, gaps.n - 1)) * gaps.sd / gaps.n**0.5
    return Difference(gaps.mean, gaps.mean - reach, gaps.mean + reach)


def logs(values: Sequence[float]) -> list[float]:
    """Logarithms of errors; an error of exactly 0 counts as the smallest number there is."""
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
    level = joint_confidence(len(rivals))
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


def more_often(a: int, b: int, n: int) -> float:
    """Fisher's exact p-value, one-sided: a of n successes where b of n are as likely."""
    import scipy.stats

    table = np.array([[a, n - a], [b, n - b]])
    return float(scipy.stats.fisher_exact(table, alternative="greater").pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: those below 5% are all significant together."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = least
    return adjusted


def share_difference(a: int, b: int, n: int) -> Difference:
    """a/n − b/n with Newcombe's 95% interval, which is right for shares of 0 and 1 too."""
    from scipy.stats import binomtest

    ends = [binomtest(k, n).proportion_ci(CONFIDENCE, "wilson") for k in (a, b)]
    (low_a, high_a), (low_b, high_b) = ((float(e.low), float(e.high)) for e in ends)
    p, q = a / n, b / n
    below = math.hypot(p - low_a, high_b - q)
    above = math.hypot(high_a - p, q - low_b)
    return Difference(p - q, p - q - below, p - q + above)


# --- answers and verdicts ----------------------------------------------------------------------


def larger(
    a: Sequence[float],
    b: Sequence[float],
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
) -> Answer:
    """Whether a is larger than b, seed by seed; less than `margin` of a is not larger."""
    gap = paired_difference(a, b, confidence=confidence)
    return answer(gap, margin * abs(summary(a).mean))


def larger_by_factor(
    a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE
) -> Answer:
    """The same for errors that differ by powers of ten: their logarithms are compared."""
    gap = paired_difference(logs(a), logs(b), confidence=confidence)
    return answer(gap, -math.log1p(-MARGIN))


def answer(gap: Difference, negligible: float) -> Answer:
    """Whether a difference is above 0, and by more than is negligible."""
    if gap.high <= negligible:
        return "no"
    return "yes" if gap.positive else "open"


def verdict(answers: Sequence[Answer]) -> Verdict:
    """What the answers say of a claim, whichever way those that are open would turn out.

    Each question is a part of the claim that would be something by itself. Holds: all yes. In
    part: some yes. Does not hold: all no. Otherwise the runs at hand cannot decide: an open
    question could still be answered yes, and then the claim would hold in part.
    """
    if all(a == "yes" for a in answers):
        return "holds"
    if "yes" in answers:
        return "holds in part"
    return "does not hold" if "open" not in answers else "cannot be tested here"


def kindest(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict most in favour of a claim, where the paper leaves several readings open."""
    return min(verdicts, key=KINDEST_FIRST.index)


# --- words -------------------------------------------------------------------------------------


def counted(answers: Sequence[Answer]) -> str:
    """How often each answer was given."""
    return ", ".join(f"{word} {answers.count(word)}" for word in ("yes", "no", "open"))


def why_open(n_seeds: int) -> str:
    """Why a question stays open."""
    return "the spread hides the answer" if n_seeds > 1 else "one seed shows no spread"


def listed(values: Iterable[object], separator: str = ", ") -> str:
    """Some values in a sentence."""
    return separator.join(map(str, values)) or "none"
