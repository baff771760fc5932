"""A source read one layer at a time: its planned projections, and everything around them.

    checkpoint ──► layer(i) ─┬─ projections   q, k, v, o in head order, as (out, in)
               │             └─ rest          norms and MLP, by their names in the stock layer
               └─► around()                   embeddings, last norm, output head

A stock model is read as the uniform plan that it is. Memory is that of one layer.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from headwise.errors import HeadwiseError
from headwise.models.attention_headwise import PROJECTIONS
from headwise.models.backbones_headwise import (
    Projection,
    Projections,
    family_of,
    layer_projections,
    stock_attentions,
)
from headwise.models.build import headwise_config, inner
from headwise.models.configuration_headwise import Layer
from headwise.source import Source

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer: how its attention is planned, its projections, and the rest by stock name."""

    layer: Layer
    weights: Projections
    rest: Tensors


@dataclass(frozen=True, slots=True)
class Rotary:
    """The frequencies of a model's rotary planes, and the base they are stated with."""

    frequencies: tuple[float, ...]
    base: float


class Reader:
    """The tensors of an opened source, in the order an engine's file wants them."""

    def __init__(self, source: Source) -> None:
        self.source, self.task = source, source.task
        self.config: Any = source.stock_config
        self.family = family_of(self.config.model_type)
        self.model: Any = source.empty(self.task)
        self._names = source.names(self.task)
        own = {id(m): name for name, m in self.model.named_modules()}
        self._owners = [owner for owner, _ in stock_attentions(inner(self.model))]
        self._prefixes = [f"{own[id(owner)]}." for owner in self._owners]
        inside = own.get(id(inner(self.model)), "")
        self._inside = f"{inside}." if inside else ""

    def __len__(self) -> int:
        return len(self._owners)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The planned attention of every layer, scales and planes explicit."""
        if self.source.is_headwise:
            return self.source.config.layers()
        return headwise_config(self.source.plan, copy.deepcopy(self.config), self.task).layers()

    @property
    def dtype(self) -> torch.dtype:
        """The number format of most weights."""
        kinds = [self.source.checkpoint.stored[n].dtype for n in self._names.values()]
        return max(set(kinds), key=kinds.count)

    def layer(self, i: int) -> LayerTensors:
        """The tensors of one layer."""
        owner, prefix = self._owners[i], self._prefixes[i]
        state = {n: self._tensor(prefix + n) for n in owner.state_dict()}
        if self.source.is_headwise:
            start = f"{self.family.attention}."
            found = {}
            for side, name in PROJECTIONS.items():
                weight = state.pop(f"{start}{name}.weight", None)
                if weight is not None:
                    found[side] = Projection(weight, state.pop(f"{start}{name}.bias", None))
            for side in self.layers[i].identities:  # written out
                out = found["output"].weight
                found[side] = Projection(torch.eye(out.shape[0], dtype=out.dtype))
            return LayerTensors(self.layers[i], Projections(found), state)
        stock = copy.deepcopy(owner, {id(self.config): self.config})
        stock.load_state_dict(state, assign=True)
        weights = layer_projections(stock, self.config)
        places = [self.family.attention, *filter(None, [self.family.holds_output])]
        gone = tuple(f"{place}." for place in places)
        rest = {n: t for n, t in state.items() if not n.startswith(gone) or _is_norm(n)}
        return LayerTensors(self.layers[i], weights, rest)

    def around(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything outside the layers, by its name in the stock model; tied weights once."""
        inside = tuple(self._prefixes)
        for name in self.model.state_dict():
            if not name.startswith(inside) and name in self._names:
                yield name.removeprefix(self._inside), self._tensor(name)

    @property
    def layer_prefix(self) -> str:
        """The name of the list of layers in the stock model, with a dot."""
        return self._prefixes[0].removeprefix(self._inside).removesuffix("0.")

    @cached_property
    def rotary(self) -> Rotary | None:
        """The model's rotary frequencies; those that change with the text are refused."""
        if not self.family.rotary:
            return None
        modules = [m for m in inner(self.model).modules() if hasattr(m, "inv_freq")]
        stated = self.config.rope_parameters or {}
        kind, scaling = stated.get("rope_type", "default"), 1.0
        if len(modules) == 1 and "rope_theta" in stated:
            made = type(modules[0])(self.config)
            frequencies, scaling = made.inv_freq, float(made.attention_scaling)
            changes = kind == "dynamic" or stated.get("short_factor") != stated.get("long_factor")
            if scaling == 1.0 and not changes:
                listed = tuple(float(f) for f in frequencies.double())
                return Rotary(listed, float(stated["rope_theta"]))
        raise HeadwiseError(
            f"{self.source.name} has rotary positions of kind {kind}, which only padded and onnx "
            "support; export to one of those."
        )

    def _tensor(self, name: str) -> torch.Tensor:
        return self.source.checkpoint.tensor(self._names[name])


def _is_norm(name: str) -> bool:
    return "q_norm" in name or "k_norm" in name
