"""Claim: an attention layer memorizes of the order of H·min(n, d_h) examples.

Examples are a query and a context of n white-noise tokens, with a random label; the number
memorized is what is right beyond guessing (`memorizing_layer`). There are more examples than any
of the layers can hold, or the curve would bend by running out of examples.

Two kinds: every example with a context of its own, or one context for all and only the query
different. In the second a head's output is a mixture of n fixed tokens, so a head wider than n
*cannot* say more, and if it holds more, it was only easier to train; in the first it can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headwise.reproduce.answers import Answer, larger, verdict
from headwise.reproduce.charting import Axes, Point, curves, panels
from headwise.reproduce.claim import Claim, Finding, Results, Size, Table, Trial, Values
from headwise.reproduce.statistics import line, summary

if TYPE_CHECKING:
    from headwise.report.charts import Chart

LINEAR = 0.98  # R² from which numbers lie on a line
FULL = 0.6  # of all examples: who holds so many begins to run out of them
SETTLED = 0.1  # of the final number: what the second half of a training may add
Curve = Mapping[int, Sequence[float]]  # memorized examples at every seed, by heads or by width
KINDS = {"own": "own contexts", "shared": "one shared context"}
# tokens n, their width d, head counts at d_h = n, head widths at a fixed number of heads
SIZES: dict[Size, dict[str, int | tuple[int, ...]]] = {
    "quick": {
        "n": 6, "d": 12, "labels": 8, "examples": 480, "batch": 240, "steps": 150,
        "heads": (1, 2, 3), "widths": (2, 6, 12), "at": 1,
    },
    "full": {
        "n": 32, "d": 64, "labels": 32, "examples": 24_000, "batch": 2000, "steps": 3000,
        "heads": (1, 2, 3, 4), "widths": (8, 16, 32, 48, 64), "at": 2,
    },
}  # fmt: skip

COST: dict[Size, dict[str, float]] = {
    "quick": {"own": 0.3, "shared": 0.2},
    "full": {"own": 16.0, "shared": 5.0},
}


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Heads up at d_h = n, and widths up at a fixed number of heads."""
    s = SIZES[size]
    heads, widths = s["heads"], s["widths"]
    assert isinstance(heads, tuple)
    assert isinstance(widths, tuple)
    pairs = dict.fromkeys([(h, s["n"]) for h in heads] + [(s["at"], w) for w in widths])
    shared = {name: s[name] for name in ("n", "d", "labels", "examples", "batch", "steps")}
    return [
        Trial(
            "memorization", f"{kind}, {h} heads of {w}", seed,
            {"kind": kind, "heads": h, "width": w, **shared},
            COST[size][kind] * (1 + h),  # type: ignore[operator]
        )
        for seed in seeds
        for kind in KINDS
        for h, w in pairs
    ]  # fmt: skip


def run(trial: Trial) -> Values:
    """How many examples one layer holds."""
    from headwise.reproduce.memorizing_layer import memorized

    return memorized(trial)


def judge(results: Results) -> Finding:
    """Two questions of both kinds, of whose answers `answers.verdict` makes the verdict.

    Linear: the most heads memorize more than the fewest, and the means lie on a line. No gain: the
    widest heads do not memorize more than heads of d_h = n. Layers that hold nothing, or all there
    is, leave open why they do not hold more.
    """
    n, examples = results.items[0].trial.parameters["n"], results.items[0].values["examples"]
    sentences: list[str] = []
    asked: list[Answer] = []
    reasons: list[str] = []
    for kind, words in KINDS.items():
        heads, widths = _curves(results, kind)
        fit = line(list(heads), [summary(v).mean for v in heads.values()])
        sentences.append(
            f"{words.capitalize()}: R² = {fit.r_squared:.3f} in H ({fit.slope:+.0f} per head); "
            f"from d_h = n = {n} to {max(widths)} the number goes from {summary(widths[n])} to "
            f"{summary(widths[max(widths)])}."
        )
        for name, (answer, why) in {
            "linear in the number of heads": _linear(heads, fit.r_squared, examples),
            "no gain beyond d_h = n": _flat(widths, n, examples, capped=kind == "shared"),
        }.items():
            asked.append(answer)
            reasons.append(f"{words.capitalize()}, {name}: {answer}; {why}.")
    reasons.append(_settled(results))
    rows = tuple(
        (KINDS[r.trial.parameters["kind"]], r.trial.parameters["heads"],
         r.trial.parameters["width"], str(summary(results.numbers(name, "memorized"))))
        for name in results.names
        for r in results.named(name)[:1]
    )  # fmt: skip
    columns = ("kind", "heads", "head width", "memorized")
    return Finding(verdict(asked), " ".join(sentences), tuple(reasons), Table(columns, rows))


def _settled(results: Results) -> str:
    """What the second half of the trainings still added."""
    added = []
    for name in results.names:
        total, half = (summary(results.numbers(name, x)).mean for x in ("memorized", "halfway"))
        added.append(1 - half / total if total > 0 else 0.0)
    word = "at most" if max(added) <= SETTLED else "up to"
    more = "" if max(added) <= SETTLED else ": longer training could find more"
    return f"The second half of a training added {word} {max(added):.0%} of its number{more}."


def _linear(heads: Curve, r_squared: float, examples: int) -> tuple[Answer, str]:
    """Whether the numbers grow, and on a line; with the reason."""
    few, most = min(heads), max(heads)
    grows = larger(heads[most], heads[few])
    if grows == "open":
        return "open", f"whether {most} heads hold more than {few} is {_hidden(heads[most])}"
    if grows == "yes" and r_squared >= LINEAR:
        return "yes", f"{most} heads hold more than {few}, and R² is at least {LINEAR:g}"
    if (why := _nothing_to_see(heads, heads[most], examples)) is not None:
        return "open", why
    if grows == "no":
        return "no", f"{most} heads do not hold more than {few} by a tenth"
    return "no", f"{most} heads hold more than {few}, but R² is below {LINEAR:g}"


def _flat(widths: Curve, n: int, examples: int, *, capped: bool) -> tuple[Answer, str]:
    """Whether heads wider than n gain nothing; with the reason. Capped: they cannot."""
    widest = widths[max(widths)]
    gains = larger(widest, widths[n])
    if gains == "yes" and capped:
        return (
            "open",
            f"heads of {max(widths)} hold more, which mixtures of {n} fixed tokens cannot: they "
            "are only easier to train",
        )
    if gains == "yes":
        return (
            "no",
            f"heads of {max(widths)} hold more, which a lower bound like H·min(n, d_h) allows",
        )
    if gains == "open":
        return "open", f"whether heads of {max(widths)} hold more is {_hidden(widest)}"
    if (why := _nothing_to_see(widths, widest, examples)) is not None:
        return "open", why
    return "yes", f"heads of {max(widths)} do not hold more by a tenth"


def _nothing_to_see(curve: Curve, largest: Sequence[float], examples: int) -> str | None:
    """Why a curve that does not grow says nothing: all examples are held, or none."""
    if max(map(max, curve.values())) > FULL * examples:
        return "the layers run out of examples"
    if larger(largest, [0.0] * len(largest)) != "yes":
        return "the layers were not seen to hold anything"
    return None


def _hidden(values: Sequence[float]) -> str:
    return "within the spread" if len(values) > 1 else "not for a single seed to tell"


def figure(results: Results) -> Chart:
    """Memorized examples by heads, and by head width."""
    n = results.items[0].trial.parameters["n"]
    by_heads, by_width = [], []
    for kind, words in KINDS.items():
        heads, widths = _curves(results, kind)
        by_heads += [Point(h, summary(v), words) for h, v in heads.items()]
        by_width += [Point(w, summary(v), words) for w, v in widths.items()]
    return panels(
        [
            curves(by_heads, Axes(f"Memorized examples, heads {n} wide", "heads", "memorized")),
            curves(by_width, Axes(f"The same by width, {n} tokens", "head width", "memorized")),
        ]
    )


def _curves(
    results: Results, kind: str
) -> tuple[dict[int, tuple[float, ...]], dict[int, tuple[float, ...]]]:
    """Memorized numbers by heads at d_h = n, and by width at the fixed number of heads."""
    s = SIZES[results.size]
    heads: dict[int, tuple[float, ...]] = {}
    widths: dict[int, tuple[float, ...]] = {}
    for name in results.where(kind=kind).names:
        p = results.named(name)[0].trial.parameters
        values = results.numbers(name, "memorized")
        if p["width"] == p["n"]:
            heads[p["heads"]] = values
        if p["heads"] == s["at"]:
            widths[p["width"]] = values
    return dict(sorted(heads.items())), dict(sorted(widths.items()))


CLAIM = Claim(
    id="memorization",
    statement="The number of memorized examples is linear in the number of heads, and head widths "
    "above the number of tokens bring nothing.",
    expected="Order H·min(n, d_h); R² ≥ 0.98 in H at d = 64, n = 32; no gain once d_h > n.",
    source="Mahdavi et al. 2024",
    setting="One attention layer on random sequences with random labels; a seed draws sequences, "
    "labels and weights.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
