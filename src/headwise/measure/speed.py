"""Tokens per second of several models side by side; an image counts as many as it has patches.

The models take turns within every repetition, first in one order, then in the other, after a
warmup that is not counted: a machine that slows down slows all of them, and their ratio stays
fair. The result is the median and the spread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.measure.record import Rate

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Speed:
    """Reading a prompt at once, and writing token by token after it (causal models only)."""

    prefill: Rate
    decode: Rate | None


def speeds(
    models: Sequence[Any],
    *,
    prompt: int = 128,
    new_tokens: int = 16,
    repeats: int = 5,
    inputs: Mapping[str, Tensor] | None = None,
) -> tuple[Speed, ...]:
    """The speed of each model on one sequence of `prompt` tokens; 0 `new_tokens` skips decoding.

    The prompt is random tokens, or `inputs` (an image).
    """
    prefills: list[list[float]] = [[] for _ in models]
    decodes: list[list[float]] = [[] for _ in models]
    for turn in range(repeats + 1):
        order = range(len(models)) if turn % 2 else range(len(models) - 1, -1, -1)
        for i in order:
            prefill, decode = _timed(models[i], inputs or prompt, new_tokens)
            if turn:
                prefills[i].append(prompt / prefill)
                decodes[i].append(new_tokens / decode)
    return tuple(
        Speed(_rate(p), _rate(d) if new_tokens else None)
        for p, d in zip(prefills, decodes, strict=True)
    )


def _prompt(model: Any, length: int) -> Mapping[str, Tensor]:
    """Random tokens of the model's vocabulary."""
    import torch

    vocabulary = model.get_input_embeddings().weight.size(0)
    generator = torch.Generator().manual_seed(0)
    return {"input_ids": torch.randint(vocabulary, (1, length), generator=generator)}


def _timed(model: Any, prompt: int | Mapping[str, Tensor], new_tokens: int) -> tuple[float, float]:
    """Seconds for the prompt, and for the new tokens after it."""
    import torch

    inputs = _prompt(model, prompt) if isinstance(prompt, int) else prompt
    placed = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    causal = {"use_cache": True} if new_tokens else {}
    with torch.inference_mode():
        start = _now(model.device)
        output = model(**placed, **causal)
        middle = _now(model.device)
        for _ in range(new_tokens):
            token = output.logits[:, -1:].argmax(-1)
            output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
        return middle - start, max(_now(model.device) - middle, 1e-9)


def _now(device: torch.device) -> float:
    """The time once the device has finished its work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def _rate(rates: Sequence[float]) -> Rate:
    return Rate(median=statistics.median(rates), low=min(rates), high=max(rates))
