"""The narrow waist to other people's models: one table entry per family.

An entry says where the layers and their attention are, how the stock weights are laid out, and
what surrounds them. Everything else is read off the stock modules. To support another family, add
an entry to FAMILIES (docs/model-families.md).
This file travels with checkpoints: it needs torch and transformers only.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from .attention_headwise import SIDES, HeadwiseAttention
from .configuration_headwise import Layer
from .heads_headwise import Surroundings

Tensors = dict[str, torch.Tensor]
# (weights, biases) of the four projections by side, weights as (out, in), heads in order.
Weights = tuple[Tensors, Tensors]


def separate(*names: str) -> Callable[[Any, Any], Weights]:
    """Four linear layers; `names` are those of query, key, value and output."""

    def read(attention: Any, config: Any) -> Weights:
        modules = dict(zip(SIDES, map(attention.get_submodule, names), strict=True))
        return (
            {s: m.weight.detach() for s, m in modules.items()},
            {s: m.bias.detach() for s, m in modules.items() if m.bias is not None},
        )

    return read


def fused_columns(attention: Any, config: Any) -> Weights:
    """GPT-2: one (in, out) matrix for query, key and value, three equal blocks of columns."""
    qkv, out = attention.c_attn, attention.c_proj
    parts = (*qkv.weight.detach().T.chunk(3), out.weight.detach().T)
    biases = (*qkv.bias.detach().chunk(3), out.bias.detach())
    return dict(zip(SIDES, parts, strict=True)), dict(zip(SIDES, biases, strict=True))


def fused_rows(attention: Any, config: Any) -> Weights:
    """Phi-3: one (out, in) matrix, the query rows, then the key rows, then the value rows."""
    key = config.num_key_value_heads * attention.head_dim
    sizes = (config.num_attention_heads * attention.head_dim, key, key)
    parts = (*attention.qkv_proj.weight.detach().split(sizes), attention.o_proj.weight.detach())
    return dict(zip(SIDES, parts, strict=True)), {}


def fused_per_head(attention: Any, config: Any) -> Weights:
    """GPT-NeoX: one (out, in) matrix, each head's query, key and value rows together."""
    fused, out = attention.query_key_value, attention.dense

    def parts(x: torch.Tensor) -> list[torch.Tensor]:
        by_head = x.detach().unflatten(0, (config.num_attention_heads, 3, -1))
        return [by_head[:, i].flatten(0, 1) for i in range(3)]

    weights = dict(zip(SIDES, (*parts(fused.weight), out.weight.detach()), strict=True))
    if fused.bias is None:
        return weights, {}
    return weights, dict(zip(SIDES, (*parts(fused.bias), out.bias.detach()), strict=True))


linear_layers = separate("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Family:
    """What headwise must know about one model family."""

    layers: str = "layers"  # the layers, from the base model
    attention: str = "self_attn"  # the attention, from a layer
    read: Callable[[Any, Any], Weights] = linear_layers
    holds_output: str = ""  # where the output projection sits, from the layer, if not in attention
    dropout: str = "attention_dropout"  # attribute of the attention: a number or a Dropout
    output_dropout: str = ""  # the same for a dropout that belongs to the attention's output
    rotary: bool = True
    norm: Literal["", "head", "all"] = ""  # query and key norms: per head, or over all heads
    causal: bool = True
    depth_scaled_output: bool = False  # new output projections start smaller by √(2·layers)
    # What a new config calls the sizes of a ModelShape that are not called the same everywhere.
    ffn_dim: str = "intermediate_size"
    grouped: bool = True  # the config knows key/value heads and a free head width
    windows: Literal["", "layer_types", "all"] = ""  # sliding windows: per layer, or one for all
    unused_positions: int = 0  # rows of the position table that no token reaches


_LLAMA = Family()
_BERT = Family(
    layers="encoder.layer",
    attention="attention.self",
    read=separate("self.query", "self.key", "self.value", "output.dense"),
    holds_output="attention.output.dense",
    dropout="dropout",
    rotary=False,
    causal=False,
    grouped=False,
)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(windows="all"),
    "qwen2": Family(windows="layer_types"),
    "qwen3": Family(norm="head", windows="layer_types"),
    "gemma3_text": Family(norm="head", windows="layer_types"),
    "phi3": Family(read=fused_rows, windows="all"),
    "olmo2": Family(norm="all"),
    "gpt2": Family(
        layers="h",
        attention="attn",
        read=fused_columns,
        dropout="attn_dropout",
        output_dropout="resid_dropout",
        rotary=False,
        depth_scaled_output=True,
        ffn_dim="n_inner",
        grouped=False,
    ),
    "opt": Family(
        layers="decoder.layers",
        read=separate("q_proj", "k_proj", "v_proj", "out_proj"),
        dropout="dropout",
        rotary=False,
        ffn_dim="ffn_dim",
        grouped=False,
    ),
    "gpt_neox": Family(attention="attention", read=fused_per_head, grouped=False),
    "bert": _BERT,
    "roberta": replace(_BERT, unused_positions=2),
    "distilbert": Family(
        layers="transformer.layer",
        attention="attention",
        read=separate("q_lin", "k_lin", "v_lin", "out_lin"),
        dropout="dropout",
        rotary=False,
        causal=False,
        ffn_dim="hidden_dim",
        grouped=False,
    ),
    "vit": Family(attention="attention", rotary=False, causal=False, grouped=False),
}


def family_of(model_type: str) -> Family:
    """The table entry of a stock model type."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"the backbone must be one of {', '.join(sorted(FAMILIES))}, got {model_type!r}; "
            "another family is one entry in headwise/models/backbones_headwise.py."
        )
    return FAMILIES[model_type]


def base_of(backbone: Any) -> Any:
    """The stock model without its head."""
    return backbone.base_model


def stock_attentions(backbone: Any) -> Iterator[tuple[Any, Any]]:
    """(layer, attention) of every layer of a stock model, or of one already replaced."""
    family = family_of(backbone.config.model_type)
    for layer in base_of(backbone).get_submodule(family.layers):
        yield layer, layer.get_submodule(family.attention)


def stock_weights(backbone: Any) -> Iterator[Weights]:
    """The four projections of every layer of a stock model."""
    for layer, _ in stock_attentions(backbone):
        yield layer_weights(layer, backbone.config)


def layer_weights(layer: Any, config: Any) -> Weights:
    """The four projections of one layer of a stock model."""
    family = family_of(config.model_type)
    # A projection that lives beside the attention is named from their common parent.
    path = family.attention.rpartition(".")[0] if family.holds_output else family.attention
    return family.read(layer.get_submodule(path), config)


def rotary_planes(backbone: Any) -> int:
    """How many planes the backbone rotates."""
    if not family_of(backbone.config.model_type).rotary:
        return 0
    base = base_of(backbone)
    names = [n for n, _ in base.named_buffers() if n.endswith("inv_freq")]
    return int(base.get_buffer(names[0]).shape[0])


def replace_attention(backbone: Any, layers: tuple[Layer, ...]) -> None:
    """Put the planned attention into a stock model, in place."""
    found = list(stock_attentions(backbone))
    if len(found) != len(layers):
        raise ValueError(f"the plan has {len(layers)} layers, but the backbone has {len(found)}.")
    planes = rotary_planes(backbone)
    for i, ((owner, _), layer) in enumerate(zip(found, layers, strict=True)):
        replace_in_layer(owner, layer, config=backbone.config, layer_idx=i, planes=planes)


def replace_in_layer(owner: Any, layer: Layer, *, config: Any, layer_idx: int, planes: int) -> None:
    """Put the planned attention into one layer `owner` of a stock model, in place."""
    family = family_of(config.model_type)
    stock = owner.get_submodule(family.attention)
    around = Surroundings(
        config=config,
        d_model=config.hidden_size,
        layer_idx=layer_idx,
        is_causal=stock.is_causal,
        rotary_planes=planes,
        dropout=_rate(stock, family.dropout),
        output_dropout=_rate(stock, family.output_dropout),
        sliding_window=getattr(stock, "sliding_window", getattr(config, "sliding_window", None)),
        norms={n: stock.get_submodule(n) for n in ("q_norm", "k_norm")} if family.norm else None,
        norm_over=family.norm,
    )
    _check(layer, around, layer_idx)
    owner.set_submodule(family.attention, HeadwiseAttention(layer, around))
    if family.holds_output:
        owner.set_submodule(family.holds_output, nn.Identity())


def _rate(stock: Any, name: str) -> float:
    value = getattr(stock, name) if name else 0.0
    return float(value.p if isinstance(value, nn.Dropout) else value)


def _check(layer: Layer, around: Surroundings, i: int) -> None:
    """Refuse a layer that this backbone cannot run correctly."""
    planes = around.rotary_planes
    for head in layer.heads:
        if any(p >= planes for p in head.rotary_planes):
            raise ValueError(
                f"layer {i} asks for rotary plane {max(head.rotary_planes)}, but this backbone "
                f"has {planes} planes, counted from 0."
            )
    for name, norm in (around.norms or {}).items():
        width = norm.weight.shape[0]
        per_head = around.norm_over == "head"
        found = (
            {h.qk_dim for h in layer.heads}
            if per_head
            else {layer.query_width if name == "q_norm" else layer.key_width}
        )
        if found != {width}:
            raise ValueError(
                f"this family normalises its queries and keys {width} wide, so its qk_dim cannot "
                f"change, got {sorted(found)} in layer {i}; plan the vo side only."
            )
