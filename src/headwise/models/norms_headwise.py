"""Query and key norms over the columns that a cut keeps.

    stock    n_j = x_j · w_j / √(mean of all x² + ε)
    here     n_j = x_j · w_j / √(share · mean of the kept x² + rest)

The dropped columns are no longer there to be squared, so their part of the mean is estimated from
the kept ones: `share` and `rest` are two numbers per norm. With share = kept ÷ all and rest = ε it
is the stock norm of heads whose dropped columns are zero; a cut fits both to text. The weights w
stay those of the stock model, each head taking those of its own columns.
This file travels with checkpoints: it needs torch and transformers only.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .configuration_headwise import Head, Layer

FITTED = ("share", "rest")  # what a cut fits, besides the weights of the stock norm


def stock_columns(head: Head, planes: int, width: int) -> tuple[int, ...]:
    """Which columns of a stock head, `width` wide, a head has in its queries and keys."""
    if head.qk_dim == width and len(head.rotary_planes) == planes:
        return tuple(range(width))
    return (*head.rotary_planes, *(planes + p for p in head.rotary_planes))


def normed_columns(
    layer: Layer, side: str, *, planes: int, width: int, together: bool
) -> tuple[tuple[int, ...], ...]:
    """The columns of the stock projection that each norm of a layer is over.

    One norm per query or key head, or one for all heads `together`.
    """
    found = []
    for head in layer.heads:
        times = head.queries if side == "query" else 1
        for i in range(times):
            first = (head.source * times + i) * width
            found.append(tuple(first + c for c in stock_columns(head, planes, width)))
    return (tuple(itertools.chain.from_iterable(found)),) if together else tuple(found)


def epsilon(norm: Any) -> float:
    """What a stock norm adds to the mean of the squares."""
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def keeps_all(columns: Sequence[Sequence[int]], size: int) -> bool:
    """Whether every norm is over all the columns of the stock norm, in order."""
    return all(tuple(c % size for c in some) == tuple(range(size)) for some in columns)


class KeptNorm(nn.Module):
    """In place of a stock norm, where heads keep some of its columns."""

    share: torch.Tensor
    rest: torch.Tensor

    def __init__(self, stock: Any, columns: Sequence[Sequence[int]], offset: float) -> None:
        super().__init__()
        self.weight = stock.weight
        self.offset = offset  # a Gemma's weights are stored less one
        width = stock.weight.shape[0]
        runs = [(n, len(list(run))) for n, run in itertools.groupby(len(c) for c in columns)]
        self.runs = [(count, kept) for kept, count in runs]
        self.index = tuple(c % width for c in itertools.chain.from_iterable(columns))
        self.width = width
        self.eps = epsilon(stock)
        self.register_buffer("share", self.zeroed_share)
        self.register_buffer("rest", torch.full((len(columns),), self.eps))
        # Not a buffer: weights are loaded on the meta device, which would lose its content.
        self._places: dict[torch.device, torch.Tensor] = {}

    @property
    def zeroed_share(self) -> torch.Tensor:
        """Of every norm, the share of its columns that is kept: right if the rest were zero."""
        return torch.tensor([k / self.width for count, k in self.runs for _ in range(count)])

    def extra_repr(self) -> str:
        """The norms, in a printed model."""
        return ", ".join(f"{count} × {kept}" for count, kept in self.runs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(…, all kept columns side by side), each head or all together normed."""
        index = self._places.get(x.device)
        if index is None:
            index = torch.tensor(self.index, device=x.device)
            self._places[x.device] = index
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        counts = [count for count, _ in self.runs]
        parts = zip(
            exact.split([count * kept for count, kept in self.runs], -1),
            self.share.split(counts),
            self.rest.split(counts),
            counts,
            strict=True,
        )
        normed = [_normed(part.unflatten(-1, (n, -1)), s, r) for part, s, r, n in parts]
        made = normed[0] if len(normed) == 1 else torch.cat(normed, -1)
        return (made * (self.offset + self.weight.to(exact.dtype))[index]).to(x.dtype)


def _normed(x: torch.Tensor, share: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    square = x.square().mean(-1) * share + rest
    return (x * square.rsqrt().unsqueeze(-1)).flatten(-2)
