"""Any plan in the source's own stock class: what was cut is filled with zeros.

The logits are equal and nothing is saved. It is for tools that support only the stock family, and
for their file formats.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional

from headwise.errors import HeadwiseError
from headwise.exporting.layout import HeadShape, laid_out
from headwise.exporting.parts import in_numbers
from headwise.exporting.reading import LayerTensors, Reader, Tensors
from headwise.models.backbones_headwise import (
    Projection,
    Projections,
    layer_projections,
    rotary_planes,
    stock_attentions,
)
from headwise.models.configuration_headwise import Layer
from headwise.models.shapes import empty_model
from headwise.planning.targets import target_of


class PaddedForm:
    """A plan zero-padded to the shape of its stock model."""

    def __init__(self, reader: Reader, dtype: torch.dtype) -> None:
        self.reader, self.dtype = reader, dtype
        plan = reader.source.plan
        answer = target_of("padded").runs(plan)
        if not answer.yes:
            raise HeadwiseError(
                f"{reader.source.name} cannot be padded to a stock model: {answer.why_not}."
            )
        self._stock: Any = empty_model(self.config, reader.task)
        owners = list(stock_attentions(self._stock))
        self._owner = owners[0][0]
        self._scales = [float(attention.scaling) for _, attention in owners]
        self._planes = rotary_planes(self._stock)

    @property
    def architecture(self) -> str:
        """The stock model type."""
        return self.reader.config.model_type

    @cached_property
    def config(self) -> Any:
        """The source's own stock config."""
        config = copy.deepcopy(self.reader.config)
        config.dtype = self.dtype
        made = empty_model(config, self.reader.task)
        config.architectures = [type(made).__name__]
        return config

    def around(self) -> Tensors:
        """Everything outside the layers."""
        return in_numbers(dict(self.reader.around()), self.dtype)

    def layer(self, i: int) -> Tensors:
        """The tensors of one stock layer, by their names in the stock model."""
        read, shape = self.reader.layer(i), self.reader.source.plan.shape
        free = shape.qk_dim - 2 * self._planes
        heads = HeadShape(
            tuple(range(self._planes)), free, shape.vo_dim, shape.queries, self._scales[i]
        )
        self._refuse_scaled_norms(read, heads)
        groups = places(read.layer)
        padded = laid_out(read.layer, read.weights, heads, groups, shape.n_kv_heads)
        made = dict(read.rest) | self._padded_mlp(read.rest)
        tensors = padded.tensors()
        for own, name, index in self._index:
            if name not in made:
                stock = self._owner.get_parameter(name)
                made[name] = torch.zeros(stock.shape, dtype=padded["output"].weight.dtype)
            if own in tensors:
                made[name].view(-1)[index.reshape(-1)] = tensors[own].reshape(-1)
        start = f"{self.reader.layer_prefix}{i}."
        return in_numbers({start + n: t.contiguous() for n, t in made.items()}, self.dtype)

    def _padded_mlp(self, rest: Tensors) -> Tensors:
        """The MLP filled with zero neurons up to the stock width."""
        mlp = self.reader.family.mlp
        own = mlp.read(rest)
        missing = self.reader.source.plan.shape.ffn_dim - own["down"].weight.shape[1]
        made = {}
        for side, one in own.items():
            if side == "down":
                made[side] = Projection(functional.pad(one.weight, (0, missing)), one.bias)
            else:
                bias = None if one.bias is None else functional.pad(one.bias, (0, missing))
                made[side] = Projection(functional.pad(one.weight, (0, 0, 0, missing)), bias)
        return mlp.written(Projections(made)) if missing else {}

    @cached_property
    def _index(self) -> list[tuple[str, str, torch.Tensor]]:
        """The stock tensor and index of each entry of a projection.

        Found by the family's own reader, applied to a layer whose weights are their own indices.
        """
        owner = copy.deepcopy(self._owner)
        names, start = [], 0
        for name, parameter in list(owner.named_parameters()):
            count = parameter.numel()
            numbered = torch.arange(start, start + count).view(parameter.shape)
            parent, _, last = name.rpartition(".")
            module = owner.get_submodule(parent)
            setattr(module, last, torch.nn.Parameter(numbered, requires_grad=False))
            names.append((start, start + count, name))
            start += count
        found = []
        for own, numbered in layer_projections(owner, self.config).tensors().items():
            first = int(numbered.min())
            begin, _, name = next(n for n in names if n[0] <= first < n[1])
            found.append((own, name, numbered - begin))
        return found

    def _refuse_scaled_norms(self, read: LayerTensors, heads: HeadShape) -> None:
        """A norm after the queries' projection would undo a scale folded into it."""
        scales = {h.score_scale for h in read.layer.heads}
        if self.reader.family.norm and any(abs(s / heads.score_scale - 1) > 1e-9 for s in scales):
            raise HeadwiseError(
                f"{self.reader.source.name} has heads with different score scales after normed "
                "queries, which its stock class does not support; it cannot be padded."
            )


def places(layer: Layer) -> list[int]:
    """The places of a layer's head groups in the stock model."""
    return list(range(len(layer.heads)))
