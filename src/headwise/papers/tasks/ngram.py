"""n-gram regression on white noise: y_t = Σ_{i<n} ρ_i·σ(x_{t−i}) (arXiv 2510.03784).

    x   ... x_{t−3}  x_{t−2}  x_{t−1}  x_t        independent N(0, 1), `width` numbers per token
             │ρ_3     │ρ_2     │ρ_1     │ρ_0      a number or an outputs × width matrix per lag
             └────────┴────┬───┴────────┘
                          y_t

σ = identity is the paper's linear task. The nonlinear task applies an elementwise σ to every token
before the sum: the layer must still gather the same lags, but a linear value path leaves an error
that is known exactly (`affine_error`; attention that depends on the tokens is not linear and can
get a little below it). For z ~ N(0, 1) the best affine guess of σ(z) is mean + slope·z with
slope = E[z·σ(z)], and what it leaves is E σ² − mean² − slope².

A trap for experiments: when all ρ_i are positive *numbers*, one head whose attention is
proportional to ρ solves the task alone, and no trade-off between heads can appear. Matrices in
different directions (`NGram.random`) need one attention pattern per lag; `pattern_error` is the
cost of fewer patterns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.errors import did_you_mean
from headwise.papers.tasks.task import (
    SyntheticTask,
    TaskBatch,
    TaskError,
    at_least,
    generator_of,
)


@dataclass(frozen=True, slots=True)
class Activation:
    """σ, and E σ(z), E σ(z)² and E z·σ(z) for a standard normal z."""

    function: Callable[[Tensor], Tensor]
    mean: float
    second: float
    slope: float

    @property
    def variance(self) -> float:
        """What the best constant leaves of σ(z)."""
        return self.second - self.mean**2

    @property
    def curvature(self) -> float:
        """What the best affine function of z leaves of σ(z)."""
        return self.variance - self.slope**2


# sine: E sin²z = (1 − E cos 2z)/2 and E z·sin z = E cos z (Stein), with E cos az = e^(−a²/2).
ACTIVATIONS: dict[str, Activation] = {
    "linear": Activation(lambda x: x, 0.0, 1.0, 1.0),
    "relu": Activation(torch.relu, 1 / math.sqrt(2 * math.pi), 0.5, 0.5),
    "abs": Activation(torch.abs, math.sqrt(2 / math.pi), 1.0, 0.0),
    "square": Activation(torch.square, 1.0, 3.0, 0.0),
    "sine": Activation(torch.sin, 0.0, (1 - math.exp(-2)) / 2, math.exp(-0.5)),
}


Weight = float | int | tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class NGram(SyntheticTask):
    """y_t = Σ_i weights[i]·σ(x_{t−i}); scored from the first position that has its whole past."""

    length: int
    width: int
    weights: tuple[Weight, ...]
    activation: str = "linear"

    regression: ClassVar[bool] = True
    continuous: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least("a width", self.width, 1)
        at_least("a number of lags", len(self.weights), 1)
        at_least("a length (one scored position)", self.length, len(self.weights))
        if self.activation not in ACTIVATIONS:
            raise TaskError(
                f"Expected a known activation, got {self.activation!r}. "
                f"{did_you_mean(self.activation, ACTIVATIONS)}"
            )
        heights = {self.width if isinstance(w, float | int) else len(w) for w in self.weights}
        rows = {len(row) for w in self.weights if isinstance(w, tuple) for row in w}
        if len(heights) > 1 or not rows <= {self.width}:
            raise TaskError(
                f"Expected one number or one matrix with {self.width} columns per lag, all of "
                f"equal height, got heights {sorted(heights)} and row lengths {sorted(rows)}; "
                "give every lag the same shape."
            )

    @classmethod
    def random(
        cls,
        lags: int,
        width: int,
        length: int,
        *,
        activation: str = "linear",
        decay: float = 1.0,
        seed: int = 0,
    ) -> NGram:
        """Random orthogonal ρ_i that shrink by `decay` per lag; y_t has variance Var σ."""
        generator = generator_of(seed)
        powers = [decay**i for i in range(lags)]
        total = math.sqrt(math.fsum(p * p for p in powers))
        weights = []
        for power in powers:
            noise = torch.randn(width, width, dtype=torch.float64, generator=generator)
            q, r = torch.linalg.qr(noise)
            # The signs make every rotation equally likely; without them all ρ_i lean one way.
            rotation = q * r.diagonal().sign() * (power / total)
            weights.append(tuple(tuple(row) for row in rotation.tolist()))
        return cls(length, width, tuple(weights), activation)

    @classmethod
    def copying(cls, lags: int, width: int, length: int) -> NGram:
        """The first step of an induction head on vectors: the last `lags` tokens side by side."""
        identity = torch.eye(lags * width, dtype=torch.float64)
        blocks = identity.reshape(lags * width, lags, width).transpose(0, 1).tolist()
        return cls(length, width, tuple(tuple(tuple(row) for row in block) for block in blocks))

    @property
    def sigma(self) -> Activation:
        """σ with its moments."""
        return ACTIVATIONS[self.activation]

    @property
    def n_inputs(self) -> int:
        """Width of a token."""
        return self.width

    @property
    def n_outputs(self) -> int:
        """Width of y_t."""
        first = self.weights[0]
        return self.width if isinstance(first, float | int) else len(first)

    def matrices(self) -> Float[Tensor, "lags outputs width"]:
        """Every ρ_i as a matrix, in float64."""
        eye = torch.eye(self.width, dtype=torch.float64)
        return torch.stack(
            [
                eye * w if isinstance(w, float | int) else torch.tensor(w, dtype=torch.float64)
                for w in self.weights
            ]
        )

    def sample(self, n: int, seed: int | torch.Generator = 0) -> TaskBatch:
        """`n` sequences of white noise with their targets; before the start everything is 0."""
        x = torch.randn(n, self.length, self.width, generator=generator_of(seed))
        bent = self.sigma.function(x)
        y = x.new_zeros(n, self.length, self.n_outputs)
        for lag, rho in enumerate(self.matrices().to(x.dtype)):
            y[:, lag:] += bent[:, : self.length - lag] @ rho.T
        scored = (torch.arange(self.length) >= len(self.weights) - 1).expand(n, -1)
        return TaskBatch(x, y, scored)

    @property
    def energies(self) -> tuple[float, ...]:
        """‖ρ_i‖² per output coordinate: how much each lag matters."""
        squares: list[float] = self.matrices().square().sum(dim=(1, 2)).tolist()
        return tuple(s / self.n_outputs for s in squares)

    @property
    def optimum(self) -> float:
        """0: the target is a function of the input."""
        return 0.0

    @property
    def chance(self) -> float:
        """The error of the best constant, E y_t: Var σ·Σ‖ρ_i‖² per coordinate."""
        return self.sigma.variance * math.fsum(self.energies)

    @property
    def optimum_loss(self) -> float:
        """The optimum: loss and metric are the same."""
        return self.optimum

    @property
    def chance_loss(self) -> float:
        """The chance level: loss and metric are the same."""
        return self.chance

    @property
    def zero_error(self) -> float:
        """The error of predicting 0, which also lacks the mean of y_t."""
        mean = self.sigma.mean * self.matrices().sum(dim=(0, 2))
        return self.chance + float(mean.square().mean())

    def truncated_error(self, lags: int) -> float:
        """The error of the best predictor that sees only x_t … x_{t−lags+1}."""
        at_least("lags", lags, 0)
        return self.sigma.variance * math.fsum(self.energies[lags:])

    def affine_error(self, lags: int | None = None) -> float:
        """The error of the best affine predictor, which sees only `lags` lags if they are given."""
        seen = len(self.weights) if lags is None else lags
        return self.truncated_error(seen) + self.sigma.curvature * math.fsum(self.energies[:seen])

    def rank_error(self, ranks: Sequence[int]) -> float:
        """The error when lag i passes through a bottleneck of ranks[i] numbers (0 if absent).

        It is the sum of squares of the singular values of ρ_i beyond the rank, so heads that look
        at lag i with less than the token's width between them cannot do better. Linear task only.
        """
        self._linear_only("rank_error")
        values: list[list[float]] = torch.linalg.svdvals(self.matrices()).tolist()
        kept = [*ranks, *([0] * len(values))]
        tail = math.fsum(
            math.fsum(s * s for s in v[r:]) for v, r in zip(values, kept, strict=False)
        )
        return tail / self.n_outputs

    def bottleneck_error(self, width: int) -> float:
        """The least error of any predictor whose answers stay in a space of `width` dimensions.

        Heads whose vo_dims add up to less than the outputs, with no skip beside them, are such a
        predictor however they attend. The error is the sum of the smallest eigenvalues of Cov y_t.
        """
        at_least("a width", width, 0)
        rho = self.matrices()
        values: list[float] = torch.linalg.eigvalsh((rho @ rho.mT).sum(dim=0)).tolist()
        lost = math.fsum(values[: max(self.n_outputs - width, 0)])
        return self.sigma.variance * lost / self.n_outputs

    def pattern_error(self, patterns: int) -> float:
        """The least error of `patterns` heads of any width that attend by position alone.

        Head h adds Σ_i a_i^h·V_h·x_{t−i}, so the lags' matrices, flattened as rows of an
        n × (outputs·width) matrix, are approximated in rank `patterns`: the tail of its singular
        values is a floor. Attention is positive and sums to 1, so such heads may need more. Heads
        that attend by content are not linear and can get below it.
        """
        self._linear_only("pattern_error")
        at_least("patterns", patterns, 0)
        values: list[float] = torch.linalg.svdvals(self.matrices().flatten(1)).tolist()
        return math.fsum(s * s for s in values[patterns:]) / self.n_outputs

    def _linear_only(self, name: str) -> None:
        if self.activation != "linear":
            raise TaskError(
                f"Expected the linear task for {name}, got activation {self.activation!r}; use "
                "truncated_error or affine_error instead."
            )
