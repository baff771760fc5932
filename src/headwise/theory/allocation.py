"""The exact minimiser of the error bound: which lags, how many heads for each, how wide.

A knapsack with one item per lag. Lag m may spend any s = H·d; the most it gets for s is a
staircase that only goes down, and only its edges matter:

    error |__                 The cheapest error of the lags 1..M that spend s together is
          |  |____            the cheapest way to split s between lag M and the lags before it:
          |       |___        best_M(s) = min over edges (t, error) of best_{M-1}(s - t) + error
          +-----------> s
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from headwise.errors import TheoryError
from headwise.theory.bounds import (
    ErrorBound,
    HeadGroup,
    as_spectrum,
    checked_eps,
    error_bound,
    kernel_weights,
    lag_error,
)
from headwise.theory.estimators import Spectrum, checked_count

MAX_WIDTH = 32768  # a few seconds; time grows with the square of the width


@dataclass(frozen=True, slots=True)
class Allocation:
    """The best groups for a width, and how far their bound can be trusted to say something."""

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
