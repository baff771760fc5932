"""The shape of a new uniform model: sizes from the designer, the rest from the model family."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from headwise.errors import PlanError, did_you_mean, quoted
from headwise.plan import ModelShape
from headwise.records import first_problem

PATCH = 16  # pixels on a side of a new image model's patches


def new_shape(
    *,
    n_layers: int,
    d_model: int,
    n_heads: int,
    context: int,
    n_kv_heads: int | None = None,
    head_dim: int | None = None,
    family: str = "llama",
    **given: Any,
) -> ModelShape:
    """The shape of a new uniform model; anything in `given` overrides the family's default."""
    if family not in FAMILIES:
        raise PlanError(f"unknown family {quoted(family)}. {did_you_mean(family, FAMILIES)}")
    sizes = {"layers": n_layers, "d-model": d_model, "heads": n_heads, "context": context}
    sizes |= {"kv-heads": 1 if n_kv_heads is None else n_kv_heads}
    sizes |= {"head-dim": 1 if head_dim is None else head_dim}
    for name, value in sizes.items():
        if value < 1:
            raise PlanError(f"{name} must be a whole number of at least 1, got {value}.")
    if head_dim is None:
        if d_model % n_heads:
            raise PlanError(
                f"heads must divide d-model {d_model}, got {n_heads}; choose a divisor "
                "or give the head width with --head-dim."
            )
        head_dim = d_model // n_heads
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    if n_heads % n_kv_heads:
        raise PlanError(f"kv-heads must divide the number of heads {n_heads}, got {n_kv_heads}.")
    defaults = FAMILIES[family](d_model, context)
    defaults |= {name: value for name, value in given.items() if value is not None}
    try:
        return ModelShape(
            family=family,
            n_layers=n_layers,
            d_model=d_model,
            context=context,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            qk_dim=head_dim,
            vo_dim=head_dim,
            **defaults,
        )
    except ValidationError as error:
        raise PlanError(
            f"This shape is not possible: {first_problem(error, ModelShape, {})}"
        ) from error


_ALL_BIASES = ("query", "key", "value", "output")


def _llama(d_model: int, context: int) -> dict[str, Any]:
    # The gated MLP that costs what a plain ×4 one does (8/3 · d), rounded up to 64.
    ffn_dim = -(-8 * d_model // 3 // 64) * 64
    return {"ffn_dim": ffn_dim, "vocab_size": 32000, "tied_embeddings": False}


def _gpt2(d_model: int, context: int) -> dict[str, Any]:
    return {
        "attention_biases": _ALL_BIASES,
        "ffn_dim": 4 * d_model,
        "ffn_gated": False,
        "ffn_biases": True,
        "norm_biases": True,
        "learned_positions": context,
        "vocab_size": 50257,
    }


def _bert(d_model: int, context: int) -> dict[str, Any]:
    # Two token types and the norm of the embeddings (2·d each), and the pooler (d² + d).
    return _gpt2(d_model, context) | {
        "causal": False,
        "lm_head": False,
        "final_norm": False,
        "vocab_size": 30522,
        "other_params": d_model * d_model + 5 * d_model,
    }


def _vit(d_model: int, context: int) -> dict[str, Any]:
    side = math.isqrt(max(0, context - 1))
    if context < 2 or side * side != context - 1:
        near = max(1, side)
        raise PlanError(
            f"an image is a square of patches and a class token, so the context of a vit model "
            f"must be a square plus 1, got {context}; use {near**2 + 1} or {(near + 1) ** 2 + 1}."
        )
    # The patches' projection (3·16² weights and a bias for each of d) and the class token; the
    # classes themselves are not counted, as their number is not known.
    return _gpt2(d_model, context) | {
        "causal": False,
        "lm_head": False,
        "vocab_size": 0,
        "other_params": (3 * PATCH * PATCH + 1) * d_model + d_model,
    }


FAMILIES = {"llama": _llama, "gpt2": _gpt2, "bert": _bert, "vit": _vit}
