"""Heads that are alike: their rotary planes, and how their attention is run fast.

A *class* is a run of neighbouring heads with equal widths, query counts, scales and numbers of
rotary planes. To transformers' attention functions it is the attention module.
This file travels with checkpoints: it needs torch and transformers only.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_headwise import Head

_MANY_CACHED = 1024  # cached tokens of all heads and sequences, from which two products win


@dataclass(frozen=True)
class Surroundings:
    """What the backbone contributes to one attention layer."""

    config: Any  # the live stock config: the attention implementation is read from it
    d_model: int
    layer_idx: int
    is_causal: bool
    rotary_planes: int  # planes in the backbone's cos and sin; 0 without rotary positions
    dropout: float = 0.0
    output_dropout: float = 0.0
    sliding_window: int | None = None
    norms: dict[str, Any] | None = None  # q_norm and k_norm
    norm_over: str = "head"  # each head on its own, or "all" heads together
    stock_qk_dim: int = 0  # the width of the stock heads that norms are over
    norm_offset: float = 0.0  # what is added to a norm's stored weights


class HeadClass(nn.Module):
    """Neighbouring heads that are alike: what transformers' attention functions call a module."""

    def __init__(self, heads: tuple[Head, ...], around: Surroundings) -> None:
        super().__init__()
        head = heads[0]
        self.config = around.config
        self.layer_idx = around.layer_idx
        self.is_causal = around.is_causal
        self.n_heads, self.queries = len(heads), head.queries
        self.qk_dim, self.vo_dim = head.qk_dim, head.vo_dim
        self.scaling = head.score_scale
        self.num_key_value_groups = head.queries
        self.rotary_dim = 2 * len(head.rotary_planes)
        all_planes = tuple(range(around.rotary_planes))
        # Columns of cos and sin per query head: plane i is column i of both halves. Heads with the
        # same planes share them. None: all, in order.
        half = around.rotary_planes
        per_head = [(*h.rotary_planes, *(half + p for p in h.rotary_planes)) for h in heads]
        self.alike = len(set(per_head)) == 1
        per_query = (
            per_head[:1] if self.alike else [c for c in per_head for _ in range(head.queries)]
        )
        self.columns: tuple[int, ...] | None = tuple(itertools.chain.from_iterable(per_query))
        if self.alike and head.rotary_planes == all_planes:
            self.columns = None
        # Not a buffer: weights are loaded on the meta device, which would lose its content.
        self._index: dict[torch.device, torch.Tensor] = {}

    def extra_repr(self) -> str:
        """The widths, in a printed model."""
        return f"{self.n_heads} × {self.queries} queries, qk {self.qk_dim}, vo {self.vo_dim}"

    def rotated(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys turned by their positions, each head in its own planes."""
        if not self.rotary_dim:
            return query, key
        cos, sin = self._own_planes(cos), self._own_planes(sin)
        turned = _turned(query, cos, sin, self.rotary_dim)
        if not self.alike and self.queries > 1:  # a key turns like the first of its queries
            cos, sin = cos[:, :: self.queries], sin[:, :: self.queries]
        return turned, _turned(key, cos, sin, self.rotary_dim)

    def _own_planes(self, table: torch.Tensor) -> torch.Tensor:
        """(batch, query heads or 1, length, rotary_dim), from (batch, length, planes·2)."""
        if self.columns is None:
            return table.unsqueeze(1)
        index = self._index.get(table.device)
        if index is None:
            index = torch.tensor(self.columns, device=table.device)
            self._index[table.device] = index
        chosen = table.index_select(-1, index)
        if self.alike:
            return chosen.unsqueeze(1)
        return chosen.unflatten(-1, (-1, self.rotary_dim)).transpose(1, 2)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(batch, length, query heads, vo_dim), and the attention weights if there are any.

        The one place that calls an attention function of transformers. Engines that bring their own
        (vLLM) look for it in a module's forward, one module per layer.

        The rules of speed, all in this place (measured on the CPU, where it is not said):
        - Decoding (one query) with PyTorch's attention: the queries of a group become the length
          axis, so grouped keys and values are read once and never repeated. Where many tokens are
          cached the two products are written out: they take any widths, so nothing is padded or
          copied, and they are as fast as the fused kernel in float32 and twice as fast in bfloat16
          (where they round scores as eager attention does).
        - Otherwise fused attention wants equal widths. Zeros change neither the scores nor, once
          cut off, the output, so the narrower side is padded: for flash-attention kernels on any
          device, and on the CPU, where the unfused path is up to four times slower.
        - One product for queries, keys and values saves nothing in float32 and 30 µs per layer in
          bfloat16, too little for weights that no longer are what the checkpoint says.
        """
        implementation = self.config._attn_implementation
        if implementation == "sdpa" and query.shape[2] == 1:
            return self._decoded(query, key, value, mask, kwargs["dropout"]), None
        if _wants_equal_widths(implementation, query.device):
            query, key, value = self._padded(query, key, value)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        out, weights = attend(self, query, key, value, mask, scaling=self.scaling, **kwargs)
        if out.ndim == 2:  # an engine's, which counts tokens and columns only
            out = out.view(*query.shape[::2][:2], self.n_heads * self.queries, -1)
        return out[..., : self.vo_dim], weights

    def _decoded(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
    ) -> torch.Tensor:
        folded = query.view(query.shape[0], self.n_heads, self.queries, self.qk_dim)
        on_cpu = query.device.type == "cpu"
        if on_cpu and not dropout and key.shape[:3].numel() >= _MANY_CACHED:
            out = _written_out(folded * self.scaling, key, value, mask)
        else:
            if on_cpu:
                folded, key, value = self._padded(folded, key, value)
            out = functional.scaled_dot_product_attention(
                folded, key, value, attn_mask=mask, dropout_p=dropout, scale=self.scaling
            )[..., : self.vo_dim]
        return out.reshape(query.shape[0], 1, self.n_heads * self.queries, self.vo_dim)

    def _padded(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All of one width, with zeros, which change neither the scores nor the kept columns."""
        missing = self.vo_dim - self.qk_dim
        if missing > 0:
            query, key = (functional.pad(x, (0, missing)) for x in (query, key))
        elif missing < 0:
            value = functional.pad(value, (0, -missing))
        return query, key, value


def eager_attention(
    module: HeadClass,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written out, which also returns the weights; the softmax is taken in float32."""
    if module.num_key_value_groups > 1:
        key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    weights = functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


def _written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention of scaled queries as two products that never copy the keys or values."""
    if key.stride(0) != key.shape[1] * key.stride(1):
        # Side by side in one cache, the heads cannot be one batch without a copy: one at a time.
        heads = zip(query.split(1, 1), key.split(1, 1), value.split(1, 1), strict=True)
        if key.shape[1] > 1:
            return torch.cat([_written_out(q, k, v, mask) for q, k, v in heads], 1)
    scores = query @ key.transpose(2, 3)
    # A mask has one row per sequence, so looking at it is cheap; the scores are not. A full cache
    # hides nothing.
    if mask is not None and not _hides_nothing(mask):
        if mask.dtype == torch.bool:
            mask = torch.where(mask, scores.new_zeros(()), scores.new_full((), -torch.inf))
        scores += mask
    return scores.softmax(-1) @ value  # in half precision, too, the kernel sums in float32


def _hides_nothing(mask: torch.Tensor) -> bool:
    """Whether every token is seen; a compiled graph does not look."""
    if mask.dtype != torch.bool or torch.compiler.is_compiling():
        return False
    return bool(mask.all())


def _wants_equal_widths(implementation: str | None, device: torch.device) -> bool:
    if implementation == "sdpa":
        return device.type == "cpu"
    return "flash" in (implementation or "")


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, width: int) -> torch.Tensor:
    """The first `width` columns rotated: column i with column i + width/2 is one plane."""
    whole = width == x.shape[-1]
    turning = x if whole else x[..., :width]
    first, second = turning.chunk(2, -1)
    turned = (turning * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)
    return turned if whole else torch.cat((turned, x[..., width:]), -1)
