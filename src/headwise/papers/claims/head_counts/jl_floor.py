"""Claim: a width of 8·ln m/ε² keeps m points apart under a random projection.

Random points on a sphere are projected to growing widths and all pairs compared: distances (what
the lemma is about), their squares (in which it is often stated) and inner products (what attention
computes). The popular example, 72 for 8192 points, is the formula at ε = 1, where the lemma
promises nothing; it is reported, not judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headwise.papers.harness.charts import Axes, Point, curves
from headwise.papers.harness.claim import (
    Claim,
    Finding,
    Results,
    ResultTable,
    Size,
    Trial,
    Values,
    Verdict,
)
from headwise.papers.harness.judging import summary

if TYPE_CHECKING:
    from headwise.reporting.charts import Chart


POINTS: dict[Size, int] = {"quick": 512, "full": 8192}
DIMENSION = 1024  # of the space the points come from
EPS = (0.3, 0.4, 0.5, 0.7, 0.9)
Shares = Mapping[float, Sequence[float]]  # by ε: the share of it that each map uses


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """One cloud of points and one projection per seed."""
    m = POINTS[size]
    widths = [math.floor(8 * math.log(m)) + 1] + [
        math.floor(8 * math.log(m) / e**2) + 1 for e in EPS
    ]
    parameters = {"points": m, "dimension": DIMENSION, "widths": sorted(widths)}
    return [Trial("jl-floor", f"{m} points", seed, parameters, cost=m / 300) for seed in seeds]


def run(trial: Trial) -> Values:
    """Largest and typical distortion over all pairs, at every width.

    The first w columns of one Gaussian matrix, scaled by 1/√w, are a Gaussian matrix of width w.
    """
    import numpy as np

    wanted: dict[str, Any] = dict(trial.parameters)
    m, dimension, widths = wanted["points"], wanted["dimension"], wanted["widths"]
    rng = np.random.default_rng(trial.seed)
    points = rng.standard_normal((m, dimension)).astype(np.float32)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    projected = points @ rng.standard_normal((dimension, max(widths))).astype(np.float32)
    found = {w: {"distance": 0.0, "square": 0.0, "inner": 0.0, "sum": 0.0} for w in widths}
    for first in range(0, m - 1, 1024):
        rows = slice(first, min(first + 1024, m))
        later = np.arange(m)[None, :] > np.arange(m)[rows, None]  # each pair once
        inner = (points[rows] @ points.T)[later]
        for w, worst in found.items():
            short = projected[:, :w] / np.float32(math.sqrt(w))
            norms = np.square(short).sum(1)
            product = short[rows] @ short.T
            ratio = (norms[rows, None] + norms[None, :] - 2 * product)[later] / (2 - 2 * inner)
            off = np.abs(product[later] - inner)
            worst["square"] = max(worst["square"], float(np.abs(ratio - 1).max()))
            distance = float(np.abs(np.sqrt(np.maximum(ratio, 0)) - 1).max())
            worst["distance"] = max(worst["distance"], distance)
            worst["inner"] = max(worst["inner"], float(off.max()))
            worst["sum"] += float(np.square(off, dtype=np.float64).sum())
    pairs = m * (m - 1) / 2
    return {
        "widths": [
            {
                "width": w,
                "distance": worst["distance"],
                "square": worst["square"],
                "inner": worst["inner"],
                "inner_rms": math.sqrt(worst["sum"] / pairs),
            }
            for w, worst in found.items()
        ]
    }


def judge(results: Results) -> Finding:
    """It holds if at each ε every map keeps distances and squared distances within 1 ± ε.

    In part: at each ε some map keeps distances (the lemma promises one). It does not hold if at
    some ε none of several maps does; a single map that does not proves nothing.
    """
    m = results.parameters["points"]
    measured = _measured(results)
    example, *floors = sorted(measured)
    eps = dict(zip(floors, sorted(EPS, reverse=True), strict=True))
    used = {
        kind: {eps[w]: [off / eps[w] for off in measured[w][kind]] for w in floors}
        for kind in ("distance", "square")
    }
    verdict, why = _verdict(used["distance"], used["square"])
    largest = {kind: max(map(max, shares.values())) for kind, shares in used.items()}
    at, log = measured[example], 8 * math.log(m)
    rows = [
        (w, eps.get(w, "1 (outside the lemma)"), *(str(summary(values)) for values in got.values()))
        for w, got in sorted(measured.items())
    ]
    return Finding(
        verdict,
        f"Above 8 ln m/ε² the distances of {m} points use at most {largest['distance']:.2f} of "
        f"the ε allowed, squared distances at most {largest['square']:.2f}; at width {example}, "
        f"the first above 8·ln {m}, inner products of unit vectors are off by up to "
        f"{max(at['inner']):.2f}.",
        (
            why,
            "For squared distances the usual proof needs more, 4·ln m/(ε²/2 − ε³/3).",
            f"8·ln {m} = {log:.1f} (the popular 72 is that of 8192 points) means ε = 1, where "
            "distances may vanish and the lemma says nothing; at ε = 0.5 it gives "
            f"{math.floor(log / 0.25) + 1}.",
            f"At width {example} a typical inner product is off by "
            f"{summary(at['inner_rms']).mean:.2f} (1/√width is {example**-0.5:.2f}), a distance by "
            f"up to {max(at['distance']):.2f}, a squared one by up to {max(at['square']):.2f}.",
            "This width suffices for random maps; a learned map, fitted to its points, may need "
            "less.",
        ),
        ResultTable(
            ("width", "ε", "distance, largest", "squared distance, largest",
             "inner product, largest", "inner product, rms"),
            tuple(rows),
        ),
    )  # fmt: skip


def _verdict(distances: Shares, squares: Shares) -> tuple[Verdict, str]:
    """The verdict and the sentence behind it."""
    left, squares_left = _left(distances), _left(squares)
    if any(min(shares) > 1 for shares in distances.values()):
        if max(map(len, distances.values())) == 1:
            return (
                "cannot be tested here",
                f"The only map tried lets distances leave 1 ± ε at {left}; the lemma promises that "
                "some map does not, so this refutes nothing.",
            )
        return "does not hold", f"Distances leave 1 ± ε at {left}."
    if left:
        return (
            "holds in part",
            f"At every ε some map keeps distances within 1 ± ε, but they leave it at {left}.",
        )
    if squares_left:
        return (
            "holds in part",
            "Every map tried keeps distances within 1 ± ε; squared distances, in which the lemma "
            f"is also stated, leave it at {squares_left}.",
        )
    return "holds", "Every map tried keeps distances and squared distances within 1 ± ε."


def _left(used: Shares) -> str:
    """At which ε how many maps used more than ε."""
    over = {e: sum(share > 1 for share in shares) for e, shares in used.items()}
    return ", ".join(f"ε = {e:g} ({n} of {len(used[e])} maps)" for e, n in over.items() if n)


def figure(results: Results) -> Chart:
    """Measured largest distortions by width, beside the lemma's ε."""
    m = results.parameters["points"]
    names = {"square": "squared distance, largest", "distance": "distance, largest"}
    names |= {"inner": "inner product, largest", "inner_rms": "inner product, rms"}
    points = []
    for w, got in sorted(_measured(results).items()):
        points.append(Point(w, summary([math.sqrt(8 * math.log(m) / w)]), "ε of the lemma"))
        points += [Point(w, summary(got[key]), words) for key, words in names.items()]
    title = f"Distortion of {m} points under random projections"
    return curves(points, Axes(title, "width", "distortion", log_x=True))


def _measured(results: Results) -> dict[int, dict[str, list[float]]]:
    found: dict[int, dict[str, list[float]]] = {}
    for result in results:
        for row in result.values["widths"]:
            place = found.setdefault(row["width"], {})
            for name in ("distance", "square", "inner", "inner_rms"):
                place.setdefault(name, []).append(row[name])
    return found


CLAIM = Claim(
    id="jl-floor",
    statement="A head wider than 8·ln m/ε² keeps m tokens apart (Johnson–Lindenstrauss).",
    expected="Distances within 1 ± ε for 0 < ε < 1; the common example 8·ln 8192 ≈ 72.",
    source="the Johnson–Lindenstrauss view of heads",
    setting="Random points on a sphere under Gaussian maps; a seed draws the points and the map.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
    quick_verdicts=("holds in part",),
)
