"""The exported model against ours, in the engine that reads it.

The reference is our model in float32. The limits allow for rounding and nothing else: in float32
the order of sums, in narrower formats one rounding of every weight.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headwise.data.text import read_source
from headwise.data.tokens import token_ids
from headwise.errors import HeadwiseError
from headwise.exporting.record import Parity
from headwise.models.shapes import TASKS
from headwise.source import Source

POSITIONS = 200
# Largest difference of a logit as a share of the largest logit.
LOGIT_LIMITS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def sample_tokens(source: Source, positions: int = POSITIONS) -> list[int]:
    """Tokens of a built-in text; random ones if there is no tokenizer."""
    context = source.plan.shape.context
    count = max(2, min(positions, context))
    vocab = source.stock_config.vocab_size
    try:
        text = sample_text(8 * positions)
        ids = token_ids(source.tokenizer, text)
        if len(ids) >= count and max(ids[:count]) < vocab:
            return ids[:count]
    except HeadwiseError:
        pass
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


def sample_text(characters: int) -> str:
    """A built-in text."""
    return "\n".join(read_source("builtin:python", max_chars=characters).documents)


def sample_inputs(source: Source) -> dict[str, torch.Tensor]:
    """One row for a model of this kind."""
    if source.kind == "image":
        empty = source.empty()
        config = empty.config.get_text_config()
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        generator = torch.Generator().manual_seed(0)
        shape = (1, config.num_channels, height, width)
        return {"pixel_values": torch.randn(shape, generator=generator)}
    return {"input_ids": torch.tensor([sample_tokens(source)])}


def stock_parity(source: Source, folder: Path, dtype: torch.dtype) -> Parity:
    """A folder loaded by transformers' own classes against our model.

    Both run in float32. If they differ by more than the limit they also run in float64, which
    distinguishes a different model from a different order of summation: an unfitted cut can differ
    by 3e-5 in float32, and by nothing in float64.
    """
    parity = _logits_apart(source, folder, dtype, torch.float32)
    if parity.held or dtype != torch.float32:
        return parity
    return _logits_apart(source, folder, dtype, torch.float64)


def _logits_apart(
    source: Source, folder: Path, dtype: torch.dtype, computed: torch.dtype
) -> Parity:
    inputs = sample_inputs(source)
    if "pixel_values" in inputs:
        inputs = {name: tensor.to(computed) for name, tensor in inputs.items()}
    ours = source.load(device="cpu", dtype="fp32").to(computed)
    reference = _first(ours, inputs)
    del ours
    auto = TASKS[source.task]._task
    theirs = auto.from_pretrained(folder, dtype=computed, trust_remote_code=False).eval()
    found = _first(theirs, inputs)
    cached = _cached_numbers(theirs, inputs) if source.kind == "causal" else None
    return Parity(
        engine="transformers",
        measure="logits",
        positions=reference.shape[1] if reference.ndim == 3 else 1,
        error=float((found - reference).abs().max() / reference.abs().max()),
        limit=LOGIT_LIMITS[dtype],
        top_agreement=float((found.argmax(-1) == reference.argmax(-1)).double().mean()),
        computed=str(computed).removeprefix("torch."),
        cached_numbers=cached,
    )


@torch.inference_mode()
def _first(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**inputs)[0]


@torch.inference_mode()
def _cached_numbers(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    """The numbers per token in the model's own cache."""
    ids = inputs["input_ids"][:, :3]
    cache = model(input_ids=ids, use_cache=True).past_key_values
    held = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    return held // ids.shape[1]
