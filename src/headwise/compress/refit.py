"""The output projection refitted after the cut: a ridge regression towards the folded weights.

With the kept directions fixed, the best W_O for all heads together gives what is wanted (Y, see
`layer_refit`) from the cut layer's concatenated z:

    minimise  ‖Y − z·Wᵀ‖²  +  ridge · Σ_j ‖z_j‖² · ‖W_j − W_folded,j‖²

The pull towards the folded weights keeps directions that the text hardly used where they were; it
is measured in each direction's own energy, for they differ by orders of magnitude. How strong it
should be depends on how much text there is (measured on SmolLM2: ridge 1 is best with 16k tokens,
0.1 with 49k), so it is chosen on batches the sums do not contain. A bias, where the layer has one,
is one more column (a constant 1 beside z).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

RIDGES = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass
class OutputRegression:
    """Sums over tokens, so that no token has to be kept."""

    with_bias: bool
    gram: Tensor | None = field(default=None)  # zᵀz
    cross: Tensor | None = field(default=None)  # zᵀY
    power: float = 0.0  # ‖Y‖²

    def add(
        self,
        z: Float[Tensor, "*tokens width"],
        y: Float[Tensor, "*tokens d_model"],
        weight: Float[Tensor, "*tokens 1"] | None = None,
    ) -> None:
        """Take in some tokens; a weight multiplies a token's error."""
        z, y = z.flatten(0, -2).double(), y.flatten(0, -2).double()
        if self.with_bias:
            z = torch.cat([z, torch.ones_like(z[:, :1])], 1)
        if weight is not None:
            z, y = (x * weight.flatten(0, -2).double() for x in (z, y))
        gram, cross = z.mT @ z, z.mT @ y
        self.gram = gram if self.gram is None else self.gram + gram
        self.cross = cross if self.cross is None else self.cross + cross
        self.power += float(y.square().sum())

    def __add__(self, other: OutputRegression) -> OutputRegression:
        """The sums over the tokens of both."""
        if self.gram is None or other.gram is None:
            return other if self.gram is None else self
        assert self.cross is not None
        assert other.cross is not None
        return OutputRegression(
            self.with_bias,
            self.gram + other.gram,
            self.cross + other.cross,
            self.power + other.power,
        )

    def solution(
        self, weight: Float[Tensor, "d_model width"], bias: Tensor | None, ridge: float
    ) -> tuple[Tensor, Tensor | None]:
        """The refitted weight and bias, in the number format of the given ones."""
        assert self.gram is not None
        assert self.cross is not None
        start = self._start(weight, bias)
        energy = self.gram.diagonal()
        # A direction that never occurred stays where it was.
        pull = ridge * energy + (1e-12 * energy.mean()).clamp_min(1e-30)
        change = torch.linalg.solve(self.gram + torch.diag(pull), self.cross - self.gram @ start)
        best = start + change
        if bias is None:
            return best.mT.to(weight.dtype), None
        return best[:-1].mT.to(weight.dtype), best[-1].to(bias.dtype)

    def error(self, weight: Float[Tensor, "d_model width"], bias: Tensor | None) -> float:
        """Squared error of these weights over the tokens taken in, as a share of ‖Y‖²."""
        if self.gram is None or self.cross is None or not self.power:
            return 0.0
        W = self._start(weight, bias)
        squared = (
            self.power - 2 * float((W * self.cross).sum()) + float((W * (self.gram @ W)).sum())
        )
        return max(0.0, squared) / self.power

    def _start(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert (bias is not None) == self.with_bias
        columns = weight.double().mT
        return columns if bias is None else torch.cat([columns, bias.double()[None]])


def chosen_ridge(
    used: OutputRegression,
    kept_aside: OutputRegression,
    start: tuple[Tensor, Tensor | None],
    ridges: Sequence[float] = RIDGES,
) -> float:
    """The ridge whose solution on `used` has the least error on the tokens kept aside."""
    errors = {r: kept_aside.error(*used.solution(*start, r)) for r in ridges}
    return min(errors, key=lambda r: errors[r])
