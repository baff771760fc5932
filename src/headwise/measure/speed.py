"""Tokens per second of several models side by side, where speed matters.

    prefill          one prompt, read at once (an image counts as many tokens as it has patches)
    decode           one sequence, token by token: dominated by reading the weights
    serving          many sequences at once, so that the cache is as large as the weights
    4 × serving      contexts four times as long: dominated by reading the cache

The models take turns within every repetition, first in one order, then in the other, after a
warmup that is not counted: a machine that slows down slows all of them, and their ratio stays
fair. A point ends after its repetitions or when its time is over; if the warmup alone takes
longer, the point is skipped. Caches are filled with noise, because their content does not affect
the time.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.measure.record import PointName, Rate
from headwise.measure.size import free_memory, peak_bytes
from headwise.memory import LONGER

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SERVED = 16  # sequences decoded together
_STEPS = {"prefill": 0, "decode": 16}  # tokens decoded per repetition; at the serving points 2
_SERVING_STEPS = 2


@dataclass(frozen=True, slots=True)
class Workload:
    """The timed work: `batch` sequences of `context` tokens, and `new_tokens` more of each."""

    name: PointName
    batch: int
    context: int
    new_tokens: int

    @property
    def served(self) -> bool:
        """Whether many sequences are decoded together."""
        return self.name.startswith("serving")

    @property
    def tokens(self) -> int:
        """Tokens of one repetition."""
        return self.batch * (self.new_tokens or self.context)


def speed_points(
    *,
    prompt: int,
    decode_after: int,
    context: int | None,
    weight_bytes: int,
    token_bytes: int,
) -> tuple[Workload, ...]:
    """The points for a causal model, from the bytes of its weights and of a cached token.

    At the serving point, a cache of batch × context tokens is as large as the weights.
    """
    most = math.inf if context is None else context
    new = _STEPS["decode"]
    points = [
        Workload("prefill", 1, int(min(prompt, most)), 0),
        Workload("decode", 1, int(min(decode_after, most - new)), new),
    ]
    even = max(1, weight_bytes // token_bytes)  # tokens whose cache weighs as much
    longest = most - _SERVING_STEPS
    batch = max(SERVED, math.ceil(LONGER * even / longest))
    each = max(1, int(min(round(even / batch), longest // LONGER)))
    if LONGER * each <= longest:
        points.append(Workload("serving", batch, each, _SERVING_STEPS))
        points.append(Workload("serving, longer", batch, LONGER * each, _SERVING_STEPS))
    return tuple(points)


@dataclass(frozen=True, slots=True)
class Timed:
    """The speed of each model at one point."""

    rates: tuple[Rate, ...]
    repeats: int


def timed_point(
    models: Sequence[Any],
    point: Workload,
    *,
    repeats: int,
    seconds: float = math.inf,
    inputs: Mapping[str, Tensor] | None = None,
) -> Timed | str:
    """The speed of every model at a point, or a sentence that says why it was skipped.

    `inputs` (an image) replace the random tokens of a prompt.
    """
    needed = sum(cache_bytes_of(model, point) for model in models) if point.new_tokens else 0
    there = free_memory(models[0].device)
    if 2 * needed > there:  # a growing cache is copied at every token
        return (
            f"{point.name} was skipped: {point.batch} sequences of {point.context:,} tokens need "
            f"{2 * needed / 2**30:.1f} GiB for the caches of the models, and "
            f"{there / 2**30:.1f} GiB are free."
        )
    runs = [_repetition(model, point, inputs) for model in models]
    begun = time.perf_counter()
    for run in runs:  # the warmup
        run()
    if time.perf_counter() - begun > seconds:
        return f"{point.name} was skipped: one repetition takes more than {seconds:g} seconds."
    rates: list[list[float]] = [[] for _ in models]
    done = 0
    for turn in range(1, repeats + 1):
        order = range(len(models)) if turn % 2 else range(len(models) - 1, -1, -1)
        for i in order:
            rates[i].append(point.tokens / runs[i]())
        done = turn
        if time.perf_counter() - begun > seconds:
            break
    return Timed(tuple(_rate(r) for r in rates), done)


def cache_bytes_of(model: Any, point: Workload) -> int:
    """Bytes of the cache that a decoding point fills."""
    from headwise.measure.size import cache_bytes

    return cache_bytes(model) * point.batch * point.context


def decoding_bytes(model: Any, point: Workload) -> int:
    """Peak bytes of the cache at a point and of decoding one token."""
    import torch

    filled = FilledCache(model, point.batch, point.context)
    cache, token = filled.cache, filled.first
    filled.restore()
    del filled  # the cache alone owns its tensors, and drops each when it has a longer one
    held = (t for layer in cache.layers for t in (layer.keys, layer.values))
    with torch.inference_mode():
        return peak_bytes(lambda: model(input_ids=token, past_key_values=cache), held)


def _repetition(
    model: Any, point: Workload, inputs: Mapping[str, Tensor] | None
) -> Callable[[], float]:
    """A call that does the point's work once and returns its seconds."""
    import torch

    if not point.new_tokens:
        placed = {k: v.to(model.device) for k, v in (inputs or _prompt(model, point)).items()}

        def prefill() -> float:
            with torch.inference_mode():
                start = _now(model.device)
                model(**placed)
                return max(_now(model.device) - start, 1e-9)

        return prefill
    cache = FilledCache(model, point.batch, point.context)

    def decode() -> float:
        with torch.inference_mode(), cache.filled() as live:
            start = _now(model.device)
            token = cache.first
            for _ in range(point.new_tokens):
                output = model(input_ids=token, past_key_values=live, use_cache=True)
                token = output.logits[:, -1:].argmax(-1)
            return max(_now(model.device) - start, 1e-9)

    return decode


class FilledCache:
    """A reusable growing cache filled with noise; it is never written to."""

    def __init__(self, model: Any, batch: int, context: int) -> None:
        import torch
        from transformers import DynamicCache

        self.model = model
        self.first = torch.ones(batch, 1, dtype=torch.long, device=model.device)
        self.cache: Any = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(input_ids=self.first, past_key_values=self.cache, use_cache=True)
        self.states: list[tuple[Any, Any, int]] = []
        layers: list[Any] = self.cache.layers
        for layer in layers:
            # A sliding layer keeps what its window reaches, and counts what it has seen.
            window = getattr(layer, "sliding_window", None)
            kept = min(context, window - 1) if window else context
            keys, values = (self._noise(t, kept) for t in (layer.keys, layer.values))
            self.states.append((keys, values, context))

    @staticmethod
    def _noise(like: Tensor, length: int) -> Tensor:
        import torch

        batch, heads, _, width = like.shape
        noise = torch.randn(1, heads, length, width, dtype=torch.float32)
        return noise.to(like.device, like.dtype).repeat(batch, 1, 1, 1)

    def filled(self) -> Any:
        """The cache at its context, for a `with`; afterwards the longer copies are dropped."""
        from contextlib import contextmanager

        @contextmanager
        def use() -> Iterator[Any]:
            self.restore()
            try:
                yield self.cache
            finally:
                self.restore()

        return use()

    def restore(self) -> None:
        """Back to the context, with the noise."""
        for layer, (keys, values, seen) in zip(self.cache.layers, self.states, strict=True):
            layer.keys, layer.values = keys, values
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = seen


def _prompt(model: Any, point: Workload) -> Mapping[str, Tensor]:
    """Random tokens of the model's vocabulary."""
    import torch

    vocabulary = model.get_input_embeddings().weight.size(0)
    generator = torch.Generator().manual_seed(0)
    shape = (point.batch, point.context)
    return {"input_ids": torch.randint(vocabulary, shape, generator=generator)}


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
