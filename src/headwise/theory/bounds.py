"""The error bound of "Allocation of Parameters in Transformers" (arXiv 2510.03784).

The layer is to produce y_t = sum_m rho_m · x_{t-m+1}. Its heads stand in M groups, one per lag:

    lag      1          2        ...   M       M+1 ...
    group    H_1 x d_1  H_2 x d_2      H_M x d_M   nobody looks
    loses    tail(d_m): what d_m of d directions do not carry     everything
             1.3·e^(0.02m) / H_m: how badly H_m heads single out one lag

    E_D <= sum_{m<=M} w_m·((1+eps)·tail(d_m) + 1.3·e^(0.02m)/H_m) + sum_{k>M} w_k

with w_m = ||rho_m||·B, tail(w) = sqrt(1 - w/d) for white tokens and 0 from w = d on, and the
width spent D = sum H_m·d_m. A layer that answers zero has an error of at most sum_k w_k: a bound
that is not below it is *vacuous*. ``allocation.py`` finds the best groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from headwise.errors import TheoryError
from headwise.theory.estimators import Spectrum, checked_count

# Far beyond any measured kernel; inside these limits no term of the bound can overflow.
MAX_LAGS = 1000
MAX_WEIGHT = 1e100
MAX_POINTS = 10_000  # on one curve


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """``heads`` heads, each ``head_dim`` wide, that look at one lag (lag 1 is the token itself)."""

    lag: int
    heads: int
    head_dim: float | int


@dataclass(frozen=True, slots=True)
class GroupError:
    """What one group adds to the bound."""

    group: HeadGroup
    projection: float  # directions of the token that a head does not see
    head_count: float  # too few heads to single out the lag


@dataclass(frozen=True, slots=True)
class ErrorBound:
    """Every term of the bound; the sums are properties."""

    terms: tuple[GroupError, ...]
    missing: tuple[float, ...]  # the weights of the lags that no group looks at
    zero_error: float  # what predicting zero would cost

    @property
    def projection(self) -> float:
        """The narrow-head part of the bound."""
        return math.fsum(term.projection for term in self.terms)

    @property
    def head_count(self) -> float:
        """The few-heads part of the bound."""
        return math.fsum(term.head_count for term in self.terms)

    @property
    def total(self) -> float:
        """The bound itself."""
        parts = (part for term in self.terms for part in (term.projection, term.head_count))
        return math.fsum((*parts, *self.missing))

    @property
    def vacuous(self) -> bool:
        """Whether the bound promises nothing: predicting zero is known to do as well or better."""
        return self.total >= self.zero_error


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One head count and the bound there."""

    heads: int
    bound: float


@dataclass(frozen=True, slots=True)
class BoundCurve:
    """The bound along a list of head counts, at one total width."""

    heads: tuple[int, ...]  # per group
    head_dim: tuple[float, ...]  # width / (lags · heads), taken as real
    bound: tuple[float, ...]
    zero_error: float

    @property
    def best(self) -> CurvePoint:
        """The lowest point; of equal ones the fewest heads."""
        bound, heads = min(zip(self.bound, self.heads, strict=True))
        return CurvePoint(heads, bound)


def error_bound(
    groups: Sequence[HeadGroup],
    kernel: Sequence[float | int] | np.ndarray,
    token_dim: int | Spectrum,
    *,
    eps: float | int = 0.0,
) -> ErrorBound:
    """The bound of groups that look at lags 1..M; ``kernel`` holds the weights ||rho_m||·B.

    ``token_dim`` is the width of white tokens, or a measured Spectrum. No groups: predict zero.
    """
    weights = kernel_weights(kernel)
    spectrum = as_spectrum(token_dim)
    distortion = 1.0 + checked_eps(eps)
    if [group.lag for group in groups] != list(range(1, len(groups) + 1)):
        raise TheoryError(
            "Head groups must look at lags 1, 2, 3, ... in order;"
            f" got lags {[group.lag for group in groups]}; sort them and fill the gaps."
        )
    if len(groups) > len(weights):
        raise TheoryError(
            f"Every head group needs a kernel weight; got {len(groups)} groups and {len(weights)}"
            " weights; lengthen the kernel or use fewer lags."
        )
    for group in groups:
        checked_count("number of heads", group.heads)
        if not 0 < group.head_dim < math.inf:
            raise TheoryError(f"A head must be wider than 0; got {group.head_dim}; widen it.")
    tails = spectrum.tail(np.array([group.head_dim for group in groups], dtype=np.float64))
    terms = tuple(
        GroupError(
            group,
            projection=weight * distortion * tail,
            head_count=weight * lag_error(group.lag) / group.heads,
        )
        for group, weight, tail in zip(groups, weights, tails.tolist(), strict=False)
    )
    return ErrorBound(terms, weights[len(groups) :], math.fsum(weights))


def bound_curve(
    width: int,
    token_dim: int | Spectrum,
    heads: Iterable[int],
    *,
    lags: int = 1,
    kernel: Sequence[float | int] | np.ndarray | None = None,
    eps: float | int = 0.0,
) -> BoundCurve:
    """The bound when ``width`` is shared evenly by ``lags`` groups of so many heads each.

    As in the paper's figures, the head width is a real number. Default kernel: equal weights 1.
    """
    checked_count("width", width)
    checked_count("number of lags", lags)
    counts = tuple(islice(heads, MAX_POINTS + 1))
    if not 1 <= len(counts) <= MAX_POINTS:
        raise TheoryError(
            f"A curve takes 1 to {MAX_POINTS} head counts;"
            f" got {'more' if counts else 'none'}; give a range such as 1-80."
        )
    for count in counts:
        checked_count("number of heads", count)
    weights = kernel_weights((1.0,) * lags if kernel is None else kernel)
    spectrum = as_spectrum(token_dim)
    dims = tuple(width / (lags * count) for count in counts)
    bounds = [
        error_bound(
            [HeadGroup(lag, count, dim) for lag in range(1, lags + 1)], weights, spectrum, eps=eps
        )
        for count, dim in zip(counts, dims, strict=True)
    ]
    return BoundCurve(counts, dims, tuple(b.total for b in bounds), math.fsum(weights))


def lag_error(lag: int) -> float:
    """What a single head loses in singling out ``lag``, per unit of weight; H heads lose 1/H."""
    return 1.3 * math.exp(0.02 * lag)


def kernel_weights(kernel: Sequence[float | int] | np.ndarray) -> tuple[float, ...]:
    """The kernel as floats, refused unless it can stand in the bound."""
    try:
        weights = np.asarray(kernel, dtype=np.float64)
    except (TypeError, ValueError):
        weights = np.array(np.nan)
    if not (weights.ndim == 1 and 1 <= weights.size <= MAX_LAGS):
        raise TheoryError(
            f"A kernel must be a list of 1 to {MAX_LAGS} numbers, one weight per lag;"
            f" got {f'{weights.size} numbers' if weights.ndim == 1 else repr(kernel)};"
            " give a list such as 1,0.5,0.25."
        )
    wrong = weights[~((weights >= 0) & (weights <= MAX_WEIGHT))]
    if wrong.size or not weights.any():
        raise TheoryError(
            f"Kernel weights must be numbers from 0 to {MAX_WEIGHT:g}, at least one above 0;"
            f" got {wrong[0] if wrong.size else 'only zeros'}; correct the kernel."
        )
    return tuple(weights.tolist())


def as_spectrum(token_dim: int | Spectrum) -> Spectrum:
    """A spectrum as it is; a width as white tokens of that width."""
    if isinstance(token_dim, Spectrum):
        return token_dim
    return Spectrum.isotropic(token_dim)


def checked_eps(eps: float | int) -> float:
    """The distortion of the projection, at least 0, or a TheoryError."""
    if not 0 <= eps <= MAX_WEIGHT:
        raise TheoryError(
            f"The distortion eps must be a number >= 0; got {eps}; the paper takes 0."
        )
    return float(eps)
