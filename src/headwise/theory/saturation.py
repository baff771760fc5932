"""How strongly a softmax answers to its scores: the exact norm of its Jacobian, and bounds.

For p = softmax(s) the Jacobian is J = diag(p) − p·pᵀ, a diagonal minus a rank-one matrix. Its
norm is its largest eigenvalue, the root λ of a secular equation between the two largest p:

    Σ p_i²/(p_i − λ) = Σ p_i        which, with Σ p_i taken off both sides, is
    p_(1)/(p_(1) − λ)  =  ψ(λ)  :=  Σ_{i≥2} p_(i)/(λ − p_(i))          p_(2) < λ < p_(1)

    ψ, falling ──╮              ╭── p_(1)/(p_(1) − λ), rising
                  ╰──────●─────╯
            p_(2)        λ      p_(1)

The second form has only positive terms, so nothing cancels, however close to 0 or 1 the p are.
ψ is replaced by a + b/(λ − p_(2)) with its value and slope, and the crossing with the left side
is then a quadratic. In z = 1/(λ − p_(2)) every term of ψ is concave, so the replacement lies
above ψ: the iterates fall onto λ from above, without a bracket, and double their digits each
step (rational interpolation as in Bunch, Nielsen & Sorensen 1978). Each step reads the row once.

Ties need no iteration: J ≤ diag(p) gives λ ≤ p_(1), and on p_(1) = p_(2) the vector
(1, −1)/√2 reaches it. One algorithm serves NumPy arrays and torch tensors alike.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Float

from headwise.errors import TheoryError

SUM_TOLERANCE = 1e-4
"""How far from 1 a row may sum: room for a float32 softmax over long rows, not for a mask."""

NORM_CEILING = 0.5
"""No softmax Jacobian is larger: uᵀJu is a variance of u's entries, at most (range of u)²/4 ≤ ½."""

_MAX_STEPS = 32  # about 6 are used; the limit only guards against rounding that never settles


def jacobian_norm(p: Float[Any, "*rows L"]) -> Float[Any, "*rows"]:
    """‖diag(p) − p·pᵀ‖₂ of every row of probabilities, a NumPy array or a torch tensor.

    Each row is taken as the distribution p/Σp, which frees a nearly one-hot row from the rounding
    of its largest entry. The answer is float64, except on Apple's MPS, which has only float32.
    No gradient flows through it.
    """
    xp, rows = _as_rows(p)
    total = xp.sum(rows, axis=-1, keepdims=True)
    _check(xp, rows, total)
    top = xp.amax(rows, axis=-1, keepdims=True)
    is_top = rows == top
    rest = xp.where(is_top, 0.0, rows)
    second = xp.amax(rest, axis=-1, keepdims=True)
    tied = xp.sum(is_top, axis=-1, keepdims=True) > 1
    # Tied and one-hot rows have their answer; they ride along with harmless numbers.
    unsettled = ~tied & (second > 0.0)
    scale = xp.where(unsettled, second, 1.0)
    weights = xp.where(unsettled, rest, 0.0) / scale
    depths = xp.where(is_top, 0.0, scale - rest) / scale
    ratio = xp.where(unsettled, scale / top, 0.5)
    gap = xp.where(unsettled, (top - second) / top, 0.5)
    excess = _root(xp, weights, depths, ratio, gap)
    norm = xp.where(tied, top, second * (1.0 + excess)) / total
    return norm[..., 0]


def _root(xp: Any, weights: Any, depths: Any, ratio: Any, gap: Any) -> Any:
    """ξ = λ/p_(2) − 1, in units in which p_(2) = 1.

    weights w = p_i/p_(2) and depths δ = 1 − w over the rest of the row (w = 0 at the maximum);
    ratio τ = p_(2)/p_(1) and gap γ = 1 − τ. A step solves aτ·ξ² + (1 + bτ − aγ)·ξ − bγ = 0.
    """
    mass = xp.sum(weights, axis=-1, keepdims=True)
    # With all of the rest moved up to p_(2) the root only rises: a start above it.
    excess = xp.where(mass > 0.0, mass * gap / (1.0 + mass * ratio), 1.0)
    settled = 4.0 * float(xp.finfo(weights.dtype).eps)
    for _ in range(_MAX_STEPS):
        reach = excess + depths
        near = excess / reach
        slope = xp.sum(weights * near * near, axis=-1, keepdims=True)
        level = xp.sum(weights * near * (depths / reach), axis=-1, keepdims=True) / excess
        half = 1.0 + slope * ratio - level * gap
        spread = xp.sqrt(half * half + 4.0 * level * ratio * slope * gap)
        # The form of the quadratic's positive root that adds numbers of one sign.
        rising = half >= 0.0
        upper = xp.where(rising, 2.0 * slope * gap, spread - half)
        lower = xp.where(rising, half + spread, 2.0 * level * ratio)
        updated = xp.where(mass > 0.0, upper / lower, 1.0)
        falling = excess - updated > settled * (1.0 + updated)
        excess = updated
        if not bool(xp.any(falling)):
            break
    return excess


def _as_rows(p: Any) -> tuple[Any, Any]:
    """The array namespace of p (torch is never imported here, only found), and p in it."""
    if type(p).__module__.split(".")[0] != "torch":
        return np, np.asarray(p, dtype=np.float64)
    torch = sys.modules["torch"]
    tensor = p.detach()
    return torch, tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def _check(xp: Any, rows: Any, total: Any) -> None:
    if rows.ndim == 0 or rows.shape[-1] == 0:
        raise TheoryError(
            f"Expected rows of at least one probability, got shape {tuple(rows.shape)}; "
            "put the probabilities on the last axis."
        )
    if not bool(xp.all(rows >= 0.0)):
        raise TheoryError(
            "Expected probabilities of at least 0, got a negative or NaN entry; "
            "pass the softmax's output, not its scores."
        )
    if not bool(xp.all(xp.abs(total - 1.0) <= SUM_TOLERANCE)):
        worst = float(xp.amax(xp.abs(total - 1.0)))
        raise TheoryError(
            f"Expected rows that sum to 1 within {SUM_TOLERANCE:g}, got one off by {worst:.3g}; "
            "take the softmax in float32 or better, and leave out fully masked rows."
        )


def saturation_bound(score_bound: float | int, length: int) -> float:
    """e^{2C}/L: no Jacobian norm is larger when all L scores lie in [−C, C].

    p_i = e^{s_i}/Σe^{s_j} ≤ e^C/(L·e^{−C}), and J ≤ diag(p) gives ‖J‖ ≤ max p. The bound falls as
    1/L only while C stays fixed; above `NORM_CEILING` it says nothing.
    """
    if not (math.isfinite(score_bound) and score_bound >= 0):
        raise TheoryError(
            f"Expected a finite score bound of at least 0, got {score_bound}; "
            "pass the largest absolute score."
        )
    if length < 1:
        raise TheoryError(f"Expected a length of at least 1, got {length}; pass the row's length.")
    exponent = 2.0 * score_bound - math.log(length)
    return math.inf if exponent > 709.0 else math.exp(exponent)


def attention_error_bound(
    score_error: float | int, length: int, *, score_bound: float | int = math.inf
) -> float:
    """Λ·min(½, e^{2C}/L): how far, in the 2-norm, a row of attention moves with its scores.

    Λ is the 2-norm of the error of the row's L scores, and C bounds the scores before and after.
    On the way from one row of scores to the other every point has scores within C, so no Jacobian
    on it is larger than `saturation_bound`, and none at all than `NORM_CEILING`.
    """
    _check_error(score_error)
    ceiling = NORM_CEILING if math.isinf(score_bound) else saturation_bound(score_bound, length)
    return score_error * min(NORM_CEILING, ceiling)


def truncated_score_error(
    singular_values: Iterable[float], width: int, *, token_norm: float | int, length: int
) -> float:
    """σ_{width+1}·R²·√L: the most that Λ can be in a head cut to `width` by a truncated SVD.

    `singular_values` are those of the matrix M of the scores s_j = xᵀ·M·x_j (M = W_Q·W_Kᵀ times
    the score scale, without rotary positions), and no token is longer than `token_norm` = R. What
    is cut is no larger than the first singular value that is left out, so no score moves by more
    than σ_{width+1}·R², and L of them together by √L times that.
    """
    values = sorted((float(v) for v in singular_values), reverse=True)
    if width < 0 or length < 1 or any(v < 0 or not math.isfinite(v) for v in values):
        raise TheoryError(
            f"Expected singular values of at least 0, a width of at least 0 and a length of at "
            f"least 1, got width {width} and length {length}; pass the values of W_Q·W_Kᵀ."
        )
    _check_error(token_norm)
    return (values[width] if width < len(values) else 0.0) * token_norm**2 * math.sqrt(length)


def total_variation_bound(score_range: float | int) -> float:
    """tanh(w/4): the most attention that score errors can misplace when their range is w.

    The range is the largest error minus the least: what all errors of a row share changes nothing.
    The worst row has two tokens and w between their errors; more tokens neither help nor hurt.
    """
    _check_error(score_range)
    return math.tanh(score_range / 4)


def _check_error(value: float | int) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise TheoryError(
            f"Expected a finite size of at least 0, got {value}; pass a norm or a range."
        )
