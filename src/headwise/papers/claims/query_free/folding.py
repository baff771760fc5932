"""Two exact claims: when W_Q can be folded away, and when a skip around an MLP can be absorbed.

fold-exact: W_Q can be folded away exactly in three cases, and not in the fourth. Random stacks are
folded and both versions run in float64. Where folding is not allowed it is forced, to see how wrong
it would be; a norm is the same kind of obstacle.

relu-skip: a skip around a ReLU MLP can be absorbed at equal width iff some neurons sum to −I. Three
kinds of MLP: random ones (no set S exists), ones constructed so that S exists, and mirrored ones,
whose neurons come in pairs relu(u), relu(−u). The mirrored ones decide the "only if": a pair
spans any linear function of u, so their skip can be absorbed although no S exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from headwise.papers.harness.charts import Axes, Point, curves, series
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
from headwise.papers.harness.judging import summary

if TYPE_CHECKING:
    from headwise.reporting.charts import Chart
    from headwise.theory.reparametrization import AttentionStack


EXACT = 1e-9  # relative; rounding times the condition number of the folded weight

# --- fold-exact --------------------------------------------------------------------------------

# name: arguments of the stack, and whether the paper says that folding is exact
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "one layer": ({"n_layers": 1}, True),
    "skip around attention only": ({"skip": "attention"}, True),
    "shared weights": ({"shared": True}, True),
    "both skips, own weights": ({}, False),
    "norm, one layer": ({"n_layers": 1, "norm": "rms"}, False),
}
WHICH = ("query", "key", "value")
DEPTHS: dict[Size, tuple[int, ...]] = {"quick": (2, 3), "full": (2, 3, 6, 12)}
NEXT_DRAW = 1 << 20  # between the seeds of a trial's draws; the trials' own seeds are small
FAR = 1e-3  # relative; more than any rounding


def fold_trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """A random stack for every case and depth."""
    experiments = {
        f"{name}, depth {depth}": {"case": name, **arguments, "n_layers": depth}
        for name, (arguments, _) in CASES.items()
        for depth in ((1,) if arguments.get("n_layers") == 1 else DEPTHS[size])
    }
    return at_every_seed("fold-exact", seeds, experiments)


def run_fold(trial: Trial) -> Values:
    """The largest relative change of the logits when query, key or value is folded."""
    import numpy as np

    from headwise.errors import TheoryError
    from headwise.theory.reparametrization import fold, forced_fold, logits, saved_share

    stack, redrawn = _invertible_stack(trial)
    tokens = np.random.default_rng(trial.seed).integers(13, size=(7, 11))
    wanted = logits(stack, tokens)
    values: Values = {"refused": 0, "redrawn": redrawn}
    for which in WHICH:
        try:
            folded = fold(stack, which)  # type: ignore[arg-type]
        except TheoryError:
            values["refused"] += 1
            folded = forced_fold(stack, which)  # type: ignore[arg-type]
        change = np.abs(logits(folded, tokens) - wanted).max() / np.abs(wanted).max()
        values[which] = float(change)
    share = saved_share(stack)
    return {**values, "saved_attention": share.attention, "saved_block": share.block}


def _invertible_stack(trial: Trial) -> tuple[AttentionStack, int]:
    """The seed's first random stack whose weights can be inverted, and how many came before it.

    The theorem is about invertible weights; a few random square matrices are nearly singular.
    """
    import numpy as np

    from headwise.theory.reparametrization import CONDITION_LIMIT, random_stack

    arguments = {k: v for k, v in trial.parameters.items() if k != "case"}
    for draw in count():
        stack = random_stack(trial.seed + draw * NEXT_DRAW, **arguments)
        weights = [w for layer in stack.layers for w in (layer.W_Q, layer.W_K, layer.W_V)]
        if np.linalg.cond(np.stack(weights)).max() <= CONDITION_LIMIT:
            return stack, draw
    raise AssertionError  # the count has no end


def judge_fold(results: Results) -> Finding:
    """It holds if folding W_Q is exact to rounding in the three cases and far off in the others.

    In part: exact in the three, but not far off in each of the others. Keys and values are
    reported.
    """
    worst, least = _changes(results, ("query",))
    others, _ = _changes(results, ("key", "value"))
    three = [case for case, (_, says) in CASES.items() if says]
    near = [case for case in CASES if case not in three and least[case] <= FAR]
    exact = all(worst[case] < EXACT for case in three)
    verdict: Verdict = "does not hold" if not exact else "holds in part" if near else "holds"
    too = max(others[case] for case in three)
    share = results.items[0].values
    redrawn = sum(result.values["redrawn"] for result in results)
    return Finding(
        verdict,
        f"Largest relative change {max(worst[case] for case in three):.1e} in the three cases; at "
        f"least {least['both skips, own weights']:.2g} in the fourth.",
        (
            *(
                [f"Changed by no more than {FAR:g} in some stack: {'; '.join(near)}."]
                if near
                else []
            ),
            f"Keys and values {'fold as well' if too < EXACT else 'do not fold exactly'} in the "
            f"three cases: largest change {too:.1e}.",
            f"Stacks drawn again because a weight was nearly singular: {redrawn}.",
            f"One projection is {share['saved_attention']:.1%} of the attention's and "
            f"{share['saved_block']:.1%} of a block's parameters (MLP of four times the width).",
        ),
        ResultTable(
            ("case", "the paper says", "least change", "largest change"),
            tuple(
                (case, "exact" if says else "not exact", least[case], worst[case])
                for case, (_, says) in CASES.items()
            ),
        ),
    )


def _changes(results: Results, folded: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """The largest and the least change in every case, over the projections in `folded`."""
    found: dict[str, list[float]] = {case: [] for case in CASES}
    for result in results:
        found[result.trial.parameters["case"]] += [result.values[which] for which in folded]
    return {c: max(v) for c, v in found.items()}, {c: min(v) for c, v in found.items()}


def draw_fold(results: Results) -> Chart:
    """The change of the logits when W_Q is folded, by depth."""
    points = [
        point
        for case in CASES
        for point in series(results.where(case=case).by("n_layers", "query"), case)
    ]
    axes = Axes("What folding W_Q changes", "layers", "relative change of the logits", log_y=True)
    return curves(points, axes)


FOLD_EXACT = Claim(
    id="fold-exact",
    statement="Folding W_Q into what precedes it is exact in three cases and not in the fourth.",
    expected="Exact for a single layer, for skips around the attention only and for shared "
    "weights, all without norms; −25% of attention, −8.3% of block parameters.",
    source="arXiv 2510.23912",
    setting="Random attention stacks in float64; a seed draws the weights.",
    version=2,
    trials=fold_trials,
    run=run_fold,
    judge=judge_fold,
    figure=draw_fold,
    quick_verdicts=("holds",),
)


# --- relu-skip ---------------------------------------------------------------------------------

SIZES: dict[Size, tuple[int, ...]] = {"quick": (3, 5), "full": (3, 5, 8, 13)}
KINDS = ("random", "constructed", "mirrored")
DRAWS = 20


def skip_trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Some MLPs of each kind and width; four neurons per dimension."""
    experiments = {
        f"{kind}, d = {d}": {"kind": kind, "d": d, "draws": DRAWS}
        for d in SIZES[size]
        for kind in KINDS
    }
    return at_every_seed("relu-skip", seeds, experiments)


def run_skip(trial: Trial) -> Values:
    """How many of the MLPs have a set S, how many are absorbed, and how exactly."""
    import numpy as np

    from headwise.theory import relu_skip

    kind, d = trial.parameters["kind"], trial.parameters["d"]
    rng = np.random.default_rng([trial.seed, d, KINDS.index(kind)])
    sets = absorbed = redundant = 0
    worst = 0.0
    for draw in range(trial.parameters["draws"]):
        if kind == "constructed":
            made = relu_skip.absorbable_example(d, 4 * d, 1000 * trial.seed + draw)
            up, down = made.W_up, made.W_down
        else:
            up = rng.standard_normal((4 * d if kind == "random" else d, d))
            up = up if kind == "random" else np.vstack([up, -up])
            down = rng.standard_normal((d, len(up)))
        flipped = relu_skip.absorbable_set(up, down)
        redundant += bool(relu_skip.redundant_neurons(up, down))
        sets += flipped is not None
        if flipped is not None:
            new_up, new_down = relu_skip.absorb(up, down, flipped)
        elif kind == "mirrored":
            # x = A⁻¹·(relu(Ax) − relu(−Ax)): each half takes its share of the skip.
            inverse = np.linalg.inv(up[:d])
            new_up, new_down = up, down + np.hstack([inverse, -inverse])
        else:
            continue
        x = rng.standard_normal((101, d))
        wanted = relu_skip.relu_mlp(up, down, x) + x
        error = np.abs(relu_skip.relu_mlp(new_up, new_down, x) - wanted).max()
        worst = max(worst, float(error / np.abs(wanted).max()))
        absorbed += 1
    return {"sets": sets, "absorbed": absorbed, "redundant": redundant, "worst": worst}


def judge_skip(results: Results) -> Finding:
    """In part: never for generic weights and always with S, but not *only* with S."""
    total = {kind: {"mlps": 0, "sets": 0, "absorbed": 0, "redundant": 0} for kind in KINDS}
    worst = 0.0
    for result in results:
        sums = total[result.trial.parameters["kind"]]
        sums["mlps"] += result.trial.parameters["draws"]
        for name in ("sets", "absorbed", "redundant"):
            sums[name] += result.values[name]
        worst = max(worst, result.values["worst"])
    random, made, mirrored = (total[kind] for kind in KINDS)
    never = random["absorbed"] == 0 and random["redundant"] == 0
    always = made["sets"] == made["mlps"] and worst < EXACT
    without = mirrored["absorbed"] - mirrored["sets"]
    verdict: Verdict = "holds in part" if without else "holds"
    if not (never and always):
        verdict = "does not hold"
    return Finding(
        verdict,
        f"{random['sets']} of {random['mlps']} random MLPs absorb their skip, "
        f"{made['absorbed']} of {made['mlps']} constructed ones do (error at most {worst:.0e}); "
        f"{without} of {mirrored['mlps']} mirrored ones do without any set S.",
        (
            "For random weights no two neurons share a hyperplane, and then the missing set is a "
            "proof that no MLP of equal width will do.",
            "The condition is sufficient, but not necessary when two neurons lie on one line: "
            "relu(u) and relu(−u) span any linear function of u.",
        ),
        ResultTable(
            ("kind", "MLPs", "with a set S", "absorbed", "with neurons on one line"),
            tuple(
                (kind, s["mlps"], s["sets"], s["absorbed"], s["redundant"])
                for kind, s in total.items()
            ),
        ),
    )


def draw_skip(results: Results) -> Chart:
    """The share of MLPs whose skip is absorbed, by width."""
    points = [
        Point(
            results.named(name)[0].trial.parameters["d"],
            summary(
                [r.values["absorbed"] / r.trial.parameters["draws"] for r in results.named(name)]
            ),
            results.named(name)[0].trial.parameters["kind"],
        )
        for name in results.names
    ]
    return curves(points, Axes("ReLU MLPs whose skip can be absorbed", "width d", "share"))


RELU_SKIP = Claim(
    id="relu-skip",
    statement="A skip around a ReLU MLP can be absorbed at equal width iff W_down[:,S]·W_up[S,:] "
    "= −I for some set S of neurons; with generic weights, never.",
    expected="Random MLPs cannot absorb a skip; one with such a set can.",
    source="arXiv 2510.23912, ReLU boundary",
    setting="Random and constructed MLPs in float64; a seed draws the weights.",
    version=1,
    trials=skip_trials,
    run=run_skip,
    judge=judge_skip,
    figure=draw_skip,
    quick_verdicts=("holds in part",),
)
