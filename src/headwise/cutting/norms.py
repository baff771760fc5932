"""Query and key norms over kept planes, fitted to the norms over all of them.

A stock norm divides a head by the root of T, the mean of all its squares. Of a cut head only S, the
mean of the kept squares, is there, so T is estimated as share · S + rest. Both numbers are fitted
for every head, so that the normed numbers of the kept planes are those of the dense model:

    minimise  Σ_t S_t · (T_t^-½ − (share · S_t + rest)^-½)²        over the tokens t

For every ratio rest ÷ share the best scale has a closed form; the ratio is tried on a grid.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.models.attention_headwise import NORMS, HeadwiseAttention
from headwise.models.configuration_headwise import planned_layers
from headwise.models.norms_headwise import epsilon, keeps_all, normed_columns
from headwise.plan import LayerPlan

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
        """Take in some tokens, as they enter the dense norms."""
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
    """While open, what the dense layer runs on is taken in, for the norms that `plan` cuts."""
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
