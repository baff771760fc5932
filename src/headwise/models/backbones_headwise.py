"""The narrow waist to other people's models: one table entry per family.

An entry says where the layers, their attention and their MLP are, how the stock weights are laid
out, and what surrounds them. Everything else is read off the stock modules. To support another
family, add an entry to FAMILIES (docs/model-families.md).
This file travels with checkpoints: it needs torch and transformers only.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .attention_headwise import NORMS, PROJECTIONS, SIDES, HeadwiseAttention
from .configuration_headwise import Head, Layer
from .heads_headwise import Surroundings
from .norms_headwise import FITTED, KeptNorm


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear map: its weight as (out, in), and its bias where it has one."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Projection:
        """The same change made to weight and bias."""
        return Projection(change(self.weight), None if self.bias is None else change(self.bias))

    def to(self, dtype: torch.dtype) -> Projection:
        """In another number format."""
        return self.map(lambda t: t.to(dtype))


# Where the tensors of `Projections` are in an attention module.
NORM_TENSORS = {f"{s}.{kind}": f"{name}.{kind}" for s, name in NORMS.items() for kind in FITTED}
TENSOR_PLACES = {
    f"{s}.{kind}": f"{name}.{kind}"
    for s, name in PROJECTIONS.items()
    for kind in ("weight", "bias")
} | NORM_TENSORS


@dataclass(frozen=True, slots=True)
class Projections:
    """The linear maps of one layer by side, heads in order; an identity has no entry.

    Those of the attention are query, key, value and output, those of the MLP gate (if it is gated),
    up and down.
    """

    by_side: Mapping[str, Projection]
    norms: Mapping[str, torch.Tensor] = field(
        default_factory=dict
    )  # what a cut fitted, by `NORM_TENSORS`

    def __getitem__(self, side: str) -> Projection:
        return self.by_side[side]

    def items(self) -> Iterable[tuple[str, Projection]]:
        """(side, projection) of all that are there."""
        return self.by_side.items()

    def has_bias(self, side: str) -> bool:
        """Whether a side is there and has a bias."""
        return side in self.by_side and self.by_side[side].bias is not None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Projections:
        """The same change made to every tensor."""
        return Projections(
            {side: p.map(change) for side, p in self.items()},
            {name: change(tensor) for name, tensor in self.norms.items()},
        )

    def to(self, dtype: torch.dtype) -> Projections:
        """In another number format."""
        return self.map(lambda t: t.to(dtype))

    def replaced(self, **sides: Projection) -> Projections:
        """With other projections on some sides."""
        return Projections({**self.by_side, **sides}, self.norms)

    def with_norms(self, norms: Mapping[str, torch.Tensor]) -> Projections:
        """With these numbers of the norms over kept columns."""
        return Projections(self.by_side, norms)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor as `side.weight` and `side.bias`, and those of norms (`TENSOR_PLACES`)."""
        found = {f"{side}.weight": p.weight for side, p in self.items()}
        found |= {f"{s}.bias": p.bias for s, p in self.items() if p.bias is not None}
        return found | dict(self.norms)

    @classmethod
    def of(
        cls, weights: Iterable[torch.Tensor], biases: Iterable[torch.Tensor | None] | None = None
    ) -> Projections:
        """Those of query, key, value and output, in this order."""
        given = zip(SIDES, weights, biases or (None,) * len(SIDES), strict=True)
        return cls({side: Projection(w, b) for side, w, b in given})

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Projections:
        """The reverse of `tensors`."""
        sides = [side for side in (*SIDES, *MLP_SIDES) if f"{side}.weight" in tensors]
        return cls(
            {s: Projection(tensors[f"{s}.weight"], tensors.get(f"{s}.bias")) for s in sides},
            {name: tensors[name] for name in NORM_TENSORS if name in tensors},
        )

    @classmethod
    def of_modules(cls, modules: Mapping[str, Any]) -> Projections:
        """Those of linear layers by side; the tensors are the layers' own."""
        return cls(
            {
                side: Projection(m.weight.detach(), None if m.bias is None else m.bias.detach())
                for side, m in modules.items()
            }
        )


MLP_SIDES = ("gate", "up", "down")


def projections_of(attention: Any) -> Projections:
    """The projections of a headwise attention module; the tensors are the module's own."""
    if not attention.classes:  # no heads: the output projection has no columns
        bias = attention.o_proj.bias
        empty = torch.empty(attention.o_proj.d_model, 0)
        return Projections({"output": Projection(empty, None if bias is None else bias.detach())})
    found = {side: getattr(attention, name, None) for side, name in PROJECTIONS.items()}
    made = Projections.of_modules({side: m for side, m in found.items() if m is not None})
    norms = {
        s: m for s, n in NORMS.items() if isinstance(m := getattr(attention, n, None), KeptNorm)
    }
    return made.with_norms(
        {f"{side}.{name}": getattr(m, name) for side, m in norms.items() for name in FITTED}
    )


def separate(*names: str) -> Callable[[Any, Any], Projections]:
    """Four linear layers; `names` are those of query, key, value and output."""

    def read(attention: Any, config: Any) -> Projections:
        modules = zip(SIDES, map(attention.get_submodule, names), strict=True)
        return Projections.of_modules(dict(modules))

    return read


def fused_columns(attention: Any, config: Any) -> Projections:
    """GPT-2: one (in, out) matrix for query, key and value, three equal blocks of columns."""
    qkv, out = attention.c_attn, attention.c_proj
    return Projections.of(
        (*qkv.weight.detach().T.chunk(3), out.weight.detach().T),
        (*qkv.bias.detach().chunk(3), out.bias.detach()),
    )


def fused_rows(attention: Any, config: Any) -> Projections:
    """Phi-3: one (out, in) matrix, the query rows, then the key rows, then the value rows."""
    key = config.num_key_value_heads * attention.head_dim
    sizes = (config.num_attention_heads * attention.head_dim, key, key)
    parts = attention.qkv_proj.weight.detach().split(sizes)
    return Projections.of((*parts, attention.o_proj.weight.detach()))


def fused_per_head(attention: Any, config: Any) -> Projections:
    """GPT-NeoX: one (out, in) matrix, each head's query, key and value rows together."""
    fused, out = attention.query_key_value, attention.dense

    def parts(x: torch.Tensor) -> list[torch.Tensor]:
        by_head = x.detach().unflatten(0, (config.num_attention_heads, 3, -1))
        return [by_head[:, i].flatten(0, 1) for i in range(3)]

    biases = None if fused.bias is None else (*parts(fused.bias), out.bias.detach())
    return Projections.of((*parts(fused.weight), out.weight.detach()), biases)


linear_layers = separate("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Mlp:
    """Where a family's MLP keeps its matrices: paths from the layer.

        gated    down(act(gate(x)) · up(x))        plain    down(act(up(x)))

    Sides that share a path are fused: one upon the other in the rows of one matrix.
    """

    sides: Mapping[str, str]
    transposed: bool = False  # the matrices are (in, out)

    @property
    def paths(self) -> dict[str, tuple[str, ...]]:
        """The sides in each matrix."""
        found: dict[str, tuple[str, ...]] = {}
        for side, path in self.sides.items():
            found[path] = (*found.get(path, ()), side)
        return found

    @property
    def down(self) -> str:
        """The path of the matrix that the neurons enter."""
        return self.sides["down"]

    def read(self, state: Mapping[str, torch.Tensor]) -> Projections:
        """The MLP's projections in the tensors of a layer, by their names there."""
        found: dict[str, Projection] = {}
        for path, sides in self.paths.items():
            weight, bias = state[f"{path}.weight"], state.get(f"{path}.bias")
            weights = (weight.T if self.transposed else weight).chunk(len(sides))
            biases = (None,) * len(sides) if bias is None else bias.chunk(len(sides))
            parts = zip(sides, weights, biases, strict=True)
            found |= {side: Projection(w, b) for side, w, b in parts}
        return Projections(found)

    def written(self, projections: Projections) -> dict[str, torch.Tensor]:
        """The reverse of `read`."""
        made = {}
        for path, sides in self.paths.items():
            weight = torch.cat([projections[side].weight for side in sides])
            made[f"{path}.weight"] = (weight.T if self.transposed else weight).contiguous()
            biases = [b for side in sides if (b := projections[side].bias) is not None]
            if biases:
                made[f"{path}.bias"] = torch.cat(biases)
        return made

    def resize(self, layer: Any, width: int) -> None:
        """Give the MLP of a layer so many neurons, in place; its new matrices are empty."""
        for path, sides in self.paths.items():
            stock = layer.get_submodule(path)
            rows, columns = stock.weight.T.shape if self.transposed else stock.weight.shape
            if "down" in sides:
                columns = width
            else:
                rows = width * len(sides)
            made: nn.Module
            if self.transposed:
                made = Conv1D(rows, columns)
            else:
                made = nn.Linear(columns, rows, bias=stock.bias is not None)
            layer.set_submodule(path, made)


_GATED = Mlp({side: f"mlp.{side}_proj" for side in MLP_SIDES})


@dataclass(frozen=True)
class Family:
    """What headwise must know about one model family."""

    layers: str = "layers"  # the layers, from the base model
    attention: str = "self_attn"  # the attention, from a layer
    read: Callable[[Any, Any], Projections] = linear_layers
    mlp: Mlp = _GATED
    holds_output: str = ""  # where the output projection sits, from the layer, if not in attention
    dropout: str = "attention_dropout"  # attribute of the attention: a number or a Dropout
    output_dropout: str = ""  # the same for a dropout that belongs to the attention's output
    rotary: bool = True
    norm: Literal["", "head", "all"] = ""  # query and key norms: per head, or over all heads
    norm_offset: float = 0.0  # what a norm adds to its stored weights
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
    mlp=Mlp({"up": "intermediate.dense", "down": "output.dense"}),
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
    "gemma3_text": Family(norm="head", norm_offset=1.0, windows="layer_types"),
    "phi3": Family(
        read=fused_rows,
        mlp=Mlp({"gate": "mlp.gate_up_proj", "up": "mlp.gate_up_proj", "down": "mlp.down_proj"}),
        windows="all",
    ),
    "olmo2": Family(norm="all"),
    "gpt2": Family(
        layers="h",
        attention="attn",
        read=fused_columns,
        mlp=Mlp({"up": "mlp.c_fc", "down": "mlp.c_proj"}, transposed=True),
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
        mlp=Mlp({"up": "fc1", "down": "fc2"}),
        dropout="dropout",
        rotary=False,
        ffn_dim="ffn_dim",
        grouped=False,
    ),
    "gpt_neox": Family(
        attention="attention",
        read=fused_per_head,
        mlp=Mlp({"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}),
        grouped=False,
    ),
    "bert": _BERT,
    "roberta": replace(_BERT, unused_positions=2),
    "distilbert": Family(
        layers="transformer.layer",
        attention="attention",
        read=separate("q_lin", "k_lin", "v_lin", "out_lin"),
        mlp=Mlp({"up": "ffn.lin1", "down": "ffn.lin2"}),
        dropout="dropout",
        rotary=False,
        causal=False,
        ffn_dim="hidden_dim",
        grouped=False,
    ),
    "vit": Family(
        attention="attention",
        mlp=Mlp({"up": "mlp.fc1", "down": "mlp.fc2"}),
        rotary=False,
        causal=False,
        grouped=False,
    ),
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


def stock_projections(backbone: Any) -> Iterator[Projections]:
    """The four projections of every layer of a stock model."""
    for layer, _ in stock_attentions(backbone):
        yield layer_projections(layer, backbone.config)


def layer_projections(layer: Any, config: Any) -> Projections:
    """The four projections of one layer of a stock model."""
    family = family_of(config.model_type)
    # A projection that lives beside the attention is named from their common parent.
    path = family.attention.rpartition(".")[0] if family.holds_output else family.attention
    return family.read(layer.get_submodule(path), config)


def layer_mlp(layer: Any, config: Any) -> Projections:
    """The projections of the MLP of one layer, stock or planned; the tensors are its own."""
    return family_of(config.model_type).mlp.read(layer.state_dict())


def rotary_planes(backbone: Any) -> int:
    """How many planes the backbone rotates."""
    if not family_of(backbone.config.model_type).rotary:
        return 0
    base = base_of(backbone)
    names = [n for n, _ in base.named_buffers() if n.endswith("inv_freq")]
    return int(base.get_buffer(names[0]).shape[0])


def apply_layers(backbone: Any, layers: tuple[Layer, ...]) -> None:
    """Put the planned layers into a stock model, in place."""
    found = list(stock_attentions(backbone))
    if len(found) != len(layers):
        raise ValueError(f"the plan has {len(layers)} layers, but the backbone has {len(found)}.")
    planes = rotary_planes(backbone)
    for i, ((owner, _), layer) in enumerate(zip(found, layers, strict=True)):
        replace_in_layer(owner, layer, config=backbone.config, layer_idx=i, planes=planes)


def replace_in_layer(owner: Any, layer: Layer, *, config: Any, layer_idx: int, planes: int) -> None:
    """Put the planned attention and MLP into one layer `owner` of a stock model, in place."""
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
        norms={n: stock.get_submodule(n) for n in NORMS.values()} if family.norm else None,
        norm_over=family.norm,
        stock_qk_dim=stock.head_dim if family.norm else 0,
        norm_offset=family.norm_offset,
    )
    _check(layer, around, layer_idx)
    owner.set_submodule(family.attention, HeadwiseAttention(layer, around))
    if family.holds_output:
        owner.set_submodule(family.holds_output, nn.Identity())
    neurons = owner.get_submodule(family.mlp.down).weight.shape[0 if family.mlp.transposed else 1]
    if layer.ffn_dim not in (None, neurons):
        family.mlp.resize(owner, layer.ffn_dim)


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
        width = around.stock_qk_dim
        stock_heads = norm.weight.shape[0] // width
        for head in layer.heads:
            # A direction that mixes columns has no weight in the norm: whole planes only.
            if head.qk_dim != width and (2 * planes != width or head.qk_dim != _turning(head)):
                raise ValueError(
                    f"this family normalises its queries and keys, so heads keep whole rotary "
                    f"planes of the {width} columns, got qk_dim {head.qk_dim} with "
                    f"{len(head.rotary_planes)} planes in layer {i}; choose even widths up to "
                    f"{width}."
                )
        if around.norm_over == "all":
            heads = [(h.source + 1) * (h.queries if name == "q_norm" else 1) for h in layer.heads]
            if len({h.queries for h in layer.heads}) > 1 or max(heads, default=0) > stock_heads:
                raise ValueError(
                    f"this family normalises its queries and keys over all {stock_heads} heads, so "
                    f"a layer has no other heads than those, got {len(layer.heads)} groups in "
                    f"layer {i}; keep the number of heads, or cut a model of more."
                )


def _turning(head: Head) -> int:
    return 2 * len(head.rotary_planes)
