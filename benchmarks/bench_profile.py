"""A profile's chunk against a plain forward and backward on the same text, as one JSON document.

Heads and neurons are profiled in the same pass. The two take turns, and the ratio is taken round by
round, so that a slow moment strikes both; its quartiles tell how quiet the machine was.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from smollm2 import config
from timing import rounds, spread
from transformers import LlamaForCausalLM

from headwise.models.build import convert
from headwise.profiling.run import ProfileJob, measure_chunks
from headwise.profiling.settings import ProfileSettings
from headwise.profiling.source import Sequences
from headwise.runs import Run

LENGTH, SEQUENCES = 512, 2


def stock_model() -> Any:
    """The widths of SmolLM2-135M with random weights; fewer layers and a smaller vocabulary."""
    torch.manual_seed(0)
    return LlamaForCausalLM(config(4, vocab_size=8192, positions=2048)).eval()


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
    calls = {"plain": lambda: plain(stock, ids), "profile": lambda: profiled(job)}
    seconds = rounds(calls, repeats=9, warmup=1)
    ratios = [b / a for a, b in zip(seconds["plain"], seconds["profile"], strict=True)]
    document = {
        "tokens": rows.size,
        "seconds": {name: asdict(spread(values)) for name, values in seconds.items()},
        "ratio": asdict(spread(ratios)),
        "ratio_target": 1.5,
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
