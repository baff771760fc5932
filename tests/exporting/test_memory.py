"""`export` keeps one layer in memory, however many the model has: measured, with a control."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from headwise.models.build import convert
from tests import tiny
from tests.exporting.portable import WORDS, with_tokenizer

WIDTH, INNER = 384, 2048
LAYER = 4 * WIDTH * (4 * WIDTH + 3 * INNER) // 1024  # kilobytes
FEW, MANY = 3, 12

# Every export runs in a process of its own, forked from one that has only imported and exported
# once: its peak starts at what that one holds.
EXPORTS = r"""
import json, os, re, sys
from pathlib import Path
import headwise as hw
from headwise.exporting.reading import Reader

here, few, many = Path(sys.argv[1]), *sys.argv[2:]

def forked(*args):
    ends = os.pipe()
    if os.fork() == 0:
        code = 1
        try:
            os.write(ends[1], json.dumps(export(*args)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(ends[1])
    with os.fdopen(ends[0]) as stream:
        said = stream.read()
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    return json.loads(said)

def peak():
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

def export(target, n, keep):
    kept, layer = [], Reader.layer
    if keep:
        Reader.layer = lambda reader, i: kept.append(layer(reader, i)) or kept[-1]
    source = "cut" if target in ("padded", "vllm") else "dense"
    out = here / f"{target}-{n}-{keep}.gguf"
    start = peak()
    hw.export(here / f"{source}-{n}", to=target, check=False, out=out)
    return peak() - start

found = {}
for target in ("stock", "padded", "vllm", "gguf"):
    hw.export(
        here / ("cut-1" if target in ("padded", "vllm") else "dense-1"),
        to=target, check=False, out=here / f"{target}-first.gguf",
    )
    found[target] = [forked(target, few, 0), forked(target, many, 0), forked(target, many, 1)]
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's peak memory")
def test_four_times_the_layers_need_no_more_memory(tokenizer, tmp_path):
    for n in (1, FEW, MANY):
        config = transformers.LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_attention_heads=6,
            num_hidden_layers=n,
            vocab_size=WORDS,
        )
        dense = transformers.LlamaForCausalLM(config)
        with_tokenizer(dense, tokenizer, tmp_path / f"dense-{n}")
        with_tokenizer(tiny.narrowed(convert(dense)), tokenizer, tmp_path / f"cut-{n}")
    # Freed tensors go back to the system at once: what is measured is what is held.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", EXPORTS, str(tmp_path), str(FEW), str(MANY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert (MANY - FEW) * LAYER > 100_000
    for target, (few, many, all_kept) in json.loads(done.stdout.splitlines()[-1]).items():
        assert many < few + 2 * LAYER, target
        assert all_kept > many + 4 * LAYER, target  # cut layers are smaller
