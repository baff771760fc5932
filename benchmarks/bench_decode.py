"""What a smaller key-value cache is worth when decoding, as one JSON document of ratios.

SmolLM2-135M's shape (30 layers, 576 wide, 9 query heads on 3 key/value heads, 64 wide) with random
weights: how long a product takes does not depend on what it multiplies. Five models take turns:

    stock            the Llama of transformers
    dense plan       the same model with headwise's attention, nothing cut
    75%, 50%         layer plans with these shares of the cache: one width per layer for queries
                     and keys, another for values, each head with rotary planes of its own
    50%, qk = vo     the same share with equal widths

at these points, in float32 and in bfloat16:

    prefill          one sequence of 512 tokens
    decode 1 × 128   one more token of one sequence, after 128
    decode 16 × N    one more token of 16 sequences, after 1024 and after 4096, with a static cache
                     (allocated once) and with a growing one (copied at every token)

Caches are filled with noise. Ratios are speeds: above 1 is faster than the model it is compared
with. The load average tells how quiet the machine was; on a busy one use --cpu-time, which counts
the process's own time on one thread.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from smollm2 import config, decode_token, filled_cache
from timing import Timing, interleaved
from transformers import Cache, LlamaForCausalLM

from headwise.models.build import build_model, convert, stock_plan
from headwise.plan import HeadSpec, LayerPlan, Plan
from headwise.planning.cost import cost

# (qk_dim, vo_dim) of successive layers, repeated; each list has the stated share of 64 + 64.
WIDTHS = {
    "75%": ((48, 48), (56, 40), (40, 56), (64, 32), (32, 64), (48, 48)),
    "50%": ((32, 32), (40, 24), (24, 40), (48, 16), (16, 48), (32, 32)),
    "50%, qk = vo": ((32, 32),),
}
SHARES = {"75%": 0.75, "50%": 0.5, "50%, qk = vo": 0.5}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PREFILL = 512
NEVER_SLOWER, HALF_THE_CACHE = 0.98, 1.6  # the targets


def planned(widths: tuple[tuple[int, int], ...], layers: int) -> Plan:
    """One pair of widths per layer; every head keeps planes of its own, as a fitted plan does."""
    draw = random.Random(0)

    def head(qk: int, vo: int) -> HeadSpec:
        planes = tuple(sorted(draw.sample(range(32), qk // 2)))
        return HeadSpec(qk_dim=qk, vo_dim=vo, queries=3, score_scale=0.125, rotary_planes=planes)

    made = [
        LayerPlan(heads=tuple(head(*widths[i % len(widths)]) for _ in range(3)))
        for i in range(layers)
    ]
    return Plan(shape=stock_plan(config(layers)).shape, layers=tuple(made))


def models(layers: int, dtype: torch.dtype) -> dict[str, Any]:
    """The models that take turns."""
    torch.manual_seed(0)
    stock: Any = LlamaForCausalLM(config(layers))
    stock = stock.to(dtype)
    dense = cost(stock_plan(config(layers)))
    found: dict[str, Any] = {"stock": stock, "dense plan": convert(stock, weights="share")}
    for name, widths in WIDTHS.items():
        plan = planned(widths, layers)
        if layers % 6 == 0:
            assert cost(plan).kv_bytes == SHARES[name] * dense.kv_bytes
        found[name] = build_model(plan, config=config(layers), seed=0, dtype=dtype)
    return {name: model.eval() for name, model in found.items()}


def prefill(model: Any, ids: torch.Tensor) -> None:
    """A whole prompt at once; logits of its last token only, as when generating."""
    with torch.inference_mode():
        model(input_ids=ids, use_cache=True, logits_to_keep=1)


def prefills(which: dict[str, Any]) -> dict[str, Callable[[], None]]:
    """A call per model."""
    ids = torch.arange(PREFILL)[None]
    return {name: partial(prefill, model, ids) for name, model in which.items()}


def decoders(
    which: dict[str, Any], batch: int, context: int, *, static: bool
) -> dict[str, Callable[[], None]]:
    """A call per model; stock and dense plan have caches of one shape and share one."""
    ids = torch.ones(batch, 1, dtype=torch.long)
    calls: dict[str, Callable[[], None]] = {}
    shared: Cache | None = None
    for name, model in which.items():
        if name in ("stock", "dense plan"):
            shared = shared or filled_cache(model, batch, context, static=static)
            cache = shared
        else:
            cache = filled_cache(model, batch, context, static=static)
        calls[name] = partial(decode_token, model, cache, ids, context)
    return calls


def compared(timings: dict[str, Timing]) -> dict[str, object]:
    """Seconds, and each model's speed against the stock model and against the dense plan."""
    return {
        "seconds": {name: asdict(t) for name, t in timings.items()},
        **{
            f"speed ÷ {base}": {
                name: round(timings[base].median / t.median, 3)
                for name, t in timings.items()
                if name != base
            }
            for base in ("stock", "dense plan")
        },
    }


def judged(found: dict[str, dict[str, Any]]) -> dict[str, object]:
    """The targets beside the worst that was found."""
    cuts = tuple(WIDTHS)
    slowest = min(
        (point["speed ÷ stock"][cut], where, cut) for where, point in found.items() for cut in cuts
    )
    verdict: dict[str, object] = {
        f"no point slower than {NEVER_SLOWER} of stock": (slowest[0] >= NEVER_SLOWER, *slowest)
    }
    for where, point in found.items():
        if "16 × 4096" in where:
            base = "dense plan" if "static" in where else "stock"
            speed = point[f"speed ÷ {base}"]["50%"]
            key = f"{where}: half the cache at least {HALF_THE_CACHE} of {base}"
            verdict[key] = (speed >= HALF_THE_CACHE, speed)
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding speed of layer plans.")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--points", default="", help="only points whose name contains this")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, the process's time")
    given = parser.parse_args()
    if given.cpu_time:
        torch.set_num_threads(1)
    clock = time.process_time if given.cpu_time else time.perf_counter
    found: dict[str, dict[str, Any]] = {}
    for dtype in given.dtype or DTYPES:
        which = models(given.layers, DTYPES[dtype])
        points: dict[str, Callable[[], dict[str, Callable[[], None]]]] = {
            f"prefill {PREFILL}, {dtype}": partial(prefills, which)
        }
        for batch, context in ((1, 128), (16, 1024), (16, 4096)):
            for static in (True, False):
                kind = "static" if static else "growing"
                points[f"decode {batch} × {context}, {kind} cache, {dtype}"] = partial(
                    decoders, which, batch, context, static=static
                )
        for name, calls in points.items():
            if given.points in name:
                many = given.repeats * (3 if "1 × 128" in name else 1)
                found[name] = compared(interleaved(calls(), repeats=many, clock=clock))
    document = {
        "layers": given.layers,
        "threads": torch.get_num_threads(),
        "clock": "process" if given.cpu_time else "wall",
        "load_average": os.getloadavg()[0],
        "points": found,
        "targets": judged(found),
    }
    print(json.dumps(document, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
