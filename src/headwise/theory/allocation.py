"""The error bound of "Allocation of Parameters in Transformers", and its exact minimiser.

The bound (arXiv 2510.03784): the layer is to produce y_t = sum_m rho_m · x_{t-m+1}. Its heads
stand in M groups, one per lag:

    lag      1          2        ...   M       M+1 ...
    group    H_1 x d_1  H_2 x d_2      H_M x d_M   nobody looks
    loses    tail(d_m): what d_m of d directions do not carry     everything
             1.3·e^(0.02m) / H_m: how badly H_m heads single out one lag

    E_D <= sum_{m<=M} w_m·((1+eps)·tail(d_m) + 1.3·e^(0.02m)/H_m) + sum_{k>M} w_k

with w_m = ||rho_m||·B, tail(w) = sqrt(1 - w/d) for white tokens and 0 from w = d on, and the
width spent D = sum H_m·d_m. A layer that answers zero has an error of at most sum_k w_k: a bound
that is not below it is *vacuous*.

The minimiser says which lags, how many heads for each, how wide: a knapsack with one item per lag.
Lag m may spend any s = H·d; the most it gets for s is a staircase that only goes down, and only
its edges matter:

    error |__                 The cheapest error of the lags 1..M that spend s together is
          |  |____            the cheapest way to split s between lag M and the lags before it:
          |       |___        best_M(s) = min over edges (t, error) of best_{M-1}(s - t) + error
          +-----------> s
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

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


MAX_WIDTH = 32768  # a few seconds; time grows with the square of the width


@dataclass(frozen=True, slots=True)
class Allocation:
    """The best groups for a width, and whether their bound is vacuous."""

    groups: tuple[HeadGroup, ...]
    error: ErrorBound
    slack: int  # width left over: no way to spend it lowers the bound
    on_corner: bool  # every group that carries weight is exactly as wide as the tokens

    @property
    def lags(self) -> int:
        """M, the number of lags that are looked at."""
        return len(self.groups)

    @property
    def bound(self) -> float:
        """The bound at the optimum."""
        return self.error.total

    @property
    def zero_error(self) -> float:
        """What predicting zero would cost."""
        return self.error.zero_error

    @property
    def vacuous(self) -> bool:
        """Whether even the optimum does no better than predicting zero."""
        return self.error.vacuous


class _Choices(NamedTuple):
    """All (heads, head_dim) that fit the width, sorted by what they spend, then by heads."""

    heads: Int[np.ndarray, " pairs"]
    dims: Int[np.ndarray, " pairs"]
    tails: Float[np.ndarray, " pairs"]
    spends: Int[np.ndarray, " spends"]  # the distinct spends ...
    starts: Int[np.ndarray, " spends"]  # ... and where each begins among the pairs


def allocate(
    width: int,
    token_dim: int | Spectrum,
    kernel: Sequence[float | int] | np.ndarray,
    *,
    eps: float | int = 0.0,
    heads_multiple: int = 1,
    dims_multiple: int = 1,
) -> Allocation:
    """The M >= 1, H_m and d_m (whole numbers) of least bound with sum H_m·d_m <= width.

    Exact, because nothing that could win is left out: (1) for fixed M the bound is a sum of one
    term per lag, tied only by the width, so the recursion over lags with the spent width as its
    state sees the best of every split; (2) a head wider than the spectrum's rank costs more and
    loses nothing less; (3) of two ways to spend on one lag, one that costs more without losing
    less can be exchanged for the other in any solution; (4) errors are never negative, so once
    the lags 1..M alone cost more than a known solution, no longer prefix can win. Sums are in
    float64: solutions closer than rounding count as equal only if they round equally.

    ``heads_multiple`` and ``dims_multiple`` allow only multiples of them, for heads that share
    their keys and values in groups, and for widths that a model can have; the optimum is the best
    of what is left.

    Of equal bounds the one with more slack is taken, then the one with fewer lags; then the later
    lags spend least, and a group has fewer, wider heads.

    Predicting zero (M = 0) is not among the candidates; ``vacuous`` says when it would be as good.
    """
    if checked_count("width", width) > MAX_WIDTH:
        raise TheoryError(
            f"The exact allocation covers widths up to {MAX_WIDTH};"
            f" got {width}; allocate one layer at a time, or a proportionally smaller one."
        )
    weights = kernel_weights(kernel)
    spectrum = as_spectrum(token_dim)
    for name, step in (("heads_multiple", heads_multiple), ("dims_multiple", dims_multiple)):
        checked_count(name, step)
    if heads_multiple * dims_multiple > width:
        raise TheoryError(
            f"A width of at least {heads_multiple * dims_multiple} is needed for {heads_multiple} "
            f"heads of width {dims_multiple}; got {width}; widen the layer or lower the multiples."
        )
    choices = _choices(width, spectrum, 1.0 + checked_eps(eps), heads_multiple, dims_multiple)

    best = np.full(width + 1, np.inf)  # best[s]: error of the lags so far, spending exactly s
    best[0] = 0.0
    history = [best]
    winner = (np.inf, 0, 0)  # bound, spent, lags
    for lag in range(1, min(len(weights), width // int(choices.spends[0])) + 1):
        best = _with_lag(best, *_edges(choices, weights[lag - 1], lag))
        history.append(best)
        spent = int(best.argmin())
        if best[spent] > winner[0]:
            break
        winner = min(winner, (best[spent] + sum(weights[lag:]), spent, lag))
    groups = _retrace(history[: winner[2] + 1], winner[1], choices, weights)
    return Allocation(
        groups=groups,
        error=error_bound(groups, weights, spectrum, eps=eps),
        slack=width - winner[1],
        on_corner=all(
            spectrum.rank <= group.head_dim < spectrum.rank + dims_multiple
            for group, weight in zip(groups, weights, strict=False)
            if weight > 0
        ),
    )


def _choices(
    width: int, spectrum: Spectrum, distortion: float, heads_multiple: int, dims_multiple: int
) -> _Choices:
    """Every group that fits, listed once; lags differ only in how they weigh its two errors."""
    # Up to the first allowed width that loses nothing.
    enough = -(-spectrum.rank // dims_multiple) * dims_multiple
    widest = min(width // heads_multiple, enough)
    all_dims = np.arange(dims_multiple, widest + 1, dims_multiple)
    counts = width // (heads_multiple * all_dims)
    dims = np.repeat(all_dims, counts)
    heads = heads_multiple * np.concatenate([np.arange(1, n + 1) for n in counts.tolist()])
    order = np.lexsort((heads, heads * dims))
    heads, dims = heads[order], dims[order]
    spends, starts = np.unique(heads * dims, return_index=True)
    tails = distortion * spectrum.tail(np.arange(widest + 1, dtype=np.float64))[dims]
    return _Choices(heads, dims, tails, spends, starts)


def _edges(
    choices: _Choices, weight: float, lag: int
) -> tuple[Int[np.ndarray, " edges"], Float[np.ndarray, " edges"]]:
    """The staircase of one lag: spends at which its least error drops, and the error there."""
    least = np.minimum.reduceat(_errors(choices, weight, lag), choices.starts)
    before = np.append(np.inf, np.minimum.accumulate(least)[:-1])
    drops = least < before
    return choices.spends[drops], least[drops]


def _with_lag(
    before: Float[np.ndarray, " spent"],
    spends: Int[np.ndarray, " edges"],
    errors: Float[np.ndarray, " edges"],
) -> Float[np.ndarray, " spent"]:
    """Least errors by spent width after one more lag."""
    after = np.full_like(before, np.inf)
    for spend, error in zip(spends.tolist(), errors.tolist(), strict=True):
        np.minimum(after[spend:], before[:-spend] + error, out=after[spend:])
    return after


def _retrace(
    history: list[Float[np.ndarray, " spent"]],
    spent: int,
    choices: _Choices,
    weights: tuple[float, ...],
) -> tuple[HeadGroup, ...]:
    """The groups behind the winner, last lag first: the same sums, so they match to the bit."""
    groups = []
    for lag in range(len(history) - 1, 0, -1):
        spends, errors = _edges(choices, weights[lag - 1], lag)
        fits = spends <= spent
        sums = history[lag - 1][spent - spends[fits]] + errors[fits]
        edge = int(np.flatnonzero(sums == history[lag][spent])[0])
        same_spend = choices.heads * choices.dims == spends[edge]
        pair = np.where(same_spend, _errors(choices, weights[lag - 1], lag), np.inf).argmin()
        groups.append(HeadGroup(lag, int(choices.heads[pair]), int(choices.dims[pair])))
        spent -= int(spends[edge])
    return tuple(reversed(groups))


def _errors(choices: _Choices, weight: float, lag: int) -> Float[np.ndarray, " pairs"]:
    """What each choice would lose at this lag."""
    return weight * (choices.tails + lag_error(lag) / choices.heads)
