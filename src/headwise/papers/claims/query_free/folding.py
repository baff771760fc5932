"""Exact claims: when W_Q can be folded away, and when a skip around an MLP can be absorbed.

fold-exact: W_Q can be folded away exactly in three cases, and not in the fourth. Random stacks are
folded and both versions run in float64. Where folding is not allowed it is forced, to see how wrong
it would be; a norm is the same kind of obstacle.

relu-skip: MLPs with a skip and without one are generically different functions: a random ReLU MLP
cannot absorb its skip at equal width. Beside the random ones stand MLPs that were made to absorb
it, which a search that finds nothing anywhere would miss.

relu-skip-iff: exactly those can whose neurons hold a set S with W_down[:,S]·W_up[S,:] = −I. Besides
random and constructed MLPs this takes mirrored ones, whose neurons come in pairs relu(u), relu(−u).
They decide the "only if": a pair spans any linear function of u, so their skip can be absorbed
although no S exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


def _skip_trials(claim: str, kinds: Sequence[str]) -> Callable[[Size, Sequence[int]], list[Trial]]:
    """Some MLPs of each kind and width; four neurons per dimension."""

    def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
        experiments = {
            f"{kind}, d = {d}": {"kind": kind, "d": d, "draws": DRAWS}
            for d in SIZES[size]
            for kind in kinds
        }
        return at_every_seed(claim, seeds, experiments)

    return trials


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


@dataclass(slots=True)
class SkipCount:
    """What was found among the MLPs of one kind."""

    mlps: int = 0
    sets: int = 0
    absorbed: int = 0
    redundant: int = 0
    worst: float = 0.0

    @property
    def shown(self) -> bool:
        """Whether every one has a set S and absorbs its skip by it, to rounding."""
        return self.sets == self.absorbed == self.mlps and self.worst < EXACT

    @property
    def never(self) -> bool:
        """Whether none can absorb its skip: no set S, and no two neurons on one line."""
        return self.absorbed == self.sets == self.redundant == 0


def _counts(results: Results) -> dict[str, SkipCount]:
    found: dict[str, SkipCount] = {}
    for result in results:
        count = found.setdefault(result.trial.parameters["kind"], SkipCount())
        count.mlps += result.trial.parameters["draws"]
        for name in ("sets", "absorbed", "redundant"):
            setattr(count, name, getattr(count, name) + result.values[name])
        count.worst = max(count.worst, result.values["worst"])
    return found


def judge_skip(results: Results) -> Finding:
    """Holds: no random MLP can absorb its skip, and every one that was made to is found to."""
    found = _counts(results)
    random, made = found["random"], found["constructed"]
    return Finding(
        "holds" if random.never and made.shown else "does not hold",
        f"{random.absorbed} of {random.mlps} random MLPs absorb their skip; {made.absorbed} of "
        f"{made.mlps} that were made to do (error at most {made.worst:.0e}).",
        (
            "For random weights no two neurons share a hyperplane, and then the missing set S is a "
            "proof that no MLP of equal width will do.",
        ),
        _skip_table(found),
    )


def judge_iff(results: Results) -> Finding:
    """Both directions: each that fails is a counterexample, since nothing here is random error.

    If: every MLP with a set S absorbs its skip. Only if: none without a set S does. Holds: both.
    In part: one of them.
    """
    found = _counts(results)
    made, mirrored = found["constructed"], found["mirrored"]
    without = sum(count.absorbed - count.sets for count in found.values())
    held = [made.shown, without == 0]
    verdict: Verdict = "holds" if all(held) else "holds in part" if any(held) else "does not hold"
    return Finding(
        verdict,
        f"{made.absorbed} of {made.mlps} MLPs with a set S absorb their skip (error at most "
        f"{made.worst:.0e}); {mirrored.absorbed - mirrored.sets} of {mirrored.mlps} mirrored ones "
        "do without any set S.",
        (
            "The condition is sufficient, but not necessary when two neurons lie on one line: "
            "relu(u) and relu(−u) span any linear function of u.",
            "Where no two do, it is necessary too; that is the generic case, and `relu-skip`.",
        ),
        _skip_table(found),
    )


def _skip_table(found: Mapping[str, SkipCount]) -> ResultTable:
    return ResultTable(
        ("kind", "MLPs", "with a set S", "absorbed", "with neurons on one line"),
        tuple((k, c.mlps, c.sets, c.absorbed, c.redundant) for k, c in found.items()),
    )


def draw_skip(results: Results) -> Chart:
    """The share of MLPs whose skip is absorbed, by width."""
    points = [
        Point(
            results.parameters_of(name)["d"],
            summary(
                [r.values["absorbed"] / r.trial.parameters["draws"] for r in results.named(name)]
            ),
            results.parameters_of(name)["kind"],
        )
        for name in results.names
    ]
    return curves(points, Axes("ReLU MLPs whose skip can be absorbed", "width d", "share"))


RELU_SKIP = Claim(
    id="relu-skip",
    statement="ReLU MLPs with a skip and without one are generically different functions: with "
    "random weights no MLP of equal width can absorb its skip.",
    expected="Generically disjoint: random MLPs never absorb a skip.",
    source="arXiv 2510.23912, ReLU boundary",
    setting="Random and constructed MLPs in float64; a seed draws the weights.",
    version=1,
    trials=_skip_trials("relu-skip", KINDS[:2]),
    run=run_skip,
    judge=judge_skip,
    figure=draw_skip,
    quick_verdicts=("holds",),
)
RELU_SKIP_IFF = Claim(
    id="relu-skip-iff",
    statement="A skip around a ReLU MLP can be absorbed at equal width iff W_down[:,S]·W_up[S,:] "
    "= −I for some set S of neurons.",
    expected="A sharpening of the paper’s statement, made here: it asks for every MLP, not only "
    "for generic ones.",
    source="this project, on the ReLU boundary of arXiv 2510.23912",
    setting="Random, constructed and mirrored MLPs in float64; a seed draws the weights.",
    version=1,
    trials=_skip_trials("relu-skip-iff", KINDS),
    run=run_skip,
    judge=judge_iff,
    figure=draw_skip,
    quick_verdicts=("holds in part",),
)
