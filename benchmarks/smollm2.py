"""Llamas of SmolLM2-135M's widths with random weights, and caches as full as while decoding.

How long a product takes does not depend on what it multiplies: caches are filled with noise.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, DynamicCache, LlamaConfig, StaticCache


def config(layers: int, *, vocab_size: int = 49152, positions: int = 8192) -> LlamaConfig:
    """576 wide, 9 query heads on 3 key/value heads, 64 wide; the released model has 30 layers."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
    )


def filled_cache(model: Any, batch: int, context: int, *, static: bool) -> Cache:
    """A cache with its shapes taken from the model and noise as its content."""
    cache: Any = (
        StaticCache(config=model.config, max_cache_len=context + 1)
        if static
        else DynamicCache(config=model.config)
    )
    with torch.inference_mode():
        model(torch.ones(batch, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    for layer in cache.layers:
        for name in ("keys", "values"):
            there = getattr(layer, name)
            _, heads, length, width = there.shape
            noise = torch.randn(1, heads, length if static else context, width).to(there.dtype)
            setattr(layer, name, noise.repeat(batch, 1, 1, 1))
    _shorten(cache, context)
    return cache


def decode_token(model: Any, cache: Cache, ids: torch.Tensor, context: int) -> None:
    """One more token for every sequence, then the cache as it was."""
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    _shorten(cache, context)


def _shorten(cache: Any, context: int) -> None:
    for layer in cache.layers:
        if isinstance(cache, StaticCache):
            layer.cumulative_length.fill_(context)
        else:
            layer.crop(context - layer.get_seq_length())
