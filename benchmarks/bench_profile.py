"""A profile's chunk against a plain forward and backward on the same text, as one JSON document."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import interleaved
from transformers import LlamaConfig, LlamaForCausalLM

from headwise.models.build import convert
from headwise.profiling.run import ProfileJob, measure_chunks
from headwise.profiling.settings import ProfileSettings
from headwise.profiling.source import Sequences
from headwise.runs import Run

LENGTH, SEQUENCES = 512, 2


def stock_model() -> Any:
    """The widths of SmolLM2-135M with random weights; fewer layers and a smaller vocabulary."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def plain(model: Any, ids: torch.Tensor) -> None:
    """Forward, mean loss, backward to every parameter."""
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def profiled(job: ProfileJob) -> None:
    """The same text as one chunk of a profile, its file written."""
    with tempfile.TemporaryDirectory() as folder:
        measure_chunks(job, Run(Path(folder), Path(folder), ""))


def main() -> None:
    torch.set_num_threads(1)
    stock = stock_model()
    rows = np.random.default_rng(0).integers(0, 8192, (SEQUENCES, LENGTH))
    job = ProfileJob(
        convert(stock),
        "random",
        Sequences(rows, "next-token", "random", "0" * 64),
        ProfileSettings(length=LENGTH, tokens=rows.size, chunk=SEQUENCES),
    )
    ids = torch.from_numpy(rows)
    timings = interleaved(
        {"plain": lambda: plain(stock, ids), "profile": lambda: profiled(job)}, repeats=5, warmup=1
    )
    document = {
        "tokens": rows.size,
        "seconds": {name: asdict(timing) for name, timing in timings.items()},
        "ratio": timings["profile"].median / timings["plain"].median,
        "ratio_target": 1.5,
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
