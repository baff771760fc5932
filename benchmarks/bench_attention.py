"""Mixed heads against stock models on the CPU, as one JSON document of ratios.

A Llama-like model (576 wide, 9 query heads on 3 key/value heads, 64 wide). Three questions:

- uniform: does the uniform plan run as fast as the stock model?
- mixed: does a plan of several widths run as fast as the uniform plan of equal FLOPs? Once with
  equal query-key and value widths in each head, once with unequal ones, which must be padded.
- decoding: how much faster does half the key-value cache decode, at context 4096 and batch 16,
  where reading the cache is what takes the time? The caches are filled with noise. A growing cache
  is copied at every token, and a tensor above 32 MB is then new memory each time, which halving
  avoids; a static cache shows the reading alone. The dense model as a plan shows what is gained by
  reading grouped keys and values only once.

All numbers of one question are measured in turn; the load average tells how quiet the machine was.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from smollm2 import config, decode_token, filled_cache
from timing import Timing, interleaved
from transformers import LlamaForCausalLM

from headwise.models.build import build_model, convert, stock_plan
from headwise.plan import HeadSpec, LayerPlan, Plan
from headwise.planning.cost import cost

LAYERS, VOCAB = 4, 2048
TRAIN_BATCH, TRAIN_LENGTH = 4, 512
DECODE_BATCH, DECODE_CONTEXT = 16, 4096
CONFIG = config(LAYERS, vocab_size=VOCAB, positions=DECODE_CONTEXT + 64)
# (qk_dim, vo_dim) of the three head groups; the dense model has (64, 64) three times.
EQUAL_FLOPS = {
    "mixed": ((96, 96), (64, 64), (32, 32)),
    "mixed, qk and vo unequal": ((96, 32), (64, 64), (32, 96)),
}
HALF_THE_BYTES = {
    "half, uniform": ((32, 32),) * 3,
    "half, mixed": ((48, 48), (32, 32), (16, 16)),
    "half, qk and vo unequal": ((16, 48),) * 3,
}


def planned(widths: tuple[tuple[int, int], ...]) -> Plan:
    """The same head groups in every layer."""
    heads = tuple(HeadSpec(qk_dim=qk, vo_dim=vo, queries=3) for qk, vo in widths)
    return Plan(shape=stock_plan(CONFIG).shape, layers=(LayerPlan(heads=heads),) * LAYERS)


def forward(model: Any, ids: torch.Tensor) -> None:
    """One forward pass without gradients."""
    model.eval()
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)


def training_step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    """Loss, gradients and an update."""
    model.train()
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()


def passes(models: dict[str, Any]) -> dict[str, dict[str, Timing]]:
    """Forward and training times of several models, measured in turn."""
    ids = torch.randint(VOCAB, (TRAIN_BATCH, TRAIN_LENGTH))
    calls: dict[str, Callable[[], None]] = {n: partial(forward, m, ids) for n, m in models.items()}
    steps: dict[str, Callable[[], None]] = {
        n: partial(training_step, m, torch.optim.AdamW(m.parameters(), fused=True), ids)
        for n, m in models.items()
    }
    return {"forward": interleaved(calls), "training step": interleaved(steps)}


def decoding(models: dict[str, Any], *, static: bool) -> dict[str, Timing]:
    """Seconds per decoded token of the whole batch."""
    ids = torch.ones(DECODE_BATCH, 1, dtype=torch.long)
    sizes = (DECODE_BATCH, DECODE_CONTEXT)
    caches = {n: filled_cache(m, *sizes, static=static) for n, m in models.items()}
    return interleaved(
        {n: partial(decode_token, m, caches[n], ids, DECODE_CONTEXT) for n, m in models.items()}
    )


def compared(timings: dict[str, Timing], base: str, target: float, *, faster: bool) -> object:
    """Seconds, and each one's ratio to the base (or the base's to it, where more is better)."""
    reference = timings[base].median
    ratios = {n: t.median / reference for n, t in timings.items() if n != base}
    return {
        "seconds": {n: asdict(t) for n, t in timings.items()},
        "ratio": {n: 1 / r if faster else r for n, r in ratios.items()},
        "target": f"{'at least' if faster else 'at most'} {target} of {base}",
    }


def main() -> None:
    torch.manual_seed(0)
    stock = LlamaForCausalLM(CONFIG)
    uniform = convert(stock)
    mixed = {n: build_model(planned(w), config=CONFIG, seed=0) for n, w in EQUAL_FLOPS.items()}
    half = {n: build_model(planned(w), config=CONFIG, seed=0) for n, w in HALF_THE_BYTES.items()}
    dense = cost(planned(((64, 64),) * 3))
    assert all(cost(planned(w)).flops == dense.flops for w in EQUAL_FLOPS.values())
    assert all(2 * cost(planned(w)).kv_bytes == dense.kv_bytes for w in HALF_THE_BYTES.values())
    against_stock = passes({"stock": stock, "uniform plan": uniform})
    against_uniform = passes({"uniform plan": uniform, **mixed})
    decoders = {"dense": stock, "dense, as uniform plan": uniform, **half}
    decoders = {n: m.eval() for n, m in decoders.items()}
    tokens = {
        "growing cache": decoding(decoders, static=False),
        "static cache": decoding(decoders, static=True),
    }
    document = {
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "uniform": {n: compared(t, "stock", 1.05, faster=False) for n, t in against_stock.items()},
        "mixed": {
            n: compared(t, "uniform plan", 1.15, faster=False) for n, t in against_uniform.items()
        },
        "decoding": {n: compared(t, "dense", 1.3, faster=True) for n, t in tokens.items()},
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
