"""What the claims about "8 heads" share: a layer of fixed total width, cut into ever more heads.

The papers' word "heads" can be read in two ways when a task has several lags: heads *in total*, or
heads *per group*, one group per lag. Both are points of one curve over the total number:

    total       1    2    4    8   16   32   64   128        D = 256, 4 lags
    width     256  128   64   32   16    8    4    2
    per group                1    2    4    8   16   32

so one sweep answers both, each against its own number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headwise.reproduce.claim import Finding, Results, Table, Verdict
from headwise.reproduce.statistics import lowest, paired_difference, summary

Reading = Literal["in total", "per group"]
Curve = Mapping[int, Sequence[float]]  # error at every seed by number of heads


@dataclass(frozen=True, slots=True)
class Judgement:
    """Where one reading's curve is lowest, against the number that was claimed."""

    reading: str
    verdict: Verdict
    sentence: str


def curve_of(results: Results, groups: int = 1, value: str = "error") -> dict[int, list[float]]:
    """The measured curve by heads per group (whole ones only)."""
    found: dict[int, list[float]] = {}
    for name in results.names:
        total = int(results.named(name)[0].trial.parameters["heads"])
        if total % groups == 0:
            found[total // groups] = list(results.numbers(name, value))
    return dict(sorted(found.items()))


def judged_curve(curve: Curve, claimed: int, reading: str, unit: str = "error") -> Judgement:
    """Holds: lowest at the claimed number by more than the spread.

    In part: within the spread of the lowest, or lowest elsewhere but with fewer and more heads
    both worse by more than the spread (the trade-off is there, its place is not).
    """
    low = lowest(curve)
    best = str(summary(curve[low.at]))  # type: ignore[index]
    ties = f" (within the spread of {_listed(low.tied)})" if low.tied else ""
    text = f"Heads {reading}: lowest {unit} {best} at {low.at}{ties}"
    if low.at == claimed and low.certain:
        return Judgement(reading, "holds", f"{text}, as claimed.")
    there = str(summary(curve[claimed]))
    if low.at == claimed:
        return Judgement(reading, "holds in part", f"{text}.")
    if claimed in low.tied:
        return Judgement(reading, "holds in part", f"{text}; {there} at {claimed}.")
    ends = [paired_difference(curve[end], curve[low.at]) for end in (min(curve), max(curve))]  # type: ignore[index]
    inside = low.at not in (min(curve), max(curve)) and all(end.positive for end in ends)
    if inside:
        return Judgement(
            reading,
            "holds in part",
            f"{text}; {there} at {claimed}. Both fewer and more heads are worse, but the best "
            "number is another one.",
        )
    return Judgement(reading, "does not hold", f"{text}; {there} at {claimed}.")


def finding(tasks: Sequence[Sequence[Judgement]], more: Sequence[str], table: Table) -> Finding:
    """The judgement over tasks, each with its readings.

    Of a task's readings the better one counts, because the paper does not say which it means;
    that leans towards the paper and is said. Over tasks that differ it holds in part.
    """
    order: tuple[Verdict, ...] = ("holds", "holds in part", "does not hold")
    best = [min((j.verdict for j in task), key=order.index) for task in tasks]
    verdict = best[0] if len(set(best)) == 1 else "holds in part"
    measured = " ".join(j.sentence for task in tasks for j in task)
    each = "; ".join(f"{j.reading}: {j.verdict}" for task in tasks for j in task)
    readings = (f"By reading of “heads”: {each}. The better reading of a task counts.",)
    return Finding(verdict, measured, (*readings, *more), table)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
