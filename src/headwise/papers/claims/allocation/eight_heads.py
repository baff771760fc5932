"""The claims about "8 heads": a layer of fixed total width, divided into ever more heads.

The paper's word "heads" can be read in two ways when a task has several lags: heads *in total*, or
heads *per group*, one group per lag. Both are points of one curve over the total number:

    total       1    2    4    8   16   32   64   128        D = 256, 4 lags
    width     256  128   64   32   16    8    4    2
    per group                1    2    4    8   16   32

So one sweep answers both, each against its own number.

four-gram    White-noise tokens 8 wide, y_t = Σ ρ_i·x_{t−i} over 4 lags with ρ_i random rotations
             (scalar ρ_i of one sign would need a single head). The network is one attention layer
             without a skip, so the heads alone carry the tokens. The paper's errors have an
             unstated scale of y; ours has variance 1, so curves compare by shape, not by height.
induction    The first step of an induction head: every position learns the token before it. On
             vectors the layer must put the last two tokens side by side (2 lags of tokens 8 wide,
             total width 128: the allocation problem says 8 heads of 8 for each lag). On tokens it
             must name the previous one of 16 (1 lag, tokens 16 wide: 8 heads of 16).
nonlinear    The 4-gram task with relu on every token, y_t = Σ ρ_i·relu(x_{t−i}), and an MLP behind
             the attention. Same widths, same numbers of heads as the linear task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from headwise.papers.harness.charts import Axes, curves, panels, series
from headwise.papers.harness.claim import (
    Claim,
    Finding,
    Results,
    ResultTable,
    Size,
    Trial,
    Values,
    Verdict,
    at_every_seed,
)
from headwise.papers.harness.judging import (
    kindest,
    larger_by_factor,
    listed,
    lowest,
    summary,
)

if TYPE_CHECKING:
    from headwise.papers.tasks.task import SyntheticTask
    from headwise.papers.tasks.training import TaskScore
    from headwise.reporting.charts import Chart

CLAIMED = 8
WIDTH, TOKEN_DIM, LAGS = 256, 8, 4  # of both 4-gram tasks
SOLVED = 1e-3  # of the error of a blind guess: below that a task counts as solved
Curve = Mapping[int, Sequence[float]]  # error at every seed by number of heads


# --- curves over numbers of heads --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Judgement:
    """Where one reading's curve is lowest, against the number that was claimed."""

    reading: str
    verdict: Verdict
    sentence: str


def curve_of(results: Results, groups: int = 1, value: str = "error") -> dict[int, Any]:
    """The measured curve by heads per group (whole numbers only)."""
    found = results.by("heads", value)
    return {heads // groups: v for heads, v in found.items() if heads % groups == 0}


def judge_curve(curve: Curve, claimed: int, reading: str, unit: str = "error") -> Judgement:
    """Holds: lowest at the claimed number by more than the spread.

    In part: a valley elsewhere, or one whose bottom is too flat to tell: both the fewest and the
    most heads are worse than the lowest. Does not hold: there is no valley, and either the claimed
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
        words = f"both {ends[0]} and {ends[1]} are worse"
        return Judgement(reading, "holds in part", f"{text}; {words}.")
    as_good = [e for e in ends if larger_by_factor(curve[e], curve[claimed]) == "no"]
    if as_good:
        words = f"{listed(as_good)} no worse than {claimed}"
        return Judgement(reading, "does not hold", f"{text}; {words}.")
    if claimed not in (place, *low.tied):
        return Judgement(reading, "does not hold", f"{text}, which is worse.")
    hidden = listed([end for end in ends if end in low.tied], " and ")
    words = f"the spread hides whether {hidden} would be worse"
    if place in ends:
        words = "that is an end of the curve, though not by more than the spread"
    return Judgement(reading, "cannot be tested here", f"{text}; {words}.")


def where_solved(curve: Curve, chance: float, where: str = "") -> str:
    """With how many heads (in total) there is nothing left to trade; a sentence."""
    done = [heads for heads, errors in curve.items() if summary(errors).mean < SOLVED * chance]
    if not done:
        return f"No number of heads gets below {SOLVED:g} of a blind guess{where}."
    return (
        f"With {listed(done)} heads in total the error{where} is below {SOLVED:g} of a blind "
        "guess: the task is solved there, and which of them is lowest says little."
    )


def combine(
    tasks: Sequence[Sequence[Judgement]], more: Sequence[str], table: ResultTable
) -> Finding:
    """The finding over tasks, each with its readings.

    Of a task's readings the better one counts, because the paper does not say which it means;
    that favours the paper and is stated. Where tasks differ: in part if some task supports it.
    """
    best = [kindest(j.verdict for j in task) for task in tasks]
    verdict = best[0]
    if len(set(best)) > 1:
        favoured = any(v in ("holds", "holds in part") for v in best)
        verdict = "holds in part" if favoured else "does not hold"
    judgements = [j for task in tasks for j in task]
    each = "; ".join(f"{j.reading}: {j.verdict}" for j in judgements)
    readings = f"By reading of “heads”: {each}. The better reading of a task counts."
    return Finding(verdict, " ".join(j.sentence for j in judgements), (readings, *more), table)


def _both_readings(results: Results) -> tuple[Judgement, Judgement]:
    return (
        judge_curve(curve_of(results), CLAIMED, "in total"),
        judge_curve(curve_of(results, LAGS), CLAIMED, "per group"),
    )


def _trials(
    claim: str, seeds: Sequence[int], networks: Mapping[str, Mapping[str, Any]], seconds: float
) -> list[Trial]:
    """Every network at every seed; 32 heads take twice the time of few."""
    return at_every_seed(claim, seeds, networks, lambda p: seconds * (1 + p["heads"] / 32))


def _train(
    trial: Trial, task: SyntheticTask, width: int, d_model: int, *, mlp: bool = False
) -> TaskScore:
    """A trial's heads of this total width, trained on the task."""
    from headwise.papers.tasks.training import Layout, ShortTraining, equal_heads, train_network

    p = trial.parameters
    layout = Layout(p["heads"], width // p["heads"], d_model)
    model = equal_heads(layout, task, mlp=mlp, seed=trial.seed)
    training = ShortTraining(p["steps"], p["batch"], lr=5e-3 if mlp else 1e-2)
    return train_network(model, task, training, seed=trial.seed)


# --- four-gram ---------------------------------------------------------------------------------

PAPER = {1: 0.3197, 2: 0.3174, 4: 0.1129, 8: 0.0167, 16: 0.0234, 32: 0.0559}
FOUR_GRAM_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
FOUR_GRAM_TRAINING: dict[Size, dict[str, int]] = {
    "quick": {"length": 8, "steps": 100, "batch": 16},
    "full": {"length": 32, "steps": 3000, "batch": 32},
}


def four_gram_trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Every total number of heads; both readings lie on this curve."""
    training = FOUR_GRAM_TRAINING[size]
    networks = {f"{heads} heads": {"heads": heads, **training} for heads in FOUR_GRAM_HEADS}
    return _trials("four-gram", seeds, networks, 2.0 if size == "quick" else 30.0)


def run_four_gram(trial: Trial) -> Values:
    """The error of a trained network on new sequences, beside the exact scores of the task."""
    from headwise.papers.tasks.ngram import NGram

    p = trial.parameters
    task = NGram.random(LAGS, TOKEN_DIM, p["length"], seed=trial.seed)
    score = _train(trial, task, WIDTH, 32)
    return {
        "error": score.metric,
        "chance": task.chance,
        "pattern_floor": task.pattern_error(min(p["heads"], LAGS)),
    }


def judge_four_gram(results: Results) -> Finding:
    """Both readings of "heads", each against 8."""
    total, bound = curve_of(results), _bound()
    floors = results.by("heads", "pattern_floor")
    rows = []
    for heads, errors in total.items():
        per_group = heads // LAGS if heads >= LAGS else None
        rows.append(
            (
                heads,
                WIDTH // heads,
                per_group,
                str(summary(errors)),
                PAPER.get(heads),
                PAPER.get(per_group) if per_group else None,
                bound.get(per_group) if per_group else None,
                str(summary(floors[heads])),
            )
        )
    columns = (
        "heads in total", "width", "heads per group", "measured error", "paper, heads in total",
        "paper, heads per group", "bound ÷ predicting zero", "floor of attention by position",
    )  # fmt: skip
    more = (
        "The bound is lowest at 8 heads per group, where a head is as wide as a token.",
        f"Heads that attend by position alone need one pattern per lag: with fewer than {LAGS} "
        f"heads their error cannot vanish, with {LAGS} or more it can. Trained heads may stay "
        "below that floor, since they can also attend by content.",
        where_solved(total, results.items[0].values["chance"]),
        "The variance of y is 1 here and not stated in the paper: compare shapes, not heights.",
    )
    return combine([_both_readings(results)], more, ResultTable(columns, tuple(rows)))


def draw_four_gram(results: Results) -> Chart:
    """Measured errors, the paper's in both readings, and the bound."""
    bound = {h * LAGS: [b] for h, b in _bound().items()}
    points = [
        *series(curve_of(results), "measured"),
        *series({h: [e] for h, e in PAPER.items()}, "paper, heads in total"),
        *series({h * LAGS: [e] for h, e in PAPER.items()}, "paper, heads per group"),
        *series(bound, "bound ÷ predicting zero, heads per group"),
    ]
    title = f"4-gram task at total width {WIDTH}"
    return curves(points, Axes(title, "heads in total", "error", True, True, FOUR_GRAM_HEADS))


def _bound() -> dict[int, float]:
    from headwise.theory.allocation import bound_curve

    curve = bound_curve(WIDTH, TOKEN_DIM, PAPER, lags=LAGS)
    return {h: b / curve.zero_error for h, b in zip(curve.heads, curve.bound, strict=True)}


FOUR_GRAM = Claim(
    id="four-gram",
    statement="Trained one-layer models of total width 256 have their lowest 4-gram error at 8 "
    "heads.",
    expected="Errors 0.3197, 0.3174, 0.1129, 0.0167, 0.0234, 0.0559 at 1, 2, 4, 8, 16, 32 heads.",
    source="arXiv 2510.03784, 4-gram figure",
    setting="One attention layer without a skip, white-noise tokens; a seed draws the task, the "
    "weights and the batches.",
    version=1,
    trials=four_gram_trials,
    run=run_four_gram,
    judge=judge_four_gram,
    figure=draw_four_gram,
)


# --- induction ---------------------------------------------------------------------------------

INDUCTION_WIDTH = 128
KINDS = {"vectors": "squared error", "tokens": "cross-entropy"}
INDUCTION_HEADS: dict[Size, dict[str, tuple[int, ...]]] = {
    "quick": {"vectors": (1, 2, 8, 16, 64), "tokens": (1, 8, 32)},
    "full": {"vectors": (1, 2, 4, 8, 16, 32, 64), "tokens": (1, 2, 4, 8, 16, 32)},
}
INDUCTION_TRAINING: dict[Size, dict[str, int]] = {
    "quick": {"length": 8, "steps": 80, "batch": 16},
    "full": {"length": 32, "steps": 2000, "batch": 32},
}


def induction_trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Both kinds of tokens at every total number of heads."""
    networks = {
        f"{kind}, {heads} heads": {"kind": kind, "heads": heads, **INDUCTION_TRAINING[size]}
        for kind in KINDS
        for heads in INDUCTION_HEADS[size][kind]
    }
    return _trials("induction", seeds, networks, 1.5 if size == "quick" else 13.0)


def run_induction(trial: Trial) -> Values:
    """The loss of a trained network on new sequences."""
    from headwise.papers.tasks.discrete import PreviousToken
    from headwise.papers.tasks.ngram import NGram

    p = trial.parameters
    task: SyntheticTask = PreviousToken(p["length"], 16)
    if p["kind"] == "vectors":
        task = NGram.copying(2, 8, p["length"])
    score = _train(trial, task, INDUCTION_WIDTH, 32)
    return {"error": score.loss, "metric": score.metric, "chance": task.chance_loss}


def judge_induction(results: Results) -> Finding:
    """Vectors in both readings of "heads", tokens in their only one, each against 8."""
    vectors, tokens = (results.where(kind=kind) for kind in KINDS)
    on_vectors = (
        judge_curve(curve_of(vectors), CLAIMED, "in total, on vectors"),
        judge_curve(curve_of(vectors, 2), CLAIMED, "per group, on vectors"),
    )
    on_tokens = (judge_curve(curve_of(tokens), CLAIMED, "on tokens", "cross-entropy"),)
    rows = tuple(
        (kind, h, INDUCTION_WIDTH // h, str(summary(e)))
        for kind in KINDS
        for h, e in curve_of(results.where(kind=kind)).items()
    )
    more = (
        "On vectors two lags take two attention patterns; a single head cannot tell which of "
        "the two tokens it carries.",
        *(
            where_solved(curve_of(some), some.items[0].values["chance"], f" on {kind}")
            for kind, some in zip(KINDS, (vectors, tokens), strict=True)
        ),
    )
    return combine(
        [on_vectors, on_tokens], more, ResultTable(("kind", "heads", "width", "loss"), rows)
    )


def draw_induction(results: Results) -> Chart:
    """The loss by number of heads, vectors above tokens."""
    drawn = []
    for kind, unit in KINDS.items():
        curve = curve_of(results.where(kind=kind))
        title = f"Copying the previous token, {kind}, total width {INDUCTION_WIDTH}"
        axes = Axes(title, "heads in total", unit, True, True, tuple(curve))
        drawn.append(curves(series(curve, kind), axes))
    return panels(drawn)


INDUCTION = Claim(
    id="induction",
    statement="The trade-off between heads and width, lowest at 8 heads, also holds for the "
    "first step of an induction head.",
    expected="The same allocation works for the first step of an induction head.",
    source="arXiv 2510.03784",
    setting="One attention layer without a skip, random tokens; a seed draws the task, the "
    "weights and the batches.",
    version=1,
    trials=induction_trials,
    run=run_induction,
    judge=judge_induction,
    figure=draw_induction,
)


# --- nonlinear ---------------------------------------------------------------------------------

NONLINEAR_HEADS: dict[Size, tuple[int, ...]] = {
    "quick": (1, 4, 8, 32, 128),
    "full": (1, 2, 4, 8, 16, 32, 64, 128),
}
NONLINEAR_TRAINING: dict[Size, dict[str, int]] = {
    "quick": {"length": 8, "steps": 150, "batch": 16},
    "full": {"length": 32, "steps": 4000, "batch": 32},
}


def nonlinear_trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Every total number of heads."""
    training = NONLINEAR_TRAINING[size]
    networks = {f"{heads} heads": {"heads": heads, **training} for heads in NONLINEAR_HEADS[size]}
    return _trials("nonlinear", seeds, networks, 3.0 if size == "quick" else 45.0)


def run_nonlinear(trial: Trial) -> Values:
    """The error of a trained network on new sequences, beside those of blind predictors."""
    from headwise.papers.tasks.ngram import NGram

    length = trial.parameters["length"]
    task = NGram.random(LAGS, TOKEN_DIM, length, activation="relu", seed=trial.seed)
    score = _train(trial, task, WIDTH, 48, mlp=True)
    return {"error": score.metric, "chance": task.chance, "affine": task.affine_error()}


def judge_nonlinear(results: Results) -> Finding:
    """Both readings of "heads", each against 8."""
    total, first = curve_of(results), results.items[0].values
    rows = tuple(
        (h, WIDTH // h, h // LAGS if h >= LAGS else None, str(summary(e))) for h, e in total.items()
    )
    more = (
        f"A constant has an error of {first['chance']:.3f}, the best affine predictor "
        f"{first['affine']:.3f}: below that the network is nonlinear.",
        where_solved(total, first["chance"]),
    )
    columns = ("heads in total", "width", "heads per group", "measured error")
    return combine([_both_readings(results)], more, ResultTable(columns, rows))


def draw_nonlinear(results: Results) -> Chart:
    """Measured errors by number of heads, beside the best affine predictor's."""
    measured, affine = curve_of(results), curve_of(results, value="affine")
    points = [*series(measured, "measured"), *series(affine, "best affine predictor")]
    title = f"Nonlinear 4-gram task at total width {WIDTH}"
    return curves(points, Axes(title, "heads in total", "error", True, True, tuple(measured)))


NONLINEAR = Claim(
    id="nonlinear",
    statement="The trade-off between heads and width, lowest at 8 heads, also holds for the "
    "nonlinear task.",
    expected="The same allocation works for a nonlinear extension of the task.",
    source="arXiv 2510.03784",
    setting="One attention layer with an MLP behind it, white-noise tokens; a seed draws the "
    "task, the weights and the batches.",
    version=1,
    trials=nonlinear_trials,
    run=run_nonlinear,
    judge=judge_nonlinear,
    figure=draw_nonlinear,
)
