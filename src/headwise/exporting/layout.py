"""Ragged heads in the layout of an engine with one head width.

    ours      [ first halves of its planes | second halves | position-free ]     per head
    theirs    [ first halves of all slots  | second halves ]                     one width

An engine's head has *slots*, each two columns wide: a rotary plane, or a pair of position-free
columns (a plane that is not rotated). A head's planes go to their slots, and missing columns are
zero, which changes neither scores nor outputs. The engine divides scores by √width, so
each head's own scale is folded into its queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headwise.errors import HeadwiseError
from headwise.models.backbones_headwise import Projection, Projections
from headwise.models.configuration_headwise import Head, Layer


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The one shape that all heads of an engine's layer have.

    `planes` are the source's rotary planes in slot order; then come `free` position-free columns:
    in their own slots (`free_in_slots`), or after all rotated columns.
    """

    planes: tuple[int, ...]
    free: int
    vo_dim: int
    queries: int
    scale: float | None = None  # what the engine multiplies scores with; None: 1/√qk_dim
    free_in_slots: bool = False

    @property
    def qk_dim(self) -> int:
        """The width of queries and keys."""
        return 2 * len(self.planes) + self.free

    @property
    def score_scale(self) -> float:
        """The factor by which the engine multiplies scores."""
        return self.qk_dim**-0.5 if self.scale is None else self.scale

    @property
    def slots(self) -> tuple[int | None, ...]:
        """The plane of each slot, None for a position-free one."""
        more = (None,) * (self.free // 2) if self.free_in_slots else ()
        return (*self.planes, *more)

    def columns(self, head: Head) -> list[int]:
        """Where each of a head's query-key columns goes."""
        half = len(self.slots)
        place = {plane: slot for slot, plane in enumerate(self.planes)}
        missing = [p for p in head.rotary_planes if p not in place]
        free = head.qk_dim - 2 * len(head.rotary_planes)
        if missing or free > self.free:
            what = f"rotary plane {missing[0]}" if missing else f"{free} position-free columns"
            raise HeadwiseError(f"a head has {what}, which this target does not support.")
        turned = [place[p] for p in head.rotary_planes]
        if self.free_in_slots:
            first = len(self.planes)
            still = [c for k in range(self.free // 2) for c in (first + k, half + first + k)]
        else:
            still = list(range(2 * half, 2 * half + self.free))
        return [*turned, *(half + t for t in turned), *still[:free]]


def laid_out(
    layer: Layer,
    weights: Projections,
    shape: HeadShape | Sequence[HeadShape],
    groups: Sequence[int],
    n_groups: int,
) -> Projections:
    """The projections of a layer with `n_groups` heads of one shape.

    `groups[j]` is the place of head group j; places without a group are zero. If the engine allows
    different planes per head, there is one shape per head, and they differ only in the planes.
    """
    shapes = [shape] * len(layer.heads) if isinstance(shape, HeadShape) else shape
    shape = shapes[0] if shapes else HeadShape((), 0, 0, 1)
    heads = list(zip(groups, layer.heads, shapes, strict=True))
    made = {}
    for side, projection in weights.items():
        scores, shared = side in ("query", "key"), side in ("key", "value")
        width = shape.qk_dim if scores else shape.vo_dim
        places: list[int] = []
        factors: list[float] = []
        for group, head, own in heads:
            columns = own.columns(head) if scores else range(head.vo_dim)
            factor = head.score_scale / shape.score_scale if side == "query" else 1.0
            for c in range(1 if shared else head.queries):
                start = (group * (1 if shared else shape.queries) + c) * width
                places += [start + column for column in columns]
                factors += [factor] * len(columns)
        count = n_groups * width * (1 if shared else shape.queries)
        made[side] = _placed(side, projection, places, factors, count)
    return Projections(made)


def _placed(
    side: str, own: Projection, places: list[int], factors: list[float], count: int
) -> Projection:
    """Rows (of the output projection: columns) at their places among `count`, the rest zero."""
    index = torch.tensor(places, dtype=torch.long)
    if side == "output":
        wide = own.weight.new_zeros(own.weight.shape[0], count)
        wide[:, index] = own.weight
        return Projection(wide, own.bias)
    scale = torch.tensor(factors, dtype=torch.float64)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.new_zeros(count, *tensor.shape[1:])
        made[index] = _scaled(tensor, scale.view(-1, *[1] * (tensor.ndim - 1)))
        return made

    return own.map(rows)


def _scaled(tensor: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Rounded once; factors of 1 change no bit."""
    if not factor.numel() or bool(((factor - 1).abs() < 1e-9).all()):
        return tensor
    return (tensor.double() * factor).to(tensor.dtype)
