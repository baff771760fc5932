"""How tokens spread over their directions, and how far back they are needed: assumed or measured.

The error bound (``allocation.py``) asks two things of the data. How much of a token is lost when a
head sees only ``w`` of its ``d`` directions? That is the tail of a spectrum:

    energy  |#                      tail(w) = sqrt(energy right of w / all energy)
            |# #
            |# # # | # . .          isotropic tokens: every bar equal, tail(w) = sqrt(1 - w/d)
            +------w-------> direction

And how strongly does the output depend on each past token? That is the lag kernel ||rho_m||·B.
Both can be assumed (white noise, equal lags) or measured here from a matrix of token vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import numpy as np
from jaxtyping import Float

from headwise.errors import TheoryError, reason_of
from headwise.inputs import MOST_TEXT, check_file

MAX_TOKEN_DIM = 65536  # ten times the widest models; a spectrum is held in full


@dataclass(frozen=True, slots=True)
class Spectrum:
    """The energy of tokens along each of their principal directions, largest first.

    Only ratios matter. Between whole widths the energy is interpolated linearly, so that for
    equal eigenvalues ``tail`` is exactly the sqrt(1 - w/d) of the isotropic theory.
    """

    eigenvalues: tuple[float, ...]

    def __post_init__(self) -> None:
        values = np.sort(np.asarray(self.eigenvalues, dtype=np.float64))[::-1]
        if not (values.size and np.isfinite(values).all() and values[-1] >= 0 and values[0] > 0):
            raise TheoryError(
                "A token spectrum must hold finite eigenvalues >= 0, at least one of them positive;"
                f" got {_glance(self.eigenvalues)}; measure one with token_spectrum."
            )
        object.__setattr__(self, "eigenvalues", tuple(values.tolist()))

    @classmethod
    def isotropic(cls, token_dim: int) -> Spectrum:
        """White tokens: all ``token_dim`` directions carry the same energy."""
        return cls((1.0,) * checked_count("token width", token_dim, MAX_TOKEN_DIM))

    @property
    def rank(self) -> int:
        """The corner: the smallest width that loses nothing (``d`` for isotropic tokens)."""
        return sum(value > 0 for value in self.eigenvalues)

    def tail(self, width: Float[np.ndarray, "*grid"] | float | int) -> Float[np.ndarray, "*grid"]:
        """Root of the energy fraction outside the first ``width`` directions; 0 from ``d`` on."""
        values = np.array(self.eigenvalues) / self.eigenvalues[0]
        # Summed from the small end: the tail beyond the rank is exactly 0, not a rounding error.
        outside = np.append(np.cumsum(values[::-1])[::-1], 0.0)
        fraction = np.interp(width, np.arange(outside.size), outside / outside[0])
        return np.asarray(np.sqrt(fraction))


@dataclass(frozen=True, slots=True, eq=False)
class LagKernel:
    """Least-squares dependence of y_t on x_t (lag 1), x_{t-1} (lag 2), ... ."""

    matrices: Float[np.ndarray, "lags token_dim target_dim"]
    norms: tuple[float, ...]  # spectral norm of each matrix
    radius: float  # B, the largest distance of a token from the mean token
    unexplained: float  # fraction of the targets' variance that no lag explains, on the same text

    @property
    def weights(self) -> tuple[float, ...]:
        """The products ||rho_m||·B that the bound takes as its kernel."""
        return tuple(norm * self.radius for norm in self.norms)


def read_vectors(path: Path) -> Float[np.ndarray, "tokens token_dim"]:
    """The token vectors in a .npy file."""
    check_file(path, most=MOST_TEXT, advice="give a .npy file")
    try:
        rows = np.load(path, allow_pickle=False)
    # A damaged header shows as any kind of error, of the parser of Python too.
    except Exception as error:
        raise TheoryError(
            f"{path} must be a .npy file of numbers (tokens × width), got another "
            f"({reason_of(error)}); check it."
        ) from error
    if not isinstance(rows, np.ndarray):
        rows.close()
        raise TheoryError(f"{path} must be a .npy file with one matrix, not an archive.")
    if rows.ndim != 2 or rows.dtype.kind != "f":
        raise TheoryError(
            f"{path} must hold a matrix of floats (tokens × width), got {rows.dtype} of shape "
            f"{rows.shape}; reshape or convert it."
        )
    return rows


def token_spectrum(X: Float[np.ndarray, "tokens token_dim"]) -> Spectrum:
    """Eigenvalues of the covariance of token vectors.

    Eigenvalues below rounding are set to 0, so that tokens of low rank have a rank: below the
    largest times size·epsilon (the covariance is summed in float64, the rule of
    ``numpy.linalg.matrix_rank``), or times the squared epsilon of the tokens' own type.
    """
    tokens = _varying("token vectors", X)
    largest = float(np.abs(tokens).max())
    if largest > 1e150:  # whose square is beyond a float
        raise TheoryError(
            f"Token vectors must have entries up to 1e150, got {largest:g}; scale them down."
        )
    tokens = tokens - tokens.mean(axis=0)
    values = np.linalg.eigvalsh(tokens.T @ tokens / len(tokens))
    rounding = max(max(tokens.shape) * np.finfo(np.float64).eps, np.finfo(X.dtype).eps ** 2)
    return Spectrum(tuple(np.where(values > rounding * values[-1], values, 0.0).tolist()))


def lag_kernel(
    X: Float[np.ndarray, "tokens token_dim"],
    Y: Float[np.ndarray, "targets target_dim"] | None,
    n_lags: int,
) -> LagKernel:
    """The lag kernel of one running text: regress y_t on its last ``n_lags`` token vectors.

    Without targets (``Y=None``) y_t is the next token vector x_{t+1}. Means are taken out (an
    intercept). Directions in which the tokens do not vary get the minimum-norm answer, zero.
    """
    inputs = _varying("token vectors", X)
    if Y is None:
        inputs, targets = inputs[:-1], inputs[1:]
    else:
        targets = _varying("target vectors", Y)
    if len(inputs) != len(targets):
        raise TheoryError(
            "Tokens and targets must pair up row by row;"
            f" got {len(inputs)} tokens and {len(targets)} targets; cut the longer one."
        )
    checked_count("number of lags", n_lags)
    n, d = inputs.shape
    if n - n_lags + 1 <= n_lags * d:
        raise TheoryError(
            f"{n_lags} lags of width {d} need at least {n_lags * (d + 1)} pairs of token and target"
            f" to be told apart; got {n}; give more tokens or fewer lags."
        )
    # Row t of the design is [x_t, x_{t-1}, ..., x_{t-n_lags+1}].
    design = np.hstack([inputs[n_lags - 1 - lag : n - lag] for lag in range(n_lags)])
    design = design - design.mean(axis=0)
    wanted = targets[n_lags - 1 :]
    wanted = wanted - wanted.mean(axis=0)
    solution = np.linalg.lstsq(design, wanted, rcond=None)[0]
    matrices = solution.reshape(n_lags, d, -1)
    energy = float(np.square(wanted).sum())
    residual = float(np.square(wanted - design @ solution).sum())
    return LagKernel(
        matrices=matrices,
        norms=tuple(np.linalg.norm(matrices, ord=2, axis=(1, 2)).tolist()),
        radius=float(np.linalg.norm(inputs - inputs.mean(axis=0), axis=1).max()),
        unexplained=residual / energy if energy > 0 else 0.0,
    )


def checked_count(name: str, value: int, most: int = 2**31 - 1) -> int:
    """A whole number from 1 to ``most``, or a TheoryError that names it."""
    if not isinstance(value, Integral) or not 1 <= value <= most:
        raise TheoryError(
            f"The {name} must be a whole number from 1 to {most}; got {value};"
            " choose one in this range."
        )
    return int(value)


def _varying(name: str, rows: np.ndarray) -> np.ndarray:
    """The rows in float64, refused unless there are two, all finite, and not all the same."""
    if rows.shape[0] < 2 or rows.shape[1] < 1:
        raise TheoryError(f"At least 2 {name} are needed; got shape {rows.shape}; give more text.")
    if not np.isfinite(rows).all():
        raise TheoryError(
            f"The {name} must be finite; got {int((~np.isfinite(rows)).sum())} NaN or infinite"
            " entries; check the model that made them."
        )
    if (rows == rows[0]).all():
        raise TheoryError(
            f"The {name} must differ; got {len(rows)} equal rows, which have no spread to measure;"
            " give more varied text."
        )
    return rows.astype(np.float64)


def _glance(values: Sequence[float]) -> str:
    """A few values for an error message; a spectrum may have thousands."""
    shown = ", ".join(str(value) for value in values[:4])
    return f"({shown}{', ...' if len(values) > 4 else ''})"
