"""`compress` keeps one layer in memory, however many the model has: measured, with a control."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WIDTH, INNER = 384, 2048
LAYER = 4 * WIDTH * (4 * WIDTH + 3 * INNER) // 1024  # kilobytes
FEW, MANY = 3, 12

# Every cut runs in a process of its own, forked from one that has only imported: its peak starts
# at what that one holds.
CUTS = r"""
import json, os, re, sys
from pathlib import Path
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from headwise.cutting.run import CutRequest, cut_model
from headwise.cutting.settings import CutSettings
from headwise.models.build import convert
from headwise.source import open_source
from headwise.models.layer_stream import LayerStream
from headwise.plan import Budget, Limit
from headwise.planning.fit import fit
from headwise.planning.rules import WidthRules
from headwise.profiling.run import ProfileJob
from headwise.profiling.format import Profile
from headwise.profiling.run import profile_model
from headwise.profiling.settings import ProfileSettings
from headwise.profiling.source import Sequences, objective_of
from headwise.profiling.worth import fit_problem

width, inner, few, many = map(int, sys.argv[2:])
here = Path(sys.argv[1])

def forked(work, *args):
    ends = os.pipe()
    if os.fork() == 0:
        code = 1
        try:
            os.write(ends[1], json.dumps(work(*args)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(ends[1])
    with os.fdopen(ends[0]) as stream:
        said = stream.read()
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    return json.loads(said)

def prepared(n):
    torch.manual_seed(3)
    sizes = dict(hidden_size=width, intermediate_size=inner, num_attention_heads=6)
    config = LlamaConfig(num_hidden_layers=n, vocab_size=67, **sizes)
    model = LlamaForCausalLM(config)
    model.save_pretrained(here / f"{n}", max_shard_size="25MB")
    ids = np.random.default_rng(5).integers(4, 67, (16, 23))
    wrapped = convert(model)
    rows = Sequences(ids, objective_of(wrapped), "made up", "0" * 64)
    settings = ProfileSettings(length=23, tokens=ids.size, chunk=4)
    weights = open_source(here / f"{n}").weights_sha256
    profile_model(ProfileJob(wrapped, "tiny", rows, settings, weights), here / f"{n}.profile")

def peak():
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

def cut(n, keep):
    kept, load = [], LayerStream.load
    if keep:
        LayerStream.load = lambda stream, i: kept.append(load(stream, i)) or kept[-1]
    start = peak()
    profile = Profile.read(here / f"{n}.profile")
    task = fit_problem(profile, "sensitivity", WidthRules())
    plan = fit(task, Budget(attn_params=Limit(share=0.7))).plan
    narrow = [x.model_copy(update={"ffn_dim": 640}) for x in plan.layers]  # heads and MLPs are cut
    plan = plan.model_copy(update={"layers": tuple(narrow)})
    settings = CutSettings(batch_tokens=2 * 23, fit=3)  # eight batches: enough for a local fit
    request = CutRequest(open_source(here / f"{n}"), profile, plan, settings)
    record = cut_model(request, here / f"{n}.{keep}")
    assert any("fit" in layer for layer in record.layers)
    return peak() - start

for n in (few, many):
    forked(prepared, n)
print(json.dumps([forked(cut, few, 0), forked(cut, many, 0), forked(cut, many, 1)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's peak memory")
def test_four_times_the_layers_need_no_more_memory(tmp_path):
    sizes = map(str, (WIDTH, INNER, FEW, MANY))
    command = [sys.executable, "-c", CUTS, str(tmp_path), *sizes]
    # Freed tensors go back to the system at once: what is measured is what is held, not how the
    # allocator hoards in the first few layers.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    few, many, all_kept = json.loads(done.stdout)
    # Nine more layers, a hundred megabytes, must not show. What does grow is the profile, which is
    # in head space: less than a tenth of a layer for each.
    assert (MANY - FEW) * LAYER > 100_000
    assert many < few + 2 * LAYER
    assert all_kept > many + 5 * LAYER
