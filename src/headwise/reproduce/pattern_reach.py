"""Which widths reach a random attention pattern: by optimisation, and by what is proven.

A pattern is approached by L-BFGS in float64 from random weights. Its singular values say exactly
which widths reach it (its score gap is 0 there); the optimiser, which stops short of exact, must
agree:

    error of one pattern    wide heads ─•••─┊────── 100 × ──────┊─•──•─ narrow heads
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headwise.reproduce.answers import Answer
from headwise.reproduce.claim import Result, Results, Trial, Values

if TYPE_CHECKING:
    import numpy as np

REACHED = 1e-5  # largest error of a probability; optimisers stop short of exact
APART = 100  # a narrow head misses a pattern by so many times what wide heads leave of it


def approach(trial: Trial) -> Values:
    """The error of the best of several starts, beside what is proven about the pattern."""
    import numpy as np
    from scipy.optimize import minimize

    from headwise.theory.bottleneck import attention_pattern, pattern_distance

    n, width = trial.parameters["n"], trial.parameters["width"]
    rng = np.random.default_rng(trial.seed)
    X = rng.standard_normal((n, n + 2))
    P = np.exp(rng.standard_normal((n, n)))
    P /= P.sum(-1, keepdims=True)
    best = np.inf
    for start in range(trial.parameters["starts"]):
        draw = np.random.default_rng([trial.seed, width, start])
        weights = draw.standard_normal(2 * X.shape[1] * width) / np.sqrt(X.shape[1])
        found = minimize(
            divergence, weights, (X, P, width), jac=True, method="L-BFGS-B",
            options={"maxiter": 3000, "maxfun": 4000, "ftol": 1e-15, "gtol": 1e-10},
        )  # fmt: skip
        W_Q, W_K = found.x.reshape(2, X.shape[1], width)
        best = min(best, float(np.abs(attention_pattern(X, W_Q, W_K) - P).max()))
    proven = pattern_distance(P, width)
    return {"error": best, "proven": proven.probability_gap, "score_gap": proven.score_gap}


def divergence(
    weights: np.ndarray, X: np.ndarray, P: np.ndarray, width: int
) -> tuple[float, np.ndarray]:
    """Mean KL(P ‖ softmax(scores)) per row and its gradient: d/dscores is softmax − P."""
    import numpy as np

    W_Q, W_K = weights.reshape(2, X.shape[1], width)
    q, k = X @ W_Q, X @ W_K
    scores = q @ k.T / np.sqrt(width)
    shifted = scores - scores.max(-1, keepdims=True)
    log_made = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    slope = (np.exp(log_made) - P) / (len(P) * np.sqrt(width))
    gradient = np.stack([X.T @ (slope @ k), X.T @ (slope.T @ q)])
    return float((P * (np.log(P) - log_made)).sum() / len(P)), gradient.ravel()


def at(reach: Results, beyond: Sequence[int]) -> list[Result]:
    """The approaches at these widths, counted from n."""
    return [r for r in reach if r.trial.parameters["width"] - r.trial.parameters["n"] in beyond]


def errors(some: Sequence[Result]) -> list[float]:
    """Their errors."""
    return [float(r.values["error"]) for r in some]


def _reached(r: Result) -> bool:
    return bool(r.values["score_gap"] == 0 and r.values["error"] <= REACHED)


def reaches(wide: Sequence[Result]) -> Answer:
    """No where a pattern is proven out of reach; an optimiser that stops short refutes nothing."""
    if any(r.values["score_gap"] > 0 for r in wide):
        return "no"
    return "yes" if all(map(_reached, wide)) else "open"


def misses(some: Sequence[Result], wide: Sequence[Result]) -> Answer:
    """Yes: each is proven and seen to miss its pattern. No: at some width each reaches it."""

    def apart(r: Result) -> bool:
        n, seed = r.trial.parameters["n"], r.trial.seed
        same = [w for w in wide if (w.trial.parameters["n"], w.trial.seed) == (n, seed)]
        v = r.values  # below `proven` no head can come
        proven = v["score_gap"] > 0 and v["error"] >= 0.999 * v["proven"]
        return bool(proven and v["error"] > APART * max(errors(same)))

    if all(map(apart, some)):
        return "yes"
    each = ([_reached(r) for r in some if r.trial.name == s.trial.name] for s in some)
    return "no" if any(map(all, each)) else "open"
