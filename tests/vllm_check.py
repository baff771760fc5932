"""`make test-vllm`: what is exported runs in real vLLM on the CPU.

Run by headwise's own Python with the path of a Python that has vLLM:

    .venv/bin/python tests/vllm_check.py .venv-vllm/bin/python

Small random models are exported, and vLLM continues a prompt. Tokens must be ours, their
log-probabilities within 1e-4 nats, and the cache must hold as many more tokens in the same memory
as the plan says. Portable plans run in vLLM's own classes, all others in headwise's class through
its transformers backend. The last line is a control: a model with a wrong weight must not agree.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

import headwise as hw
from headwise.data.text import read_source
from headwise.data.tokens import train_tokenizer
from headwise.models.build import convert, plan_of
from headwise.models.slicing import sliced
from headwise.planning.fit import Kept
from headwise.planning.targets import served_width
from tests import tiny
from tests.exporting.portable import FULL, portable, saved

WORDS, CONTEXT = 293, 256
SIZES = {"head_dim": 64, "hidden_size": 96, "vocab_size": WORDS, "scale": 0.08}
LLAMA = {**SIZES, "max_position_embeddings": CONTEXT}
PROMPT = list(range(10, 40))
NEW = 12
HALF = (*range(0, 30, 2), 31)  # half of the planes; its CPU kernels take heads of 32
SCRIPT = Path(__file__).parents[1] / "benchmarks/in_vllm.py"


def by_layer(name: str, **changes: Any) -> Any:
    """A small model whose layers have heads of 64 and of 32 in turn."""
    return narrowed(convert(tiny.stock(name, **changes)), every=2)


def narrowed(model: Any, every: int) -> Any:
    """A model with narrower heads in some layers, each head with planes of its own."""
    kept = []
    for i, layer in enumerate(plan_of(model).layers):
        row = []
        for j, head in enumerate(layer.heads):
            planes = len(head.rotary_planes or ())
            free = head.qk_dim - 2 * planes
            if i % every == every - 1:  # the second head's keys are narrower still
                own = range(j % 2, planes, 2)[: 12 if j == 1 else 16]
                row.append(Kept(own, range(0, free, 2), range(0, 64, 2)))
            else:
                row.append(Kept(range(planes), range(free), range(64)))
        kept.append(row)
    return sliced(model, kept)


def smollm2() -> Any:
    """Real weights with every second layer narrowed: 75% of the cache. Nothing is fitted."""
    source = hw.open_source("builtin:smollm2")
    return narrowed(convert(source.load(device="cpu", dtype="fp32"), weights="take"), every=2)


def models() -> dict[str, Callable[[], Any]]:
    """What is served, by name."""
    gpt2 = {"n_embd": 128, "n_head": 2, "n_positions": CONTEXT, "vocab_size": WORDS, "scale": 0.08}
    return {
        "dense llama": lambda: portable("llama", None, 64, **LLAMA),
        "llama, one width": lambda: portable("llama", HALF, 32, **LLAMA),
        "qwen2, one width": lambda: portable("qwen2", HALF, 32, **LLAMA, **FULL),
        "mistral, one width": lambda: portable("mistral", HALF, 32, **LLAMA, sliding_window=None),
        "llama, widths by layer": lambda: by_layer("llama", **LLAMA),
        "qwen2, widths by layer": lambda: by_layer("qwen2", **LLAMA, **FULL),
        "mistral, widths by layer": lambda: by_layer("mistral", **LLAMA, sliding_window=None),
        "gpt2, widths by layer": lambda: by_layer("gpt2", **gpt2),
        "SmolLM2 at 75%, widths by layer": smollm2,
    }


def in_vllm(python: str, folder: Path, **asked: Any) -> dict[str, Any]:
    """What vLLM says of a folder."""
    given = {"model": str(folder), "prompts": [PROMPT], "new": NEW, "trust": True, **asked}
    settings = {"VLLM_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(
        [python, str(SCRIPT), json.dumps(given)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **settings},
    )
    lines = [x for x in done.stdout.splitlines() if x.startswith("FOUND")]
    if not lines:
        raise SystemExit(done.stderr[-6000:])
    return json.loads(lines[-1].removeprefix("FOUND"))


def expected(model: Any) -> tuple[list[int], list[float]]:
    """Our own continuation and its log-probabilities."""
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        own = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        scores = model(own).logits[0].double().log_softmax(-1)
    tokens = own[0, len(PROMPT) :].tolist()
    return tokens, [float(scores[len(PROMPT) - 1 + i, t]) for i, t in enumerate(tokens)]


def cached(folder: Path) -> int:
    """The numbers that a token leaves in a cache with one width per layer."""
    plan = hw.open_source(folder).plan
    return sum(2 * served_width(layer, plan) * len(layer.heads) for layer in plan.layers)


def main() -> None:
    python, only = sys.argv[1], sys.argv[2:]
    text = "\n".join(read_source("builtin:python", max_chars=20_000).documents)
    tokenizer = train_tokenizer([text], WORDS)
    pools: dict[str, float] = {}  # numbers that fit, which is the same memory for all
    with TemporaryDirectory() as temporary:
        place = Path(temporary)
        for name, make in models().items():
            if only and name not in only:
                continue
            model = make()
            limit = 1e-3 if make is smollm2 else 1e-4  # 30 layers add up more rounding
            folder = saved(model, place / name.replace(" ", "-").replace(",", ""))
            own = hw.open_source("builtin:smollm2").tokenizer if make is smollm2 else tokenizer
            own.save_pretrained(folder)
            served = folder.with_name(f"{folder.name}-served")
            made = hw.export(folder, to="vllm", out=served)
            assert made.held, made.parity
            found = in_vllm(python, served)
            tokens, scores = expected(model)
            error = max(abs(a - b) for a, b in zip(scores, found["logprobs"][0], strict=True))
            print(
                f"{name} (as {made.record.architecture}): {NEW} tokens agree, log-probabilities "
                f"within {error:.1e} nats, room for {found['room']:,} tokens in 256 MiB, "
                f"{cached(folder)} numbers each",
                flush=True,
            )
            assert found["tokens"][0] == tokens, (name, found["tokens"], tokens)
            assert error < limit, (name, error)
            pools[name] = found["room"] * cached(folder)
        if not pools:
            raise SystemExit(f"{only} names no model; there are {', '.join(models())}.")
        least, most = min(pools.values()), max(pools.values())
        print(
            f"Tokens times numbers per token differ by {most / least - 1:.2%} between the models."
        )
        assert most < 1.02 * least, pools
        control(python, place, tokenizer)


def control(python: str, place: Path, tokenizer: Any) -> None:
    """Scores of one layer that are scaled wrongly must show."""
    model = by_layer("llama", **LLAMA)
    folder = saved(model, place / "control")
    tokenizer.save_pretrained(folder)
    hw.export(folder, to="vllm", out=place / "control-served", check=False)
    file = place / "control-served/model.safetensors"
    weights = load_file(file)
    weights["backbone.model.layers.1.self_attn.q_proj.weight"] *= 1.5
    save_file(weights, file, metadata={"format": "pt"})
    found = in_vllm(python, place / "control-served")
    tokens, scores = expected(model)
    error = max(abs(a - b) for a, b in zip(scores, found["logprobs"][0], strict=True))
    assert found["tokens"][0] != tokens or error > 1e-3, error
    print(f"Control, scores scaled wrongly: {error:.1e} nats apart.")


if __name__ == "__main__":
    main()
