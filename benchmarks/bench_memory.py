"""The memory that every step expects, against what it took: random Llamas of three sizes.

    python benchmarks/bench_memory.py --sizes small medium large

Each step runs in a process of its own, forked from one that has only imported; its peak is what
the kernel counted. Prints one JSON document; exits with 1 if an estimate is more than 25% off.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import headwise as hw
import headwise.pipeline
from headwise import memory
from headwise.data.text import read_source
from headwise.data.tokens import train_tokenizer

MOST_OFF = 0.25
SIZES: dict[str, dict[str, Any]] = {  # about 100 MiB, 400 MiB and 1 GiB of weights
    "small": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6},
    "medium": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 7},
    "large": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 9},
}
VOCABULARY, LENGTH = 4096, 128


def write_model(name: str) -> None:
    """A random model with a tokenizer, beside its text."""
    text = "\n\n".join(read_source("builtin:python", max_chars=200_000).documents)
    Path("text.txt").write_text(text, encoding="utf-8")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        **SIZES[name],
    )
    LlamaForCausalLM(config).save_pretrained("model")
    train_tokenizer([text], VOCABULARY).save_pretrained("model")


def steps() -> dict[str, Callable[[], Any]]:
    """The steps, in an order in which each finds what it needs."""
    text: dict[str, Any] = {"text": "text.txt", "device": "cpu"}
    cut: dict[str, Any] = {
        "attn_params": "60%",
        "split": 0.0,
        "verify": False,
        "fit": 8,
        "recover": 0,
    }
    sizes: dict[str, Any] = {"tokens": 4096, "length": LENGTH}
    return {
        "profile": lambda: hw.profile("model", out="profile", **sizes, **text),
        "cut": lambda: hw.compress("model", out="cut", profile="profile", **sizes, **cut, **text),
        "verify": lambda: hw.verify(
            "cut", against="model", text="text.txt", tokens=2048, window=LENGTH, repeats=1
        ),
        "recover": lambda: hw.recover(
            "cut", against="model", out="recovered", tokens=1024, length=LENGTH, **text
        ),
    }


def measured(work: Callable[[], Any]) -> dict[str, int]:
    """The expected and the real peak of some work, in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            os.write(writing, json.dumps(_peaks(work)).encode())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read()
    assert os.waitpid(child, 0)[1] == 0
    found: dict[str, int] = json.loads(said)
    return found


def _peaks(work: Callable[[], Any]) -> dict[str, int]:
    expected = [0]
    check = memory.Need.check

    def noted(need: memory.Need, progress: Any, *, advice: str) -> Any:
        expected.append(need.peak)
        return check(need, progress, advice=advice)

    setattr(memory.Need, "check", noted)  # noqa: B010
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins here
    work()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return {"expected": max(expected), "peak": int(found[1]) * 1024}


def main() -> int:
    """Measure all steps of the sizes asked for."""
    words = argparse.ArgumentParser()
    words.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    words.add_argument("--keep", help="a folder for the models, kept")
    given = words.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    for name in given.sizes:
        folder = Path(given.keep or tempfile.mkdtemp()) / name
        folder.mkdir(parents=True, exist_ok=True)
        with chdir(folder):
            if not Path("model").exists():
                measured(lambda name=name: write_model(name))  # type: ignore[misc]
            for made in ("profile", "cut", "recovered"):
                shutil.rmtree(made, ignore_errors=True)
            weights = Path("model/model.safetensors").stat().st_size
            for step, work in steps().items():
                found = measured(work)
                off = found["expected"] / found["peak"] - 1
                rows.append({"weights": weights, "step": step, **found, "off": round(off, 3)})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if given.keep is None:
            shutil.rmtree(folder.parent)
    print(json.dumps({"most_off": MOST_OFF, "rows": rows}, indent=2))
    return 1 if any(abs(row["off"]) > MOST_OFF for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
