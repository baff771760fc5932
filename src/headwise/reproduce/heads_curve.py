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
from typing import Any, Literal, cast

from headwise.reproduce.answers import kindest, larger_by_factor
from headwise.reproduce.claim import Finding, Results, Table, Trial, Verdict
from headwise.reproduce.statistics import lowest, summary

SOLVED = 1e-3  # of what a blind guess scores: from there on a task counts as solved
SLOWER = 32  # so many heads take twice the time of few
Reading = Literal["in total", "per group"]
Curve = Mapping[int, Sequence[float]]  # error at every seed by number of heads


@dataclass(frozen=True, slots=True)
class Judgement:
    """Where one reading's curve is lowest, against the number that was claimed."""

    reading: str
    verdict: Verdict
    sentence: str


def head_trials(
    claim: str, seeds: Sequence[int], networks: Mapping[str, Mapping[str, Any]], seconds: float
) -> list[Trial]:
    """Every network (name: parameters, ``heads`` among them) at every seed; more heads are slower.

    ``seconds`` is the time of few heads.
    """
    return [
        Trial(claim, name, seed, parameters, seconds * (1 + parameters["heads"] / SLOWER))
        for seed in seeds
        for name, parameters in networks.items()
    ]


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

    In part: a valley elsewhere, or one whose floor is too flat to tell: both the fewest and the
    most heads are worse than the lowest. Does not hold: no valley is seen, and either the claimed
    number is worse than the lowest or an end of the curve is no worse than it. Otherwise the spread
    hides the answer.
    """
    low = lowest(curve)
    place = cast("int", low.at)
    text = f"Heads {reading}: lowest {unit} {summary(curve[place])} at {place} ({low})"
    if place == claimed and low.certain:
        return Judgement(reading, "holds", f"{text}, as claimed.")
    text += "" if place == claimed else f"; {summary(curve[claimed])} at {claimed}"
    ends = min(curve), max(curve)
    worse = [end for end in ends if end not in (place, *low.tied)]
    if len(worse) == len(ends):
        return Judgement(reading, "holds in part", f"{text}; both {ends[0]} and {ends[1]} worse.")
    as_good = [e for e in ends if larger_by_factor(curve[e], curve[claimed]) == "no"]
    if as_good:
        return Judgement(
            reading, "does not hold", f"{text}; {_listed(as_good)} no worse than {claimed}."
        )
    if claimed not in (place, *low.tied):
        return Judgement(reading, "does not hold", f"{text}, which is worse.")
    hidden = [str(end) for end in ends if end in low.tied]
    words = f"the spread hides whether {' and '.join(hidden)} would be worse"
    if place in ends:
        words = "that is an end of the curve, though not by more than the spread"
    return Judgement(reading, "cannot be tested here", f"{text}; {words}.")


def solved(curve: Curve, chance: float, where: str = "") -> str:
    """With how many heads (in total) there is nothing left to trade; a sentence."""
    done = [heads for heads, errors in curve.items() if summary(errors).mean < SOLVED * chance]
    if not done:
        return f"No number of heads gets below {SOLVED:g} of a blind guess{where}."
    return (
        f"With {_listed(done)} heads in total the error{where} is below {SOLVED:g} of a blind "
        "guess: the task is solved there, and which of them is lowest says little."
    )


def finding(tasks: Sequence[Sequence[Judgement]], more: Sequence[str], table: Table) -> Finding:
    """The judgement over tasks, each with its readings.

    Of a task's readings the better one counts, because the paper does not say which it means;
    that leans towards the paper and is said. Tasks that differ: in part if some task is for it.
    """
    best = [kindest(j.verdict for j in task) for task in tasks]
    verdict = best[0]
    if len(set(best)) > 1:
        favoured = any(v in ("holds", "holds in part") for v in best)
        verdict = "holds in part" if favoured else "does not hold"
    measured = " ".join(j.sentence for task in tasks for j in task)
    each = "; ".join(f"{j.reading}: {j.verdict}" for task in tasks for j in task)
    readings = (f"By reading of “heads”: {each}. The better reading of a task counts.",)
    return Finding(verdict, measured, (*readings, *more), table)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
