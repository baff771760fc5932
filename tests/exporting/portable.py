"""Tiny models cut to one shape for all heads, as other engines want them, and to others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.models.build import convert, plan_of
from headwise.models.slicing import sliced
from headwise.planning.fit import Kept
from headwise.planning.targets import LLAMA_LIKE
from tests import tiny

WORDS = 293  # of the tokenizer in conftest.py
FULL = {"layer_types": ["full_attention"] * tiny.LAYERS}  # a qwen2 without windows


def portable(name: str, planes: Sequence[int] | None, vo_dim: int, **changes: Any) -> Any:
    """A tiny model of this family whose heads all keep the same planes and value width.

    Its MLPs lose a few neurons, where the family's exported form has a free width.
    """
    model = convert(tiny.stock(name, **changes))
    kept = []
    for layer in plan_of(model).layers:
        row = []
        for head in layer.heads:
            own = range(len(head.rotary_planes or ()))
            free = range(head.qk_dim - 2 * len(own))
            row.append(Kept(own if planes is None else planes, free, range(head.vo_dim)[:vo_dim]))
        kept.append(row)
    widths = plan_of(model).ffn_dims
    neurons = [range(width)[5:] for width in widths] if name in LLAMA_LIKE else None
    return sliced(model, kept, neurons)


def with_tokenizer(model: Any, tokenizer: Any, folder: Path) -> Path:
    """The model's folder with a tokenizer."""
    saved(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


def saved(model: Any, folder: Path) -> Path:
    """The model's folder."""
    model.save_pretrained(folder)
    return folder
