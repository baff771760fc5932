"""A folder for vLLM's transformers backend: widths by layer, in headwise's own class.

    ours, layer 3     heads 24/16, 16/24, 16/16 wide, each with its own rotary planes
    served            heads 24/24, 24/24, 24/24 wide, zeros in the new columns

That backend makes one attention call per layer, so all heads of a layer get the width of its widest
side. It allocates each layer's cache by `per_layer_config`. Zeros change neither scores nor
outputs, whichever plane rotates them, so each head keeps its planes and borrows further ones.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers.dynamic_module_utils import custom_object_save

from headwise.errors import HeadwiseError
from headwise.exporting.layout import HeadShape, laid_out
from headwise.exporting.parts import in_numbers
from headwise.exporting.reading import Reader, Tensors
from headwise.models.attention_headwise import PROJECTIONS
from headwise.models.backbones_headwise import rotary_planes
from headwise.models.build import headwise_config, inner
from headwise.models.configuration_headwise import Head, HeadwiseConfig
from headwise.models.modeling_headwise import auto_map
from headwise.models.shapes import TASKS
from headwise.plan import HeadSpec, LayerPlan, Plan
from headwise.planning.targets import served_width, target_of


def served_shapes(heads: Sequence[Head], width: int, planes: int) -> list[HeadShape]:
    """Heads of a layer's width, each with its own planes and, up to the most, borrowed ones.

    A scale that all share is kept; otherwise each is folded into its queries.
    """
    most = max(len(h.rotary_planes) for h in heads)
    scales = {h.score_scale for h in heads}
    made = []
    for head in heads:
        borrowed = [p for p in range(planes) if p not in head.rotary_planes]
        kept = sorted([*head.rotary_planes, *borrowed[: most - len(head.rotary_planes)]])
        scale = scales.copy().pop() if len(scales) == 1 else None
        made.append(HeadShape(tuple(kept), width - 2 * most, width, head.queries, scale))
    return made


class ServedForm:
    """A plan with one head width per layer, and the settings that an engine reads."""

    architecture = "headwise"

    def __init__(self, reader: Reader, dtype: torch.dtype) -> None:
        self.reader, self.dtype = reader, dtype
        source = reader.source
        answer = target_of("vllm").runs(source.plan)
        if not answer.yes:
            raise HeadwiseError(f"{source.name} cannot be exported to vllm: {answer.why_not}.")
        planes = rotary_planes(inner(reader.model))
        self._shapes = [
            served_shapes(layer.heads, served_width(planned, source.plan), planes)
            for layer, planned in zip(reader.layers, source.plan.layers, strict=True)
        ]

    @cached_property
    def config(self) -> Any:
        """The config with the padded plan and every layer's heads where engines look for them."""
        source = self.reader.source
        layers = [
            LayerPlan(
                heads=tuple(
                    HeadSpec(
                        qk_dim=s.qk_dim,
                        vo_dim=s.vo_dim,
                        queries=s.queries,
                        score_scale=s.score_scale,
                        rotary_planes=s.planes,
                    )
                    for s in shapes
                ),
                biases=own.biases,
                ffn_dim=own.ffn_dim,
            )
            for shapes, own in zip(self._shapes, source.plan.layers, strict=True)
        ]
        plan = Plan(shape=source.plan.shape, layers=tuple(layers), origin=source.plan.origin)
        made = headwise_config(plan, copy.deepcopy(self.reader.config), self.reader.task)
        declared = [
            {
                "head_dim": shapes[0].qk_dim,
                "num_attention_heads": sum(s.queries for s in shapes),
                "num_key_value_heads": len(shapes),
            }
            for shapes in self._shapes
        ]
        settings: dict[str, Any] = {
            "num_hidden_layers": len(declared),
            **{name: max(layer[name] for layer in declared) for name in declared[0]},
            "per_layer_config": dict(enumerate(declared)),
            "allow_global_per_layer_attribute_access": True,
        }
        config = HeadwiseConfig(backbone=made.backbone, plan=made.plan, **settings)
        with torch.device("meta"):
            self._model: Any = TASKS[self.reader.task](config)
        config.architectures = [type(self._model).__name__]
        config.dtype = self.dtype
        return config

    def write_code(self, folder: Path) -> None:
        """The files that load the model, and where they are found."""
        custom_object_save(self._model, folder, config=self.config)
        self.config.auto_map = auto_map()

    def around(self) -> Tensors:
        """Everything outside the layers."""
        return in_numbers({f"backbone.{n}": t for n, t in self.reader.around()}, self.dtype)

    def layer(self, i: int) -> Tensors:
        """The tensors of one layer."""
        read, shapes = self.reader.layer(i), self._shapes[i]
        own = laid_out(read.layer, read.weights, shapes, range(len(shapes)), len(shapes))
        start = f"backbone.{self.reader.layer_prefix}{i}."
        made = {start + name: tensor for name, tensor in read.rest.items()}
        for name, tensor in own.tensors().items():
            side, _, kind = name.partition(".")
            made[f"{start}{self.reader.family.attention}.{PROJECTIONS[side]}.{kind}"] = tensor
        return in_numbers({name: tensor.contiguous() for name, tensor in made.items()}, self.dtype)
