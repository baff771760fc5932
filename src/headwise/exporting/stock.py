"""Folders that transformers loads without headwise: a cut model in a class it knows.

    one width, qk = vo    llama with `head_dim`; windowed mistral and qwen2 keep their class;
                          granite, which states its score scale, where folding it would round
    one width, qk ≠ vo    mimo_v2_flash with every layer full attention and a dense MLP

A form says what the files will hold, one layer at a time; `headwise.exporting.run` writes them.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from headwise.errors import HeadwiseError
from headwise.exporting.layout import HeadShape, laid_out
from headwise.exporting.parts import in_numbers
from headwise.exporting.reading import Reader, Tensors
from headwise.exporting.rotary import rotary_form
from headwise.models.attention_headwise import PROJECTIONS
from headwise.planning.targets import LLAMA_LIKE, target_of

_CARRIED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "initializer_range",
    "attention_dropout",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class StockForm:
    """A portable plan in a stock class: its config, and its tensors layer by layer."""

    def __init__(self, reader: Reader, dtype: torch.dtype) -> None:
        self.reader, self.dtype = reader, dtype
        self.shape = portable_shape(reader, "stock")
        if self.architecture == "llama":
            self.shape = replace(self.shape, scale=unfolded_scale(reader, self.shape))
        self.n_groups = len(reader.layers[0].heads)

    @property
    def architecture(self) -> str:
        """The stock model type."""
        if self.shape.qk_dim != self.shape.vo_dim:
            return "mimo_v2_flash"
        if self._windowed:
            return self.reader.config.model_type
        return "llama" if self.shape.scale is None else "granite"

    @cached_property
    def config(self) -> Any:
        """The stock config of the exported model."""
        source, shape = self.reader.config, self.shape
        given = {name: getattr(source, name) for name in _CARRIED if hasattr(source, name)}
        given |= {
            "intermediate_size": self.reader.source.plan.ffn_dims[0],
            "num_attention_heads": self.n_groups * shape.queries,
            "num_key_value_heads": self.n_groups,
            "head_dim": shape.qk_dim,
            "rope_parameters": rotary_form(_rotary(self.reader), shape).parameters(
                source.max_position_embeddings
            ),
        }
        kind = self.architecture
        if kind in ("llama", "granite"):
            given |= {"attention_bias": self._biased, "mlp_bias": getattr(source, "mlp_bias", 0)}
            given["mlp_bias"] = bool(given["mlp_bias"])
            if kind == "granite":
                given["attention_multiplier"] = shape.score_scale
        elif kind == "mimo_v2_flash":
            n = source.num_hidden_layers
            rope = {**given["rope_parameters"], "partial_rotary_factor": 1.0}
            given |= {
                "v_head_dim": shape.vo_dim,
                "attention_bias": self._biased,
                "attention_value_scale": 1.0,
                "layer_types": ["full_attention"] * n,
                "mlp_layer_types": ["dense"] * n,
                "rope_parameters": {"full_attention": rope},
            }
        else:
            for name in ("sliding_window", "use_sliding_window", "layer_types"):
                if hasattr(source, name):
                    given[name] = getattr(source, name)
        config = CONFIG_MAPPING[kind](**given)
        config.architectures = [_MODEL_CLASSES.get(kind, f"{kind.capitalize()}ForCausalLM")]
        config.dtype = self.dtype
        return config

    def around(self) -> Tensors:
        """Embeddings, last norm and output head."""
        return in_numbers(dict(self.reader.around()), self.dtype)

    def layer(self, i: int) -> Tensors:
        """The tensors of one layer by their names in the exported model."""
        read, start = self.reader.layer(i), f"model.layers.{i}."
        groups = range(self.n_groups)
        made = {}
        for side, own in laid_out(
            read.layer, read.weights, self.shape, groups, self.n_groups
        ).items():
            place = f"{start}self_attn.{PROJECTIONS[side]}"
            made[f"{place}.weight"] = own.weight
            if self._biased and (side != "output" or self.architecture in ("llama", "granite")):
                none = own.weight.new_zeros(own.weight.shape[0])
                made[f"{place}.bias"] = none if own.bias is None else own.bias
        for name, tensor in split_mlp(read.rest).items():
            made[start + name] = tensor
        return in_numbers({name: tensor.contiguous() for name, tensor in made.items()}, self.dtype)

    @property
    def _biased(self) -> bool:
        return any(layer.biases for layer in self.reader.layers)

    @property
    def _windowed(self) -> bool:
        shape = self.reader.source.plan.shape
        return any(w is not None and w < shape.context for w in shape.windows)


_MODEL_CLASSES = {"mimo_v2_flash": "MiMoV2FlashForCausalLM"}


def portable_shape(reader: Reader, target: str) -> HeadShape:
    """The common shape of all heads; a plan or a family without one is refused."""
    answer = target_of(target).runs(reader.source.plan)
    if not answer.yes or reader.config.model_type not in LLAMA_LIKE:
        reason = answer.why_not or f"{reader.config.model_type} has no portable form"
        raise HeadwiseError(
            f"{reader.source.name} cannot be exported to {target}: {reason}; fit the plan with "
            f"--for {target}, or export to padded, which takes any plan and saves nothing."
        )
    head = next(h for layer in reader.layers for h in layer.heads)
    free = head.qk_dim - 2 * len(head.rotary_planes)
    return HeadShape(head.rotary_planes, free, head.vo_dim, head.queries, free_in_slots=free > 0)


def unfolded_scale(reader: Reader, shape: HeadShape) -> float | None:
    """The score scale that a class must store, so that no stored weight is rounded again.

    None where it can be folded into the queries: in float32 (up to its own rounding), if the factor
    is a power of two, and if heads have several scales, which no class can store.
    """
    scales = {head.score_scale for layer in reader.layers for head in layer.heads}
    scale = min(scales)
    whole, _ = math.frexp(scale / shape.score_scale)
    exact = reader.dtype == torch.float32 or abs(whole - 0.5) < 1e-9
    return None if exact or len(scales) > 1 else scale


def split_mlp(rest: Tensors) -> Tensors:
    """The norms and MLP of a layer by a Llama's names; Phi-3 has gate and up in one."""
    made = dict(rest)
    fused = made.pop("mlp.gate_up_proj.weight", None)
    if fused is not None:
        made["mlp.gate_proj.weight"], made["mlp.up_proj.weight"] = fused.chunk(2)
    return made


def _rotary(reader: Reader) -> Any:
    found = reader.rotary
    assert found is not None  # the Llama-like families turn
    return found
