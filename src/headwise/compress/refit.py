"""The output projection refitted after the cut: a ridge regression towards the folded weights.

With the kept directions fixed, the best W_O for all heads together reproduces the dense layer's
attention output Y from the cut layer's concatenated z:

    minimise  ‖Y − z·Wᵀ‖²  +  ridge · mean(z²) · n · ‖W − W_folded‖²

The pull towards the folded weights keeps directions that the text hardly used where they were. A
bias, where the layer has one, is one more column (a constant 1 beside z).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass
class OutputRegression:
    """Sums over tokens, so that no token has to be kept."""

    with_bias: bool
    gram: Tensor | None = field(default=None)  # zᵀz
    cross: Tensor | None = field(default=None)  # zᵀY
    power: float = 0.0  # ‖Y‖²

    def add(self, z: Float[Tensor, "*tokens width"], y: Float[Tensor, "*tokens d_model"]) -> None:
        """Take in some tokens."""
        z, y = z.flatten(0, -2).double(), y.flatten(0, -2).double()
        if self.with_bias:
            z = torch.cat([z, torch.ones_like(z[:, :1])], 1)
        gram, cross = z.mT @ z, z.mT @ y
        self.gram = gram if self.gram is None else self.gram + gram
        self.cross = cross if self.cross is None else self.cross + cross
        self.power += float(y.square().sum())

    def solution(
        self, weight: Float[Tensor, "d_model width"], bias: Tensor | None, ridge: float
    ) -> tuple[Tensor, Tensor | None]:
        """The refitted weight and bias, in the number format of the given ones."""
        assert self.gram is not None
        assert self.cross is not None
        start = self._start(weight, bias)
        pull = ridge * self.gram.diagonal().mean().clamp_min(1e-30)
        eye = torch.eye(len(self.gram), dtype=self.gram.dtype, device=self.gram.device)
        best = torch.linalg.solve(self.gram + pull * eye, self.cross + pull * start)
        if bias is None:
            return best.mT.to(weight.dtype), None
        return best[:-1].mT.to(weight.dtype), best[-1].to(bias.dtype)

    def error(self, weight: Float[Tensor, "d_model width"], bias: Tensor | None) -> float:
        """Squared error of these weights over the tokens taken in, as a share of ‖Y‖²."""
        assert self.gram is not None
        assert self.cross is not None
        W = self._start(weight, bias)
        squared = (
            self.power - 2 * float((W * self.cross).sum()) + float((W * (self.gram @ W)).sum())
        )
        return max(0.0, squared) / self.power if self.power else 0.0

    def _start(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert (bias is not None) == self.with_bias
        columns = weight.double().mT
        return columns if bias is None else torch.cat([columns, bias.double()[None]])
