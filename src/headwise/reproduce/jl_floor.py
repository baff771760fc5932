"""Claim: a width of 8·ln m/ε² keeps m points apart under a random projection.

Random points on a sphere are projected to growing widths and all pairs compared: distances (what
the lemma is about) and inner products (what attention computes). The popular example, 72 for 8192
points, is the formula at ε = 1, where the lemma promises nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headwise.reproduce.charting import Axes, Point, curves
from headwise.reproduce.claim import Claim, Finding, Results, Size, Table, Trial, Values
from headwise.reproduce.statistics import summary

if TYPE_CHECKING:
    from headwise.report.charts import Chart

POINTS: dict[Size, int] = {"quick": 512, "full": 8192}
DIMENSION = 1024  # of the space the points come from
EPS = (0.3, 0.4, 0.5, 0.7, 0.9)


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
    """The floor must keep distances at each ε; squared distances and the popular example beside."""
    m = results.items[0].trial.parameters["points"]
    measured = _measured(results)
    example, *floors = sorted(measured)
    eps = dict(zip(floors, sorted(EPS, reverse=True), strict=True))
    used = {
        kind: {w: max(measured[w][kind]) / eps[w] for w in floors}
        for kind in ("distance", "square")
    }
    kept = max(used["distance"].values()) <= 1
    over = [str(eps[w]) for w in floors if used["square"][w] > 1]
    at = {name: summary(values) for name, values in measured[example].items()}
    rows = [
        (w, eps.get(w, "1 (outside the lemma)"), *(str(summary(values)) for values in got.values()))
        for w, got in sorted(measured.items())
    ]
    return Finding(
        "holds in part" if kept else "does not hold",
        f"Above 8 ln m/ε² the distances of {m} points use at most "
        f"{max(used['distance'].values()):.2f} of the ε allowed, squared distances at most "
        f"{max(used['square'].values()):.2f}; at the popular {example - 1}, inner products of unit "
        f"vectors are off by up to {at['inner'].mean:.2f}.",
        (
            f"{example - 1} = 8·ln {m} takes ε = 1, at which distances may vanish: the lemma gives "
            f"{math.floor(8 * math.log(m) / 0.25) + 1} at ε = 0.5.",
            f"At {example - 1} a typical inner product is off by {at['inner_rms'].mean:.2f} "
            f"(1/√width), a squared distance by up to {at['square'].mean:.2f}.",
            "Judged by distances. In squared distances, in which the lemma is also stated, some "
            f"random map left 1 ± ε at ε = {', '.join(over) or 'none of those tried'}; the lemma "
            "promises that a map exists that does not, not that each does.",
            "A width that suffices for random maps; a learned map, fitted to its points, may do "
            "with less.",
        ),
        Table(
            ("width", "ε", "distance", "squared distance", "inner product", "inner product, rms"),
            tuple(rows),
        ),
    )


def figure(results: Results) -> Chart:
    """Measured largest distortions by width, beside the lemma's ε."""
    m = results.items[0].trial.parameters["points"]
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
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
    quick_verdicts=("holds in part",),
)
