"""Dense against cut in other engines: tokens per second and cache memory, as one JSON document.

SmolLM2-135M's shape with random weights (how long a product takes does not depend on what it
multiplies), dense and cut to three quarters and to half of the cache, in

    llama.cpp       GGUF files in 16 bits: values only at 75%, one width at 50%
    ONNX Runtime    graphs in 32 bits of the same models
    vLLM            in 32 bits, `--vllm PYTHON`: at 75% half of the layers one width, half the other

At every context, reading a prompt of that length (prefill) and then writing tokens one by one
(decode) are timed. The models take turns, after a warm-up; medians and the spread of the repeats
are told, with the load average, since a busy machine tells nothing. For vLLM the time of many
prompts at once is told too, where the cache's memory (`--cache-mib`) binds how many run together.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM

import headwise as hw
from headwise.data.text import read_source
from headwise.data.tokens import trained_tokenizer
from headwise.exporting.llama_cpp import open_server
from headwise.exporting.onnx_graph import Session
from headwise.models.build import build_model, stock_plan
from headwise.plan import HeadSpec, LayerPlan, Plan

VOCABULARY = 4096
WIDTHS = {"dense": (64, 64), "75%": (64, 32), "50%": (32, 32)}  # query-key and value width


def main() -> None:
    """Time what is asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--contexts", default="256,1024,4096")
    parser.add_argument("--tokens", type=int, default=32, help="tokens written after each prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engines", default="llama.cpp,onnxruntime")
    parser.add_argument("--vllm", help="the Python that has vLLM, with --engines vllm")
    parser.add_argument("--prompts", type=int, default=32, help="prompts at once, with vLLM")
    parser.add_argument("--cache-mib", type=int, default=24, help="memory of vLLM's cache then")
    asked = parser.parse_args()
    contexts = [int(x) for x in asked.contexts.split(",")]
    found: dict[str, Any] = {"load": os.getloadavg(), "layers": asked.layers, "engines": {}}
    with TemporaryDirectory() as place:
        models = {n: written(Path(place), n, asked.layers, max(contexts)) for n in WIDTHS}
        found["cached_numbers_per_token"] = {n: cached(m) for n, m in models.items()}
        for engine in asked.engines.split(","):
            if engine == "vllm":
                found["engines"][engine] = vllm(Path(place), contexts, asked)
                continue
            runners = {n: ENGINES[engine](m, max(contexts), asked) for n, m in models.items()}
            found["engines"][engine] = {
                str(context): timed(runners, context, asked) for context in contexts
            }
    print(json.dumps(found, indent=2))


def cached(folder: Path) -> int:
    """The numbers that a token leaves in the cache."""
    layers = hw.open_source(folder).plan.layers
    return sum(layer.key_width + layer.value_width for layer in layers)


def written(place: Path, name: str, layers: int, context: int, widths: Sequence[int] = ()) -> Path:
    """A model of these widths, saved with a tokenizer; `widths` go by layer, in turn."""
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=2 * context,
        tie_word_embeddings=True,
    )
    folder = place / name.strip("%")
    if name == "dense":
        LlamaForCausalLM(config).save_pretrained(folder)
    else:
        sides = [(w, w) for w in widths] or [WIDTHS[name]]
        shape = stock_plan(config).shape
        plan = Plan(
            shape=shape, layers=tuple(_layer(*sides[i % len(sides)]) for i in range(layers))
        )
        build_model(plan, config=config, seed=0).save_pretrained(folder)
    text = "\n".join(read_source("builtin:python", max_chars=200_000).documents)
    trained_tokenizer([text], VOCABULARY).save_pretrained(folder)
    return folder


def _layer(qk: int, vo: int) -> LayerPlan:
    planes = tuple(range(0, 32, 64 // qk))
    return LayerPlan(heads=(HeadSpec(qk_dim=qk, vo_dim=vo, queries=3, rotary_planes=planes),) * 3)


Runner = Callable[[int, int], tuple[float, float]]  # prompt, tokens ─► seconds of both steps


def llama_cpp(folder: Path, context: int, asked: argparse.Namespace) -> Runner:
    """The model in llama.cpp, which tells its own times."""
    file = folder.with_suffix(".gguf")
    hw.export(folder, to="gguf", dtype="fp16", out=file, check=False)
    server = open_server(file, context + asked.tokens + 8, precise=False)

    def run(prompt: int, tokens: int) -> tuple[float, float]:
        answer = server.handle_completions(
            {
                "prompt": [7 + i % 1000 for i in range(prompt)],
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        times = answer["timings"]
        return times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3

    return run


def onnx_runtime(folder: Path, context: int, asked: argparse.Namespace) -> Runner:
    """The model in ONNX Runtime."""
    out = folder.with_name(f"{folder.name}-onnx")
    hw.export(folder, to="onnx", out=out, check=False)
    session = Session(out)

    def run(prompt: int, tokens: int) -> tuple[float, float]:
        session.reset()
        start = time.perf_counter()
        session.read([7 + i % 1000 for i in range(prompt)])
        middle = time.perf_counter()
        for i in range(tokens):
            session.read([9 + i])
        return middle - start, time.perf_counter() - middle

    return run


def vllm(place: Path, contexts: list[int], asked: argparse.Namespace) -> dict[str, Any]:
    """The models in vLLM, each in a process of its own: one prompt, and many at once."""
    found: dict[str, Any] = {str(c): {} for c in contexts} | {"together": {}}
    for name, widths in {"dense": (64,), "75%": (64, 32), "50%": (32,)}.items():
        folder = written(place / "vllm", name, asked.layers, max(contexts), widths)
        served = folder.with_name(f"{folder.name}-served")
        hw.export(folder, to="vllm", out=served, check=False)
        common = {"model": str(served), "trust": True, "repeats": asked.repeats}
        alone = _in_vllm(asked.vllm, {**common, "contexts": contexts, "new": asked.tokens})
        for context, pairs in alone["contexts"].items():
            found[context][name] = {
                "prefill": _rate([int(context) / a for a, _ in pairs[1:]]),
                "decode": _rate([asked.tokens / b for _, b in pairs[1:]]),
            }
        length = contexts[0]
        prompts = [[7 + (i + k) % 1000 for i in range(length)] for k in range(asked.prompts)]
        many = {"prompts": prompts, "new": asked.tokens, "sequences": asked.prompts, "repeats": 1}
        bound = {"cache_bytes": asked.cache_mib * 2**20}
        together = _in_vllm(asked.vllm, {**common, **many, **bound})
        written_tokens = asked.prompts * asked.tokens
        found["together"][name] = {
            "room": together["room"],
            "tokens_per_second": _rate([written_tokens / s for s in together["seconds"]]),
        }
    return found


def _in_vllm(python: str, asked: dict[str, Any]) -> dict[str, Any]:
    script = Path(__file__).with_name("in_vllm.py")
    command = [python, str(script), json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [x for x in done.stdout.splitlines() if x.startswith("FOUND")]
    if not lines:
        raise SystemExit(done.stderr[-4000:])
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("FOUND"))
    return found


ENGINES: dict[str, Callable[[Path, int, argparse.Namespace], Runner]] = {
    "llama.cpp": llama_cpp,
    "onnxruntime": onnx_runtime,
}


def timed(runners: dict[str, Runner], context: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of every model, in turns after one warm-up."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for repeat in range(asked.repeats + 1):
        for name, run in runners.items():
            took = run(context, asked.tokens)
            if repeat:
                seconds[name].append(took)
    return {
        name: {
            "prefill": _rate([context / a for a, _ in taken]),
            "decode": _rate([asked.tokens / b for _, b in taken]),
        }
        for name, taken in seconds.items()
    }


def _rate(rates: list[float]) -> dict[str, float]:
    return {"median": statistics.median(rates), "low": min(rates), "high": max(rates)}


if __name__ == "__main__":
    main()
