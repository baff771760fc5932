"""Claim: a head reaches every attention pattern over n tokens iff its width is at least n.

Reach: random positive patterns over n independent tokens are approached at widths around n
(`pattern_reach`). The exact threshold is n − 1: softmax forgets a constant per row.

Training: if narrow heads are the trouble, then more heads of a *fixed* width should not hurt where
more heads of width d_model/heads do. Two layers on the induction task, whose second layer must
match each token with an equal one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.reproduce.answers import NOT, Answer, counted, larger, verdict
from headwise.reproduce.charting import Axes, Point, curves, panels
from headwise.reproduce.claim import Claim, Finding, Results, Size, Table, Trial, Values
from headwise.reproduce.pattern_reach import approach, at, errors, misses, reaches
from headwise.reproduce.statistics import summary

if TYPE_CHECKING:
    from headwise.report.charts import Chart

TOKENS: dict[Size, tuple[int, ...]] = {"quick": (6,), "full": (8, 16, 32)}
HEADS: dict[Size, tuple[int, ...]] = {"quick": (2, 8), "full": (1, 2, 4, 8, 16)}
RULES = {"fixed": "fixed width", "standard": "width d_model/heads"}
TRAINING: dict[Size, dict[str, int]] = {
    "quick": {
        "d_model": 16, "fixed": 8, "prefix": 7, "length": 11, "vocab": 11,
        "steps": 250, "batch": 32,
    },
    "full": {
        "d_model": 32, "fixed": 16, "prefix": 32, "length": 48, "vocab": 128,
        "steps": 3000, "batch": 32,
    },
}  # fmt: skip
SOLVED = 0.01  # share of wrong answers; networks below it count as equally good


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Widths n − 3 … n + 1 by optimisation, and both rules by training."""
    made = []
    for seed in seeds:
        for n in TOKENS[size]:
            for width in range(n - 3, n + 2):
                parameters = {"part": "reach", "n": n, "width": width, "starts": 3}
                name = f"reach, {n} tokens, width {width}"
                made.append(Trial("low-rank-bottleneck", name, seed, parameters, cost=n / 20))
        for rule in RULES:
            for heads in HEADS[size]:
                parameters = {"part": "train", "rule": rule, "heads": heads, **TRAINING[size]}
                cost = 8.0 if size == "quick" else 15 + 5.5 * heads
                name = f"train, {rule}, {heads} heads"
                made.append(Trial("low-rank-bottleneck", name, seed, parameters, cost))
    return made


def run(trial: Trial) -> Values:
    """One pattern approached, or one network trained."""
    return approach(trial) if trial.parameters["part"] == "reach" else _trained(trial)


def _trained(trial: Trial) -> Values:
    from headwise.data.tasks import InductionHead
    from headwise.reproduce.task_training import Layout, Training, network, train

    p = trial.parameters
    width = p["fixed"] if p["rule"] == "fixed" else p["d_model"] // p["heads"]
    task = InductionHead(p["length"], p["vocab"], p["prefix"])
    layout = Layout(p["heads"], width, p["d_model"], n_layers=2)
    model = network(layout, task, seed=trial.seed, skip=True)
    score = train(model, task, Training(p["steps"], p["batch"], lr=5e-3), seed=trial.seed)
    return {"accuracy": score.metric, "loss": score.loss, "order_blind": task.order_blind}


def judge(results: Results) -> Finding:
    """Five questions, of whose answers `answers.verdict` makes the verdict.

    The paper's "if": widths from n on reach every pattern. Its "only if": widths up to n − 2 miss
    every one; width n − 1 too. Training: at fixed width the most heads are not wrong more often
    than the fewest; with the most heads, width d_model/heads is wrong more often than fixed width.
    """
    reach, train = results.where(part="reach"), _accuracies(results)
    wide, narrow, between = (at(reach, beyond) for beyond in ((0, 1), (-3, -2), (-1,)))
    few, most = min(train["fixed"]), max(train["fixed"])
    blind = results.numbers(f"train, fixed, {most} heads", "order_blind")
    (suffers, suffer_words), (narrower, narrower_words) = _lost(train, blind)
    asked = (reaches(wide), misses(narrow, wide), misses(between, wide), NOT[suffers], narrower)
    rank = " Softmax forgets a constant per row, which gives one rank away, so n − 1 is enough."
    rows = [
        (name, *(str(summary(reach.numbers(name, value))) for value in ("error", "proven")))
        for name in reach.names
    ]
    rows += [
        (f"train, {RULES[rule]}, {heads} heads", str(summary(values)), "")
        for rule, curve in train.items()
        for heads, values in curve.items()
    ]
    columns = ("experiment", "error (reach) or accuracy (train)", "proven least error")
    return Finding(
        verdict(asked),
        f"Errors up to {max(errors(wide)):.0e} at widths from n on (every pattern tried reached: "
        f"{asked[0]}), {min(errors(narrow)):.1g} and more up to n − 2 (every one missed: "
        f"{asked[1]}). Trained with {most} heads: accuracy {summary(train['fixed'][most])} at "
        f"fixed width, {summary(train['standard'][most])} at d_model/heads (wrong more often: "
        f"{narrower_words}).",
        (
            f"Errors up to {max(errors(between)):.0e} at width n − 1, where the paper expects "
            f"misses (every one missed: {asked[2]}).{rank if asked[2] == 'no' else ''}",
            "A pattern counts as reached or missed where its singular values and the optimiser "
            "both say so.",
            f"From {few} to {most} heads the accuracy goes from {summary(train['fixed'][few])} to "
            f"{summary(train['fixed'][most])} at fixed width (wrong more often: {suffer_words}), "
            f"from {summary(train['standard'][few])} to {summary(train['standard'][most])} at "
            "d_model/heads. Less than a tenth of the wrong answers is no difference, and networks "
            f"wrong less often than {SOLVED:.0%} are equal.",
            f"Are the five parts of the claim shown: {counted(asked)}.",
            "At fixed width more heads also mean more parameters, as in the paper's comparison.",
        ),
        Table(columns, tuple(rows)),
    )


def _lost(
    train: dict[str, dict[int, tuple[float, ...]]], blind: Sequence[float]
) -> tuple[tuple[Answer, str], tuple[Answer, str]]:
    """Are many heads of fixed width wrong more often than few; and d_model/heads wide ones, more?

    No answer where there is nothing to lose or to win: who has learned no more than a network that
    is blind to order, or a task that all of them solve.
    """
    few, most = min(train["fixed"]), max(train["fixed"])

    def wrong(rule: str, heads: int) -> list[float]:
        return [max(1 - accuracy, SOLVED) for accuracy in train[rule][heads]]

    suffers = larger(wrong("fixed", most), wrong("fixed", few))
    narrower = larger(wrong("standard", most), wrong("fixed", most))
    hidden = "within the spread" if len(blind) > 1 else "a single seed separates nothing"
    told: dict[Answer, str] = {"yes": "yes", "no": "no", "open": f"open, {hidden}"}
    fixed, standard = (larger(train[rule][most], blind) == "yes" for rule in RULES)
    unlearned: tuple[Answer, str] = ("open", "open, as they were not seen to learn")
    solved: tuple[Answer, str] = ("open", "open, as all solve the task")
    asked = (("fixed", few), ("fixed", most), ("standard", most))
    if all(x <= SOLVED for rule, heads in asked for x in wrong(rule, heads)):
        return solved, solved
    return (
        unlearned if suffers == "no" and not fixed else (suffers, told[suffers]),
        unlearned if narrower == "no" and not (fixed or standard) else (narrower, told[narrower]),
    )


def figure(results: Results) -> Chart:
    """The error of the best approach by width − n, and the trained accuracies by heads."""
    reach = results.where(part="reach")
    points = []
    for name in reach.names:
        p = reach.named(name)[0].trial.parameters
        place, words = p["width"] - p["n"], f"{p['n']} tokens"
        points.append(Point(place, summary(reach.numbers(name, "error")), words))
    above = curves(
        points, Axes("Best approach to a random pattern", "width − n", "error", log_y=True)
    )
    train = _accuracies(results)
    points = [Point(h, summary(v), RULES[r]) for r, c in train.items() for h, v in c.items()]
    heads = tuple(train["fixed"])
    title = "Induction task, two layers"
    below = curves(points, Axes(title, "heads", "accuracy", log_x=True, x_values=heads))
    return panels([above, below])


def _accuracies(results: Results) -> dict[str, dict[int, tuple[float, ...]]]:
    found: dict[str, dict[int, Any]] = {}
    for rule in RULES:
        part = results.where(part="train", rule=rule)
        found[rule] = {
            part.named(name)[0].trial.parameters["heads"]: part.numbers(name, "accuracy")
            for name in part.names
        }
    return found


CLAIM = Claim(
    id="low-rank-bottleneck",
    statement="Every positive attention pattern over n independent tokens is reachable iff the "
    "head is at least n wide; heads of a fixed width do not suffer from being many.",
    expected="Reachable iff d_h ≥ n; 128-wide heads 8 → 32: F1 89.6 → 90.95, standard heads "
    "90.89 → 90.45 (BERT, SQuAD).",
    source="Bhojanapalli et al. 2020",
    setting="Random patterns approached by optimisation, and two-layer networks on the induction "
    "task; a seed draws patterns, weights and batches.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
    quick_verdicts=("holds in part",),
)
