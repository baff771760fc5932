"""The refit of a cut layer: W_O and W_down by ridge regression, and query and key norms.

With the kept directions fixed, the best W_O for all heads together predicts the target Y from the
cut layer's concatenated z:

    minimise  ‖Y − z·Wᵀ‖²  +  ridge · Σ_j ‖z_j‖² · ‖W_j − W_folded,j‖²

The pull towards the folded weights keeps directions that the text hardly used where they were. It
is scaled by each direction's own energy, because energies differ by orders of magnitude. Its best
strength depends on the amount of text, so it is chosen on batches the sums do not contain. A
bias, where the layer has one, is one more column (a constant 1 next to z).

There are two targets ("aims"):

    attention   the output of the dense attention
    state       that, plus the error of the earlier layers: h_dense + attended − h_cut

Tokens are weighted by the inverse of their state's squared norm, as in `log1p_relative_error`;
without that the few very long ones dominate. Whether W_O can reach the state depends on the family,
because a norm may lie between, so the layer's own error on the batches held aside decides. Without
such batches the aim is the attention.

W_down is refitted in the same way, from the kept neurons: to the dense MLP's output, or to the
dense state after it, given the cut attention's output. Its sums are as wide as the MLP, so their
products are taken in float32, and added in float64.

Query and key norms over kept planes are fitted to the norms over all of them.
A stock norm divides a head by the root of T, the mean of all its squares. A cut head has only S,
the mean of the kept squares, so T is estimated as share · S + rest. Both numbers are fitted
for every head, so that the normed values of the kept planes match the dense model's:

    minimise  Σ_t S_t · (T_t^-½ − (share · S_t + rest)^-½)²        over the tokens t

For every ratio rest ÷ share the best scale has a closed form; the ratio is tried on a grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.cutting.layer_fit import (
    LayerTask,
    down_projection_input,
    output_projection_input,
    squared_norm,
)
from headwise.models.attention_headwise import NORMS, HeadwiseAttention
from headwise.models.backbones_headwise import Projection, Projections
from headwise.models.configuration_headwise import planned_layers
from headwise.models.norms_headwise import epsilon, keeps_all, normed_columns
from headwise.plan import LayerPlan
from headwise.records import Frozen

# mypy: disable-error-code="no-untyped-call"


RATIOS = (0.0, *(10 ** (e / 4) for e in range(-12, 9)))  # rest ÷ share, in mean kept squares


@dataclass
class NormRegression:
    """The mean squares of every token, for the norms of one side: two numbers per token."""

    columns: Sequence[Sequence[int]]  # of the dense projection, that each norm keeps
    size: int  # columns that each dense norm is over
    eps: float
    full: list[Tensor] = field(default_factory=list)  # tokens × norms
    kept: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor) -> None:
        """Add some tokens, as they enter the dense norms."""
        squares = x.reshape(-1, x[0, 0].numel()).float().square()
        means = squares.unflatten(-1, (-1, self.size)).mean(-1) + self.eps
        self.full.append(torch.stack([means[:, c[0] // self.size] for c in self.columns], 1))
        self.kept.append(torch.stack([squares[:, list(c)].mean(-1) for c in self.columns], 1))

    def solution(self) -> tuple[Tensor, Tensor]:
        """The share and the rest of every norm."""
        full, kept = (torch.cat(parts).double() for parts in (self.full, self.kept))
        wanted = full.rsqrt()
        best = torch.full(kept.shape[1:], torch.inf, dtype=torch.float64)
        shares = torch.tensor([len(c) / self.size for c in self.columns], dtype=torch.float64)
        rests = torch.full_like(shares, self.eps)  # of heads that are always zero
        for ratio in RATIOS:
            added = (ratio * kept.mean(0)).clamp_min(self.eps)
            found = (kept + added).rsqrt()
            scale = (kept * wanted * found).sum(0) / (kept * found.square()).sum(0)
            error = (kept * (wanted - scale * found).square()).sum(0)
            better = (error < best) & (scale > 0)
            best = torch.where(better, error, best)
            shares = torch.where(better, scale**-2, shares)
            rests = torch.where(better, added * scale**-2, rests)
        whole = torch.tensor([len(c) == self.size for c in self.columns])  # nothing is missing
        shares = torch.where(whole, 1.0, shares)
        rests = torch.where(whole, self.eps, rests)
        return shares.float(), rests.float()


@contextmanager
def norm_regressions(
    dense: HeadwiseAttention, plan: LayerPlan, *, planes: int
) -> Iterator[dict[str, NormRegression]]:
    """While open, collect the inputs of the dense layer, for the norms that `plan` cuts."""
    found: dict[str, NormRegression] = {}
    with ExitStack() as undo:
        for side, name in NORMS.items():
            norm: Any = getattr(dense, name, None)
            if norm is None or not plan.heads:
                continue
            (layer,) = planned_layers({"layers": [plan.to_dict()]})
            size, width = norm.weight.shape[0], dense.classes[0].qk_dim
            columns = normed_columns(
                layer, side, planes=planes, width=width, together=dense.norm_over == "all"
            )
            if keeps_all(columns, size):
                continue
            sums = NormRegression(columns, size, epsilon(norm))
            found[side] = sums
            hook = norm.register_forward_pre_hook(lambda m, args, s=sums: s.add(args[0]))
            undo.callback(hook.remove)
        yield found


def fitted_norms(regressions: dict[str, NormRegression]) -> dict[str, Tensor]:
    """What `Projections.norms` holds."""
    made = {}
    for side, regression in regressions.items():
        made[f"{side}.share"], made[f"{side}.rest"] = regression.solution()
    return made


Aim = Literal["attention", "mlp", "state"]
Side = Literal["output", "down"]

RIDGES = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
DOWN_RIDGES = (0.01, 0.1, 1.0, 10.0)  # a solve costs the cube of the MLP's width
FEW_TOKENS_RIDGE = 1.0  # where no batch can be held aside to choose it


@dataclass
class OutputRegression:
    """Sums over tokens; the tokens themselves are not kept."""

    with_bias: bool
    gram: Tensor | None = field(default=None)  # zᵀz
    cross: Tensor | None = field(default=None)  # zᵀY
    squares: Tensor | None = field(default=None)  # ‖Y‖² of each column
    product: torch.dtype = torch.float64  # number format of the products that are summed

    @property
    def power(self) -> float:
        """‖Y‖²; 0 before any token was added."""
        return 0.0 if self.squares is None else float(self.squares.sum())

    def add(
        self,
        z: Float[Tensor, "*tokens width"],
        y: Float[Tensor, "*tokens d_model"],
        weight: Float[Tensor, "*tokens 1"] | None = None,
    ) -> None:
        """Add some tokens; a weight multiplies a token's error."""
        z, y = (x.flatten(0, -2).to(self.product) for x in (z, y))
        if self.with_bias:
            z = torch.cat([z, z.new_ones(len(z), 1)], 1)
        if weight is not None:
            z, y = (x * weight.flatten(0, -2).to(self.product) for x in (z, y))
        more = tuple(x.double() for x in (z.mT @ z, z.mT @ y, y.square().sum(0)))
        if self.gram is None or self.cross is None or self.squares is None:
            self.gram, self.cross, self.squares = more
        else:
            for sums, new in zip((self.gram, self.cross, self.squares), more, strict=True):
                sums.add_(new)

    def __add__(self, other: OutputRegression) -> OutputRegression:
        """The sums over the tokens of both."""
        if self.gram is None or other.gram is None:
            return other if self.gram is None else self
        assert self.cross is not None
        assert other.cross is not None
        assert self.squares is not None
        assert other.squares is not None
        return OutputRegression(
            self.with_bias,
            self.gram + other.gram,
            self.cross + other.cross,
            self.squares + other.squares,
            self.product,
        )

    def of_columns(self, start: int, stop: int) -> OutputRegression:
        """The regression on some of the columns of Y; it shares the sums of z."""
        if self.gram is None or self.cross is None or self.squares is None:
            return OutputRegression(self.with_bias)
        cross, squares = self.cross[:, start:stop], self.squares[start:stop]
        return OutputRegression(self.with_bias, self.gram, cross, squares)

    def solution(self, folded: Projection, ridge: float) -> Projection:
        """The refitted output projection, in the number format of the folded one."""
        assert self.gram is not None
        assert self.cross is not None
        start = self._columns(folded)
        energy = self.gram.diagonal()
        # A direction that never occurred stays where it was.
        pull = ridge * energy + (1e-12 * energy.mean()).clamp_min(1e-30)
        change = torch.linalg.solve(self.gram + torch.diag(pull), self.cross - self.gram @ start)
        best = start + change
        dtype = folded.weight.dtype
        if folded.bias is None:
            return Projection(best.mT.to(dtype))
        return Projection(best[:-1].mT.to(dtype), best[-1].to(folded.bias.dtype))

    def error(self, output: Projection) -> float:
        """Squared error of an output projection on the added tokens, as a share of ‖Y‖²."""
        if self.gram is None or self.cross is None or not self.power:
            return 0.0
        W = self._columns(output)
        squared = (
            self.power - 2 * float((W * self.cross).sum()) + float((W * (self.gram @ W)).sum())
        )
        return max(0.0, squared) / self.power

    def _columns(self, output: Projection) -> Float[Tensor, "inputs d_model"]:
        """Wᵀ, the bias as a last row."""
        assert (output.bias is not None) == self.with_bias
        columns = output.weight.double().mT
        if output.bias is None:
            return columns
        return torch.cat([columns, output.bias.double()[None]])


def best_ridge(
    used: OutputRegression,
    held_aside: OutputRegression,
    folded: Projection,
    ridges: Sequence[float] = RIDGES,
) -> float:
    """The ridge whose solution on `used` has the smallest error on the tokens held aside."""
    errors = {r: held_aside.error(used.solution(folded, r)) for r in ridges}
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

    def ridge(self, folded: Projection, ridges: Sequence[float] = RIDGES) -> float:
        """The best ridge on the batches held aside."""
        if not self.held_aside.power:
            return FEW_TOKENS_RIDGE
        return best_ridge(self.used, self.held_aside, folded, ridges)


class RefitRecord(Frozen):
    """How W_O or W_down was refitted; no error if no batch was held aside."""

    aim: Aim
    ridge: float
    unseen_error: float | None


@torch.no_grad()
def regressions(task: LayerTask, start: Projections) -> dict[Aim, AimSums]:
    """The sums of both aims of W_O."""
    layer, batches = task.layer(start), task.batches

    def each() -> Iterator[_Tokens]:
        for b, hidden in enumerate(batches.inputs):
            z = output_projection_input(task, layer, b)
            state = batches.dense_inputs[b] + batches.attended[b]
            yield _Tokens(z, batches.attended[b], state - hidden, state)

    return _both_aims(task, "attention", OutputRegression(start.has_bias("output")), each())


@torch.no_grad()
def down_regressions(task: LayerTask, start: Projections) -> dict[Aim, AimSums]:
    """The sums of both aims of W_down, given the cut attention's output."""
    layer, batches = task.layer(start), task.batches

    def each() -> Iterator[_Tokens]:
        for b, hidden in enumerate(batches.inputs):
            neurons, attended = down_projection_input(task, layer, b)
            state = batches.dense_inputs[b] + batches.attended[b] + batches.mlp[b]
            yield _Tokens(neurons, batches.mlp[b], state - hidden - attended, state)

    empty = OutputRegression(start.has_bias("down"), product=torch.float32)
    return _both_aims(task, "mlp", empty, each())


@dataclass(frozen=True, slots=True)
class _Tokens:
    """One batch: the projection's input, both aims, and the state that weights the tokens."""

    z: Tensor
    own: Tensor
    wanted: Tensor
    state: Tensor


def _both_aims(
    task: LayerTask, own: Aim, empty: OutputRegression, each: Iterator[_Tokens]
) -> dict[Aim, AimSums]:
    """The sums of both aims, computed together: the targets differ, z is the same."""
    used, held_aside = replace(empty), replace(empty)
    for b, tokens in enumerate(each):
        sums = held_aside if b in task.batches.held_aside else used
        both = torch.cat([tokens.own, tokens.wanted], -1)
        sums.add(tokens.z, both, squared_norm(tokens.state).rsqrt()[..., None])
    d = task.batches.inputs[0].shape[-1]
    aims: tuple[Aim, ...] = (own, "state")
    return {
        aim: AimSums(*(sums.of_columns(i * d, (i + 1) * d) for sums in (used, held_aside)))
        for i, aim in enumerate(aims)
    }


def refit_output(
    task: LayerTask,
    start: Projections,
    sums: dict[Aim, AimSums],
    ridge: float | None = None,
    side: Side = "output",
) -> tuple[Projections, RefitRecord]:
    """The projections with the best W_O, or W_down; a `ridge` of None is chosen."""
    candidates = []
    ridges = RIDGES if side == "output" else DOWN_RIDGES
    for aim, regression in sums.items():
        pull = regression.ridge(start[side], ridges) if ridge is None else ridge
        made = start.replaced(**{side: regression.all.solution(start[side], pull)})
        error = task.error(made) if task.batches.held_aside else None
        candidates.append((made, RefitRecord(aim=aim, ridge=pull, unseen_error=error)))
        if error is None:
            break
    return min(candidates, key=lambda c: c[1].unseen_error or 0.0)
