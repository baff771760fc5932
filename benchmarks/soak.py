"""Many small cuts in one process: memory, open files and threads must not grow.

    python benchmarks/soak.py --cuts 200

Every cut is the whole of `headwise.compress` (profile, plan, cut, recovery, verification, card,
report) of a tiny random Llama, into a folder that is then removed. Prints one JSON document with
what the process held along the way; exits with 1 if any of it grew after the first quarter.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import threading
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import headwise as hw
from headwise.data.text import read_source
from headwise.data.tokens import train_tokenizer
from headwise.memory import held

MOST_GROWTH = 16 * 2**20  # bytes from the first quarter to the end; one leaked model is 0.2 MiB
POINTS = 8  # at which is looked
VOCABULARY = 300


def write_model() -> None:
    """A tiny random model with a tokenizer, and a text."""
    text = "\n\n".join(read_source("builtin:python", max_chars=6_000).documents)
    Path("text.txt").write_text(text, encoding="utf-8")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes)
    LlamaForCausalLM(config).save_pretrained("model")
    train_tokenizer([text], VOCABULARY).save_pretrained("model")


def cut() -> None:
    """One compression, and its output removed."""
    sizes: dict[str, Any] = {"tokens": 128, "length": 16, "verify_tokens": 64, "multiple_of": 2}
    sizes["recover"] = 64  # four steps
    found = hw.compress("model", out="out", text="text.txt", attn_params="60%", **sizes)
    assert found.verification is not None
    for made in ("out", "out.cut", "out.profile"):
        shutil.rmtree(made)


def looked_at(cuts: int) -> dict[str, int]:
    """What the process holds now."""
    gc.collect()
    return {
        "cuts": cuts,
        "bytes": held(),
        "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": threading.active_count(),
        "kernel_threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
        "left_in_folder": len(list(Path().iterdir())),
    }


def grown(points: list[dict[str, int]]) -> list[str]:
    """What grew from the first quarter to the end."""
    first, last = points[len(points) // 4], points[-1]
    found = [n for n in first if n not in ("cuts", "bytes") and last[n] > first[n]]
    if last["bytes"] - first["bytes"] > MOST_GROWTH:
        found.append("bytes")
    return found


def main() -> int:
    """Cut again and again."""
    words = argparse.ArgumentParser()
    words.add_argument("--cuts", type=int, default=200)
    given = words.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    points = []
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        write_model()
        for i in range(1, given.cuts + 1):
            cut()
            if i * POINTS // given.cuts > (i - 1) * POINTS // given.cuts:
                points.append(looked_at(i))
                print(json.dumps(points[-1]), file=sys.stderr, flush=True)
    found = grown(points)
    print(json.dumps({"cuts": given.cuts, "grown": found, "points": points}, indent=2))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
