"""Attention with head groups of different widths in one layer.

The projections are plain linear layers of ragged width. Heads stand in plan order, the queries of
a group side by side, and the columns of one rotary head are

    [ first halves of its planes | second halves | position-free ]

Neighbouring heads of equal widths, query counts and scales are one *class* and run in one fused
call:

    q_proj ─ split ─┬─ class 0 (3 heads, 64 wide) ─ attention ─┐
    k_proj ─ split ─┼─ class 1 (5 heads, 16 wide) ─ attention ─┼─ concatenate ─ o_proj
    v_proj ─ split ─┘                                          ┘

An identity projection has no module: its heads are slices of the input itself. A layer without
heads has no projections but its output bias, where there is one, and caches no numbers.
This file travels with checkpoints: it needs torch and transformers only.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.cache_utils import DynamicLayer

from .configuration_headwise import Head, Layer
from .heads_headwise import HeadClass, Surroundings
from .norms_headwise import KeptNorm, keeps_all, normed_columns

__all__ = ["PROJECTIONS", "SIDES", "HeadClass", "HeadwiseAttention", "Surroundings"]

SIDES = ("query", "key", "value", "output")
PROJECTIONS = dict(zip(SIDES, ("q_proj", "k_proj", "v_proj", "o_proj"), strict=True))
NORMS = {"query": "q_norm", "key": "k_norm"}


class OutputBias(nn.Module):
    """The output projection of a layer without heads: a constant, zero if it has no bias."""

    def __init__(self, d_model: int, bias: bool) -> None:
        super().__init__()
        self.d_model = d_model
        self.bias = nn.Parameter(torch.zeros(d_model)) if bias else None

    def forward(self, mixed: torch.Tensor) -> torch.Tensor:
        """(batch, length, d_model) from the heads' (batch, length, 0)."""
        zeros = mixed.new_zeros(*mixed.shape[:-1], self.d_model)
        return zeros if self.bias is None else zeros + self.bias


class EmptyLayer(DynamicLayer):
    """The growing cache of a layer without heads: counts tokens, whose keys have no numbers."""

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return 0 if self.keys is None or self.keys.ndim < 2 else self.keys.shape[-2]


class HeadwiseAttention(nn.Module):
    """Drop-in for a stock attention module: same call, same return."""

    o_proj: Any  # an nn.Linear, or the OutputBias of a layer without heads
    classes: tuple[HeadClass, ...]

    def __init__(self, layer: Layer, around: Surroundings) -> None:
        super().__init__()
        self.config = around.config
        self.layer_idx = around.layer_idx
        self.is_causal = around.is_causal
        self.dropout = around.dropout
        self.output_dropout = around.output_dropout
        self.sliding_window = around.sliding_window
        self.norm_over = around.norm_over
        widths = {s: getattr(layer, f"{s}_width") for s in SIDES}
        if not layer.heads:
            self.o_proj = OutputBias(around.d_model, "output" in layer.biases)
        for side in SIDES if layer.heads else ():
            if side not in layer.identities:
                ins, outs = around.d_model, widths[side]
                ins, outs = (outs, ins) if side == "output" else (ins, outs)
                setattr(self, PROJECTIONS[side], nn.Linear(ins, outs, bias=side in layer.biases))
        for side, name in NORMS.items() if around.norms else ():
            setattr(self, name, _norm_over_kept(layer, side, around))
        self.classes = tuple(
            HeadClass(tuple(run), around) for _, run in itertools.groupby(layer.heads, _class_key)
        )
        for i, head_class in enumerate(self.classes):
            # Not in a list: an engine reads the layer from the one number in a module's name.
            self.add_module(f"class_{i}", head_class)
        self.query_widths = [c.n_heads * c.queries * c.qk_dim for c in self.classes]
        self.key_widths = [c.n_heads * c.qk_dim for c in self.classes]
        self.value_widths = [c.n_heads * c.vo_dim for c in self.classes]
        self.one_width = len({(c.qk_dim, c.vo_dim) for c in self.classes}) == 1

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        encoder_hidden_states: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output of the layer, and the attention weights where the implementation has them."""
        if encoder_hidden_states is not None:
            raise ValueError("headwise supports self-attention only, got encoder states.")
        # One forward for all families: GPT-NeoX calls the cache layer_past.
        cache = past_key_values if past_key_values is not None else layer_past
        # A decoder-only BERT or GPT-2 may be handed a pair of caches.
        cache = getattr(cache, "self_attention_cache", cache)
        if not self.classes:
            return self._without_heads(hidden_states, attention_mask, cache)
        queries = self._heads("query", hidden_states, self.query_widths)
        keys = self._heads("key", hidden_states, self.key_widths)
        values = self._heads("value", hidden_states, self.value_widths)
        if position_embeddings is not None:
            for i, head_class in enumerate(self.classes):
                queries[i], keys[i] = head_class.rotated(queries[i], keys[i], *position_embeddings)
        if cache is not None:
            keys, values = self._cached(keys, values, cache)
        kwargs["dropout"] = self.dropout if self.training else 0.0
        kwargs["sliding_window"] = self.sliding_window
        results = [
            c(q, k, v, attention_mask, **kwargs)
            for c, q, k, v in zip(self.classes, queries, keys, values, strict=True)
        ]
        mixed = [out.flatten(-2) for out, _ in results]
        weights = [w for _, w in results if w is not None]
        output = self.o_proj(mixed[0] if len(mixed) == 1 else torch.cat(mixed, -1))
        if self.output_dropout:
            output = functional.dropout(output, self.output_dropout, self.training)
        return output, (torch.cat(weights, 1) if weights else None)

    def _without_heads(
        self, hidden: torch.Tensor, mask: torch.Tensor | None, cache: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output bias, or zeros; the cache is told how many tokens there were."""
        batch, length = hidden.shape[:2]
        if cache is not None:
            nothing = hidden.new_empty(batch, 1, length, 0)
            cache.update(nothing, nothing, self.layer_idx)
            layer = cache.layers[self.layer_idx]
            if type(layer) is DynamicLayer:  # which takes keys without numbers for no keys
                counting = EmptyLayer()
                counting.__dict__.update(layer.__dict__)
                cache.layers[self.layer_idx] = counting
        output = self.o_proj(hidden.new_empty(batch, length, 0))
        if self.training:  # the norm before gets a gradient, which several processes wait for
            output = output + 0.0 * hidden
        if self.output_dropout:
            output = functional.dropout(output, self.output_dropout, self.training)
        if self.config._attn_implementation != "eager":
            return output, None
        seen = length if mask is None else mask.shape[-1]
        return output, hidden.new_empty(batch, 0, length, seen)

    def _heads(self, side: str, x: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        """(batch, heads, length, width) of every class, for the queries, keys or values."""
        projection = getattr(self, PROJECTIONS[side], None)
        if projection is not None:
            x = projection(x)
        norm = getattr(self, NORMS[side], None) if side in NORMS else None
        if norm is not None and (self.norm_over == "all" or isinstance(norm, KeptNorm)):
            x, norm = norm(x), None
        parts = [x] if len(widths) == 1 else x.split(widths, -1)
        heads = []
        for head_class, part in zip(self.classes, parts, strict=True):
            width = head_class.vo_dim if side == "value" else head_class.qk_dim
            apart = part.unflatten(-1, (-1, width))
            heads.append((apart if norm is None else norm(apart)).transpose(1, 2))
        return heads

    def _cached(
        self, keys: list[torch.Tensor], values: list[torch.Tensor], cache: Any
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """All keys and values so far.

        Heads of one width are cached as in stock models, (batch, heads, length, width). Several
        widths are cached side by side as one head, (batch, 1, length, sum of the widths).
        """
        if len(self.classes) == 1:
            key, value = cache.update(keys[0], values[0], self.layer_idx)
            return [key], [value]
        if self.one_width:
            key, value = cache.update(torch.cat(keys, 1), torch.cat(values, 1), self.layer_idx)
            counts = [c.n_heads for c in self.classes]
            return list(key.split(counts, 1)), list(value.split(counts, 1))
        key, value = cache.update(_side_by_side(keys), _side_by_side(values), self.layer_idx)
        return (
            [_apart(k, c.qk_dim) for k, c in self._split(key, self.key_widths)],
            [_apart(v, c.vo_dim) for v, c in self._split(value, self.value_widths)],
        )

    def _split(self, flat: torch.Tensor, widths: Sequence[int]) -> Any:
        return zip(flat.split(widths, -1), self.classes, strict=True)


def _norm_over_kept(layer: Layer, side: str, around: Surroundings) -> Any:
    """The stock norm of a side where heads keep all its columns in order, else its kept ones."""
    assert around.norms is not None
    stock = around.norms[NORMS[side]]
    width, together = around.stock_qk_dim, around.norm_over == "all"
    columns = normed_columns(
        layer, side, planes=around.rotary_planes, width=width, together=together
    )
    if not layer.heads or keeps_all(columns, stock.weight.shape[0]):
        return stock
    return KeptNorm(stock, columns, around.norm_offset)


def _class_key(head: Head) -> tuple[int, int, int, float, int]:
    planes = len(head.rotary_planes)
    return head.qk_dim, head.vo_dim, head.queries, head.score_scale, planes


def _side_by_side(heads: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([h.transpose(1, 2).flatten(-2) for h in heads], -1).unsqueeze(1)


def _apart(flat: torch.Tensor, width: int) -> torch.Tensor:
    return flat.squeeze(1).unflatten(-1, (-1, width)).transpose(1, 2)
