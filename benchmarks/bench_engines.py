"""Dense against cut in other engines: tokens per second and cache memory, row by row.

SmolLM2-135M's shape with random weights (how long a product takes does not depend on what it
multiplies) and a small vocabulary, dense and with three quarters and half of the cache, in

    llama.cpp       GGUF files in 16 bits: fewer head groups by layer (deci), narrower values
                    (mimo2), one width (llama)
    ONNX Runtime    graphs in 32 bits: heads of 64 and of 32 in turn by layer, heads of 32
    vLLM            the same in 32 bits, with `--vllm PYTHON` (`make test-vllm` makes one)

    python benchmarks/bench_engines.py --vllm .venv-vllm/bin/python

At every context, reading a prompt of that length (prefill) and then writing tokens one by one
(decode) are timed; the cache is weighed after both. The models of an engine take turns after one
warm-up each, until `--repeats` or `--seconds` for all of them; a row has the median and the spread.
In vLLM many prompts are also asked at once, where the cache's memory, just enough for one prompt of
the longest context in the dense model, binds how many run together. Rows are appended to the file
as they are measured, and the same command measures what is missing; `--table` prints the file as a
table. A busy machine tells nothing: every row has its load average.
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
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import headwise as hw
from headwise.data.text import read_source
from headwise.data.tokens import train_tokenizer
from headwise.plan import HeadSpec, LayerPlan, Plan

VOCABULARY = 4096
PROMPTS, PROMPT = 24, 192  # asked at once
BLOCK = 128  # tokens by which vLLM hands out its cache on CPUs
TOGETHER = f"{PROMPTS} prompts of {PROMPT}"


@dataclass(frozen=True)
class Form:
    """Query-key width, value width and head groups of each layer, in turn."""

    layers: tuple[tuple[int, int, int], ...]

    def plan(self, shape: Any, layers: int) -> Plan:
        """A plan of so many layers."""
        made = []
        for i in range(layers):
            qk, vo, groups = self.layers[i % len(self.layers)]
            planes = tuple(range(0, 32, 64 // qk))
            head = HeadSpec(qk_dim=qk, vo_dim=vo, queries=3, rotary_planes=planes)
            made.append(LayerPlan(heads=(head,) * groups))
        return Plan(shape=shape, layers=tuple(made))


DENSE = Form(((64, 64, 3),))
BY_LAYER = Form(((64, 64, 3), (32, 32, 3)))
NARROW = Form(((32, 32, 3),))
FORMS: dict[str, dict[str, Form]] = {
    "llama.cpp": {
        "dense": DENSE,
        "75%, head groups": Form(((64, 64, 3), (64, 64, 2), (64, 64, 2), (64, 64, 2))),
        "75%, values only": Form(((64, 32, 3),)),
        "50%, head groups": Form(((64, 64, 2), (64, 64, 1))),
        "50%, one width": NARROW,
    },
    "onnxruntime": {"dense": DENSE, "75%, by layer": BY_LAYER, "50%, one width": NARROW},
    "vllm": {"dense": DENSE, "75%, by layer": BY_LAYER, "50%, one width": NARROW},
}

Run = Callable[[int, int], tuple[float, float]]  # prompt, tokens ─► seconds of both steps


@dataclass(frozen=True)
class Runner:
    """A model in an engine."""

    run: Run
    cached: Callable[[int], int]  # bytes of the cache of so many tokens, left by the last run
    together: Callable[[], float] | None = None  # seconds of many prompts


def main() -> None:
    """Time what is asked for; rows come as they are measured."""
    asked = arguments()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(x) for x in asked.out.read_text().splitlines()] if asked.out.exists() else []
    if asked.table:
        print(table(done))
        return
    contexts = [int(x) for x in asked.contexts.split(",")]
    names = asked.engines.split(",") if asked.engines else [e for e in FORMS if e != "vllm"]
    names += ["vllm"] if asked.vllm and "vllm" not in names else []
    for engine in names:
        wanted: list[int | str] = [*contexts, *([TOGETHER] if engine == "vllm" else [])]
        have = {x["context"] for x in done if (x["engine"], x["layers"]) == (engine, asked.layers)}
        left = [x for x in wanted if x not in have]
        if not left:
            continue
        with TemporaryDirectory() as place, ExitStack() as stack:
            runners = {
                name: ENGINES[engine](
                    written(Path(place), i, form, asked.layers, max(PROMPT, *contexts)),
                    asked,
                    stack,
                )
                for i, (name, form) in enumerate(FORMS[engine].items())
            }
            for context in left:
                common = {"engine": engine, "layers": asked.layers, "context": context}
                rows = [common | row for row in measured(runners, context, asked)]
                with asked.out.open("a") as stream:
                    stream.writelines(json.dumps(row) + "\n" for row in rows)
                for row in rows:
                    print(json.dumps(row), flush=True)
                done += rows
    print(table(done))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8, help="SmolLM2 has 30")
    parser.add_argument("--contexts", default="256,1024,4096")
    parser.add_argument("--tokens", type=int, default=32, help="tokens written after each prompt")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=35, help="of an engine at a context")
    parser.add_argument("--engines", default="", help="llama.cpp,onnxruntime,vllm")
    parser.add_argument("--vllm", help="the Python that has vLLM")
    parser.add_argument("--table", action="store_true", help="only print what was measured")
    parser.add_argument("-o", "--out", type=Path, default=Path("build/engines.jsonl"))
    return parser.parse_args()


def written(place: Path, i: int, form: Form, layers: int, context: int) -> Path:
    """A model of this form, saved with a tokenizer."""
    from smollm2 import config
    from transformers import LlamaForCausalLM

    from headwise.models.build import build_model, stock_plan

    sizes = config(layers, vocab_size=VOCABULARY, positions=2 * context)
    folder = place / f"model-{i}"
    if form == DENSE:
        LlamaForCausalLM(sizes).save_pretrained(folder)
    else:
        plan = form.plan(stock_plan(sizes).shape, layers)
        build_model(plan, config=sizes, seed=0).save_pretrained(folder)
    text = "\n".join(read_source("builtin:python", max_chars=200_000).documents)
    train_tokenizer([text], VOCABULARY).save_pretrained(folder)
    return folder


def prompt_of(length: int, start: int = 0) -> list[int]:
    """Some tokens."""
    return [7 + (start + i) % 1000 for i in range(length)]


def llama_cpp(folder: Path, asked: argparse.Namespace, stack: ExitStack) -> Runner:
    """The model in llama.cpp, which tells its own times, and the size of a saved cache."""
    from headwise.exporting.llama_cpp import open_server, saved_bytes

    file = folder.with_suffix(".gguf")
    hw.export(folder, to="gguf", dtype="fp16", out=file, check=False)
    longest = max(int(x) for x in asked.contexts.split(","))
    server = open_server(file, longest + asked.tokens + 8, precise=False, states=folder)

    def run(prompt: int, tokens: int) -> tuple[float, float]:
        answer = server.handle_completions(
            {
                "prompt": prompt_of(prompt),
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        times = answer["timings"]
        return times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3

    return Runner(run, lambda _: saved_bytes(server))


def onnx_runtime(folder: Path, asked: argparse.Namespace, stack: ExitStack) -> Runner:
    """The model in ONNX Runtime."""
    from headwise.exporting.onnx_graph import Session

    out = folder.with_name(f"{folder.name}-onnx")
    hw.export(folder, to="onnx", out=out, check=False)
    session = Session(out)

    def run(prompt: int, tokens: int) -> tuple[float, float]:
        session.reset()
        start = time.perf_counter()
        session.read(prompt_of(prompt))
        middle = time.perf_counter()
        for i in range(tokens):
            session.read([9 + i])
        return middle - start, time.perf_counter() - middle

    return Runner(run, lambda _: sum(x.nbytes for x in session.past))


def vllm(folder: Path, asked: argparse.Namespace, stack: ExitStack) -> Runner:
    """The model in vLLM, in a process that answers line by line."""
    served = folder.with_name(f"{folder.name}-served")
    hw.export(folder, to="vllm", out=served, check=False)
    longest = max([PROMPT, *(int(x) for x in asked.contexts.split(","))]) + 2 * asked.tokens
    blocks = longest // BLOCK + 2  # one of them stays empty there
    pool = blocks * BLOCK * asked.layers * 2 * 3 * 64 * 4  # of the dense model, in 32 bits
    question = {
        "model": str(served),
        "trust": True,
        "serve": True,
        "longest": longest,
        "sequences": PROMPTS,
        "cache_bytes": pool,
    }
    errors = stack.enter_context(folder.with_suffix(".log").open("w+"))
    process = stack.enter_context(
        subprocess.Popen(
            [asked.vllm, str(Path(__file__).with_name("in_vllm.py")), json.dumps(question)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        )
    )
    given, answers = process.stdin, process.stdout
    assert given is not None
    assert answers is not None
    stack.callback(given.close)

    def told() -> dict[str, Any]:
        for line in answers:
            if line.startswith("FOUND"):
                return json.loads(line.removeprefix("FOUND"))
        errors.seek(0)
        raise SystemExit(errors.read()[-4000:])

    def ask(prompts: list[list[int]], new: int) -> dict[str, Any]:
        given.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        given.flush()
        return told()

    room = told()["room"]

    def run(prompt: int, tokens: int) -> tuple[float, float]:
        found = ask([prompt_of(prompt)], 1 + tokens)
        return found["first"], found["whole"] - found["first"]

    def together() -> float:
        return ask([prompt_of(PROMPT, k) for k in range(PROMPTS)], 2 * asked.tokens)["whole"]

    return Runner(run, lambda tokens: round(pool * tokens / room), together)


ENGINES: dict[str, Callable[[Path, argparse.Namespace, ExitStack], Runner]] = {
    "llama.cpp": llama_cpp,
    "onnxruntime": onnx_runtime,
    "vllm": vllm,
}


def measured(
    runners: dict[str, Runner], context: int | str, asked: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row for every model: in turns, after one warm-up each."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
    ends = time.monotonic() + asked.seconds
    for repeat in range(asked.repeats + 1):
        if repeat > 2 and time.monotonic() > ends:
            break
        for name, one in runners.items():
            rates = _rates(one, context, asked)
            if repeat:
                taken[name].append(rates)
    rows = []
    for name, one in runners.items():
        row: dict[str, Any] = {"model": name, "repeats": len(taken[name])}
        for what in taken[name][0]:
            row[what] = _spread([x[what] for x in taken[name]])
        length = PROMPT + 2 * asked.tokens if context == TOGETHER else int(context) + asked.tokens
        row["cache_bytes"] = one.cached(length)
        rows.append({**row, "load": round(os.getloadavg()[0], 2)})
    return rows


def _rates(one: Runner, context: int | str, asked: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of one go."""
    if context == TOGETHER:
        assert one.together is not None
        return {"written": PROMPTS * 2 * asked.tokens / one.together()}
    read, wrote = one.run(int(context), asked.tokens)
    return {"prefill": int(context) / read, "decode": asked.tokens / wrote}


def _spread(rates: Sequence[float]) -> dict[str, float]:
    found = {"median": statistics.median(rates), "low": min(rates), "high": max(rates)}
    return {name: round(value, 2) for name, value in found.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, each beside its dense model."""
    dense = {(x["engine"], x["layers"], x["context"]): x for x in rows if x["model"] == "dense"}
    lines = [
        "| engine | context | model | prefill, tokens/s | decode, tokens/s | cache |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        base = dense[row["engine"], row["layers"], row["context"]]
        whats = ("written",) if "written" in row else ("prefill", "decode")
        cells = [""] * (2 - len(whats)) + [_cell(row, base, what) for what in whats]
        share = row["cache_bytes"] / base["cache_bytes"]
        cells.append(f"{row['cache_bytes'] / 2**20:.2f} MiB ({share:.0%})")
        start = f"| {row['engine']} | {row['context']} | {row['model']} | "
        lines.append(start + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: dict[str, Any], base: dict[str, Any], what: str) -> str:
    own = row[what]
    ratio = own["median"] / base[what]["median"]
    digits = 1 if own["median"] < 100 else 0
    span = f"{own['low']:.{digits}f}–{own['high']:.{digits}f}"
    return f"{own['median']:.{digits}f} ({span}), {ratio:.2f}×"


if __name__ == "__main__":
    main()
