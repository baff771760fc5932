"""Claim: a skip around a ReLU MLP can be absorbed at equal width iff some neurons sum to −I.

Three kinds of MLP: random ones (no set S exists), ones made so that S exists, and mirrored ones,
whose neurons come in pairs relu(u), relu(−u). The mirrored ones decide the "only if": a pair
holds any linear function of u, so their skip can be absorbed although no S exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headwise.reproduce.charting import Axes, Point, curves
from headwise.reproduce.claim import Claim, Finding, Results, Size, Table, Trial, Values, Verdict
from headwise.reproduce.statistics import summary

if TYPE_CHECKING:
    from headwise.report.charts import Chart

SIZES: dict[Size, tuple[int, ...]] = {"quick": (3, 5), "full": (3, 5, 8, 13)}
KINDS = ("random", "constructed", "mirrored")
DRAWS = 20
EXACT = 1e-9


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Some MLPs of each kind and width; four neurons per dimension."""
    return [
        Trial("relu-skip", f"{kind}, d = {d}", seed, {"kind": kind, "d": d, "draws": DRAWS})
        for seed in seeds
        for d in SIZES[size]
        for kind in KINDS
    ]


def run(trial: Trial) -> Values:
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


def judge(results: Results) -> Finding:
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
            "relu(u) and relu(−u) hold any linear function of u.",
        ),
        Table(
            ("kind", "MLPs", "with a set S", "absorbed", "with neurons on one line"),
            tuple(
                (kind, s["mlps"], s["sets"], s["absorbed"], s["redundant"])
                for kind, s in total.items()
            ),
        ),
    )


def figure(results: Results) -> Chart:
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


CLAIM = Claim(
    id="relu-skip",
    statement="A skip around a ReLU MLP can be absorbed at equal width iff W_down[:,S]·W_up[S,:] "
    "= −I for some set S of neurons; with generic weights, never.",
    expected="Random MLPs cannot absorb a skip; one with such a set can.",
    source="arXiv 2510.23912, ReLU boundary",
    setting="Random and constructed MLPs in float64; a seed draws the weights.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
    quick_verdicts=("holds in part",),
)
