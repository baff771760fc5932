"""The elementwise functions of the nonlinear n-gram task, with their Gaussian moments.

For z ~ N(0, 1) the best affine guess of σ(z) from z is mean + slope·z with slope = E[z·σ(z)], and
what it leaves is E σ² − mean² − slope². With all three moments in closed form, so is the score
that no linear model can beat.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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
