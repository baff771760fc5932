"""The output projection of a cut layer refitted: a ridge regression towards the folded weights.

With the kept directions fixed, the best W_O for all heads together gives what is wanted (Y) from
the cut layer's concatenated z:

    minimise  ‖Y − z·Wᵀ‖²  +  ridge · Σ_j ‖z_j‖² · ‖W_j − W_folded,j‖²

The pull towards the folded weights keeps directions that the text hardly used where they were; it
is measured in each direction's own energy, for they differ by orders of magnitude. How strong it
should be depends on how much text there is, so it is chosen on batches the sums do not contain. A
bias, where the layer has one, is one more column (a constant 1 beside z).

There are two aims:

    attention   what the dense attention gave
    state       that, and what the layers before have lost: h_dense + attended − h_cut

Tokens count in inverse proportion to their state's squared norm, as in `log1p_relative_error`;
without that the few very long ones decide alone. Whether W_O can reach the state depends on the
family, for a norm may lie between: the layer itself is asked, on the batches held aside. Where
there are none, the aim is the attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.cutting.layer_task import LayerTask, output_projection_input, squared_norm
from headwise.models.backbones_headwise import Weights
from headwise.records import Frozen

Aim = Literal["attention", "state"]

RIDGES = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
FEW_TOKENS_RIDGE = 1.0  # where no batch can be held aside to choose it


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


def best_ridge(
    used: OutputRegression,
    held_aside: OutputRegression,
    start: tuple[Tensor, Tensor | None],
    ridges: Sequence[float] = RIDGES,
) -> float:
    """The ridge whose solution on `used` has the least error on the tokens held aside."""
    errors = {r: held_aside.error(*used.solution(*start, r)) for r in ridges}
    return min(errors, key=lambda r: errors[r])


@dataclass(frozen=True, slots=True)
class AimSums:
    """The sums of one aim, over the batches that are used and over those held aside."""

    used: OutputRegression
    held_aside: OutputRegression

    @property
    def all(self) -> OutputRegression:
        """Over all batches."""
        return self.used + self.held_aside

    def ridge(self, start: tuple[Tensor, Tensor | None]) -> float:
        """The ridge that serves the batches held aside."""
        if not self.held_aside.power:
            return FEW_TOKENS_RIDGE
        return best_ridge(self.used, self.held_aside, start)


class RefitRecord(Frozen):
    """How W_O was refitted; no error if no batch was held aside."""

    aim: Aim
    ridge: float
    unseen_error: float | None


@torch.no_grad()
def regressions(task: LayerTask, start: Weights) -> dict[Aim, AimSums]:
    """The sums of both aims."""
    with_bias = "output" in start[1]
    aims: tuple[Aim, ...] = ("attention", "state")
    found = {aim: AimSums(OutputRegression(with_bias), OutputRegression(with_bias)) for aim in aims}
    layer, batches = task.layer(start), task.batches
    for b, hidden in enumerate(batches.inputs):
        z = output_projection_input(task, layer, b)
        state = batches.dense_inputs[b] + batches.attended[b]
        weight = squared_norm(state).rsqrt()[..., None]
        for aim, y in zip(aims, (batches.attended[b], state - hidden), strict=True):
            sums = found[aim].held_aside if b in batches.held_aside else found[aim].used
            sums.add(z, y, weight)
    return found


def refit_output(
    task: LayerTask, start: Weights, sums: dict[Aim, AimSums], ridge: float | None = None
) -> tuple[Weights, RefitRecord]:
    """The weights with the W_O that serves best; a `ridge` of None is chosen."""
    candidates = []
    for aim, regression in sums.items():
        pull = regression.ridge(output_weights(start)) if ridge is None else ridge
        W_O, b_O = regression.all.solution(*output_weights(start), pull)
        biases = start[1] if b_O is None else start[1] | {"output": b_O}
        weights = {**start[0], "output": W_O}, biases
        error = task.error(weights) if task.batches.held_aside else None
        candidates.append((weights, RefitRecord(aim=aim, ridge=pull, unseen_error=error)))
        if error is None:
            break
    return min(candidates, key=lambda c: c[1].unseen_error or 0.0)


def output_weights(weights: Weights) -> tuple[Tensor, Tensor | None]:
    """W_O and its bias."""
    return weights[0]["output"], weights[1].get("output")
