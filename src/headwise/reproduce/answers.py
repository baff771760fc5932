"""Yes, no or open: whether one thing is larger than another, and verdicts made of such answers.

    difference ──┼──┊[──•──]───────►   yes: above 0 by more than the spread
    difference ─[┼•]┊──────────────►   no: whatever it is, it is not worth speaking of
    difference ──[──┼┊──•─────]────►   open: the spread hides it
                    └ the margin: a tenth of the larger unless a claim says otherwise

An interval below the margin is a "no" even where it lies above 0: a difference may be certain and
yet too small to carry a claim. An open question is neither for a claim nor against it: few seeds
must not refute what many might show, nor may what was not seen to fail count as shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from headwise.reproduce.claim import Verdict
from headwise.reproduce.statistics import CONFIDENCE, logs, paired_difference, summary

MARGIN = 0.1  # of the larger: less than that is called equal
Answer = Literal["yes", "no", "open"]
NOT: dict[Answer, Answer] = {"yes": "no", "no": "yes", "open": "open"}
KINDEST_FIRST: tuple[Verdict, ...] = (
    "holds", "holds in part", "cannot be tested here", "does not hold",
)  # fmt: skip


def larger(
    a: Sequence[float],
    b: Sequence[float],
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
) -> Answer:
    """Whether a is larger than b, seed by seed; less than `margin` of a is not larger."""
    gap = paired_difference(a, b, confidence=confidence)
    if gap.high <= margin * abs(summary(a).mean):
        return "no"
    return "yes" if gap.positive else "open"


def larger_by_factor(
    a: Sequence[float],
    b: Sequence[float],
    margin: float = MARGIN,
    confidence: float = CONFIDENCE,
) -> Answer:
    """The same for errors that differ by powers of ten: their logarithms are compared."""
    gap = paired_difference(logs(a), logs(b), confidence=confidence)
    if gap.high <= -math.log1p(-margin):
        return "no"
    return "yes" if gap.positive else "open"


def verdict(answers: Sequence[Answer]) -> Verdict:
    """Holds: all yes. In part: some yes. Does not hold: none yes, and no less often no than open.

    Otherwise the runs at hand cannot decide.
    """
    if all(a == "yes" for a in answers):
        return "holds"
    if "yes" in answers:
        return "holds in part"
    decided = answers.count("no") >= answers.count("open")
    return "does not hold" if decided else "cannot be tested here"


def kindest(verdicts: Iterable[Verdict]) -> Verdict:
    """The one most in favour of a claim, where several readings of it are open to the paper."""
    return min(verdicts, key=KINDEST_FIRST.index)


def counted(answers: Sequence[Answer]) -> str:
    """How often each answer was given."""
    return ", ".join(f"{word} {answers.count(word)}" for word in ("yes", "no", "open"))
