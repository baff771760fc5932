"""Yes, no or open: whether one thing is larger than another, and verdicts made of such answers.

    difference ──┼────[──•──]──────►   yes: above 0 by more than the spread
    difference ─[┼•]─┊─────────────►   no: whatever it is, it is not worth speaking of
    difference ──[──┼┊──•─────]────►   open: the spread hides it
                    └ a tenth of what it is compared with

An open question is neither for a claim nor against it: few seeds must not refute what many might
show. A claim all of whose questions are open cannot be decided by the runs at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from headwise.reproduce.claim import Verdict
from headwise.reproduce.statistics import paired_difference, summary

MARGIN = 0.1  # of the larger: less than that is called equal
Answer = Literal["yes", "no", "open"]


def larger(a: Sequence[float], b: Sequence[float]) -> Answer:
    """Whether a is larger than b, seed by seed."""
    gap = paired_difference(a, b)
    if gap.positive:
        return "yes"
    return "no" if gap.high <= MARGIN * abs(summary(a).mean) else "open"


def verdict(answers: Sequence[Answer]) -> Verdict:
    """Holds: all yes. Does not hold: some no, none yes. All open: cannot be tested here."""
    if all(a == "yes" for a in answers):
        return "holds"
    if all(a == "open" for a in answers):
        return "cannot be tested here"
    return "holds in part" if "yes" in answers else "does not hold"


def counted(answers: Sequence[Answer]) -> str:
    """How often each answer was given."""
    return ", ".join(f"{word} {answers.count(word)}" for word in ("yes", "no", "open"))
