"""A profile is the same to the last bit whoever computes it, however often it is killed."""

import json
import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from accelerate import cpu_offload

from headwise.data.text import Text
from headwise.errors import HeadwiseError, OutputError
from headwise.profiling.format import RECORD, TENSORS, Profile
from headwise.profiling.run import (
    ProfileJob,
    chunk_name,
    measure_chunks,
    profile_model,
    write_profile,
)
from headwise.profiling.settings import ProfileSettings
from headwise.profiling.source import load_for_profiling, sequences
from headwise.runs import Run, partial_of, resume
from headwise.source import open_source
from tests import lanes, tiny

WORDS = "the quick brown fox jumps over the lazy dog and runs away from seven small wolves "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model folder with its tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("checkpoint")
    rng = random.Random(3)
    text = " ".join(rng.choice(WORDS.split()) for _ in range(900))
    return tiny.write_llama(folder, text=text)


def job_of(checkpoint, **changes):
    source = open_source(checkpoint / "model")
    model, words = load_for_profiling(source, device="cpu"), source.reader
    text = (checkpoint / "text.txt").read_text()
    settings = ProfileSettings(**({"length": 17, "tokens": 17 * 23, "chunk": 3} | changes))
    rows = sequences(model, words, Text("text.txt", (text,)), settings)
    return ProfileJob(model, "model", rows, settings)


def files(folder):
    return {name: (folder / name).read_bytes() for name in (RECORD, TENSORS)}


def opened(job, output):
    return resume(output, "profile", job.inputs(), record=RECORD)


def in_a_process(work) -> int:
    """Run `work` in a real process of its own; returns its id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(checkpoint, tmp_path, monkeypatch):
    """Every life is killed just before or just after it saves a chunk, drawn from a seed."""
    job = job_of(checkpoint)
    profile_model(job, tmp_path / "whole")
    output, rng, killed, put = tmp_path / "killed", random.Random(7), 0, Run.put
    while not output.exists():
        left, saves = rng.randint(0, 2), rng.random() < 0.5

        def dies(run, *part, left=left, saves=saves, seen=[]):  # noqa: B006 (of one life)
            seen.append(part)
            if len(seen) > left and not saves:
                os.kill(os.getpid(), signal.SIGKILL)
            put(run, *part)
            if len(seen) > left:
                os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(Run, "put", dies)
        _, status = os.waitpid(in_a_process(lambda: profile_model(job, output)), 0)
        assert os.waitstatus_to_exitcode(status) == (0 if output.exists() else -signal.SIGKILL)
        killed += not output.exists()
    assert killed >= 3
    assert files(output) == files(tmp_path / "whole")


@pytest.mark.slow
def test_processes_share_the_chunks(checkpoint, tmp_path):
    job = job_of(checkpoint)
    profile_model(job, tmp_path / "one")
    for n in (2, 5)[: 1 if lanes.is_fast else 2]:
        output = tmp_path / f"of_{n}"
        with opened(job, output) as run:
            for rank in reversed(range(n)):
                measure_chunks(job, run, rank=rank, processes=n)
            write_profile(job, run, job.inputs())
        assert files(output) == files(tmp_path / "one")
        assert not partial_of(output).exists()


RUN = """
import sys
import typer
from headwise.cli.compress import profile
app = typer.Typer()
app.command()(profile)
app()
"""


@pytest.mark.slow
def test_torchrun_gives_the_same_files_as_one_process(checkpoint, tmp_path):
    (tmp_path / "run.py").write_text(RUN)
    options = ["--length", "17", "--tokens", "391", "--chunk", "3", "--device", "cpu", "--json"]
    where = [str(checkpoint / "model"), "--text", str(checkpoint / "text.txt")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    torchrun += ["--master_port", str(random.Random(os.getpid()).randint(20000, 50000))]
    command = [*torchrun, str(tmp_path / "run.py"), *where, *options, "-o", str(tmp_path / "two")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)  # one document, from one process
    source = open_source(where[0])
    model, words = load_for_profiling(source, device="cpu"), source.reader
    settings = ProfileSettings(length=17, tokens=391, chunk=3)
    text = Text(where[2], ((checkpoint / "text.txt").read_text(),))
    rows = sequences(model, words, text, settings)
    job = ProfileJob(model, where[0], rows, settings, source.weights_sha256)
    profile_model(job, tmp_path / "one")
    assert files(tmp_path / "two") == files(tmp_path / "one")


@pytest.mark.slow
def test_the_size_of_a_chunk_is_only_rounding(checkpoint, tmp_path):
    small = profile_model(job_of(checkpoint, chunk=1), tmp_path / "small")
    large = profile_model(job_of(checkpoint, chunk=23), tmp_path / "large")
    assert small.record.sequences == 23
    for name in ("vo_energy", "plane_sensitivity", "z_moment", "entropy"):
        assert small.get(1, name) == pytest.approx(large.get(1, name), rel=1e-3, abs=1e-7)


@pytest.mark.slow
def test_a_broken_chunk_is_measured_again(checkpoint, tmp_path):
    job = job_of(checkpoint)
    profile_model(job, tmp_path / "whole")
    output = tmp_path / "out"
    with opened(job, output) as run:
        measure_chunks(job, run)
        broken = run.path(chunk_name(2))
        broken.write_bytes(broken.read_bytes()[:-7])
    profile_model(job, output)
    assert files(output) == files(tmp_path / "whole")


def test_another_runs_chunks_are_refused(checkpoint, tmp_path):
    output = tmp_path / "out"
    with opened(job_of(checkpoint), output) as run:
        run.put(chunk_name(0), {"x": np.ones(1)})
    other = job_of(checkpoint, length=19)
    with pytest.raises(OutputError, match=r"differs in sequences \(23 → 20\), settings\.length"):
        profile_model(other, output)
    profile_model(other, output, force=True)
    with pytest.raises(OutputError, match="exists already"):
        profile_model(other, output)


@pytest.mark.slow
def test_a_device_map_changes_nothing(checkpoint, tmp_path):
    profile_model(job_of(checkpoint), tmp_path / "plain")
    source = open_source(checkpoint / "model")
    model = load_for_profiling(source, device="cpu", device_map={"": "cpu"})
    job = job_of(checkpoint)
    profile_model(ProfileJob(model, job.name, job.sequences, job.settings), tmp_path / "mapped")
    assert files(tmp_path / "plain") == files(tmp_path / "mapped")


@pytest.mark.slow
def test_weights_kept_elsewhere_change_nothing(checkpoint, tmp_path):
    """As with device_map="auto" and too little room on the device."""
    job = job_of(checkpoint)
    profile_model(job, tmp_path / "plain")
    offloaded = cpu_offload(job.model, execution_device="cpu")
    assert all(p.device.type == "meta" for p in offloaded.parameters())
    away = ProfileJob(offloaded, job.name, job.sequences, job.settings)
    profile_model(away, tmp_path / "away")
    assert files(tmp_path / "plain") == files(tmp_path / "away")


@pytest.mark.slow
def test_low_precision_models_are_summed_in_single_precision(checkpoint, tmp_path):
    exact = profile_model(job_of(checkpoint), tmp_path / "fp32")
    job = job_of(checkpoint)
    rough = profile_model(
        ProfileJob(job.model.to(torch.bfloat16), job.name, job.sequences, job.settings),
        tmp_path / "bf16",
    )
    assert rough.get(0, "vo_energy") == pytest.approx(exact.get(0, "vo_energy"), rel=0.1, abs=1e-6)


def test_broken_weights_are_named(checkpoint, tmp_path):
    job = job_of(checkpoint)
    job.model.attentions()[1].v_proj.weight.data[0, 3] = torch.nan
    with pytest.raises(HeadwiseError, match=r"layers\.1\.self_attn\.v_proj.* must be finite"):
        profile_model(job, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_is_named(checkpoint, tmp_path, monkeypatch):
    job = job_of(checkpoint)
    head = job.model.get_output_embeddings()
    head.register_forward_hook(lambda m, x, out: out * torch.nan)
    with pytest.raises(HeadwiseError, match="loss on sequences 0 to 2 must be finite"):
        profile_model(job, tmp_path / "out")


def test_text_and_length_must_fit(checkpoint):
    source = open_source(checkpoint / "model")
    model, words = load_for_profiling(source, device="cpu"), source.reader
    with pytest.raises(HeadwiseError, match=r"has \d tokens, but one sequence needs 17"):
        sequences(model, words, Text("short", ("dog",)), ProfileSettings(length=17))
    with pytest.raises(HeadwiseError, match="at most the model's context of 64 tokens, got 65"):
        job_of(checkpoint, length=65)
    with pytest.raises(HeadwiseError, match="length of at least 4"):
        ProfileSettings(length=3)


def test_broken_profiles_are_one_sentence(checkpoint, tmp_path):
    folder = tmp_path / "p"
    with pytest.raises(HeadwiseError, match="is not a profile"):
        Profile.read(folder)
    profile_model(job_of(checkpoint), folder)
    whole = files(folder)
    assert Profile.read(folder).sha256 == Profile.read(folder).sha256
    (folder / TENSORS).write_bytes(whole[TENSORS][:-5])
    with pytest.raises(HeadwiseError, match="truncated, changed"):
        Profile.read(folder)
    (folder / TENSORS).unlink()
    with pytest.raises(HeadwiseError, match=r"cannot be read|does not exist"):
        Profile.read(folder)
    for content, message in (
        (whole[RECORD][:50], "holds invalid JSON"),
        (b'{"format": "headwise-profile/9"}', "got 'headwise-profile/9'"),
        (whole[RECORD].replace(b'"loss"', b'"lost"'), "is not valid: unknown key"),
    ):
        (folder / RECORD).write_bytes(content)
        with pytest.raises(HeadwiseError, match=message):
            Profile.read(folder)


def test_a_profile_holds_its_sequences(checkpoint, tmp_path):
    job = job_of(checkpoint)
    profile = profile_model(job, tmp_path / "p")
    assert profile.ids.dtype == np.int64
    assert np.array_equal(profile.ids, job.sequences.inputs)


def test_lengths_double():
    assert ProfileSettings(length=512).lengths == (4, 8, 16, 32, 64, 128, 256, 512)
    assert ProfileSettings(length=17).lengths == (4, 8, 16, 17)
    assert ProfileSettings(length=4).lengths == (4,)
    assert np.all(np.diff(ProfileSettings(length=700).lengths) > 0)


def test_a_profile_of_text_holds_what_it_always_held(checkpoint, tmp_path):
    """Profiles that lie on people's disks stay readable, and new ones have the same hash."""
    profile = profile_model(job_of(checkpoint), tmp_path / "p")
    written = json.loads((tmp_path / "p" / RECORD).read_text())
    assert sorted(written) == sorted(
        [
            "centred",
            "device",
            "dtype",
            "fixed_groups",
            "format",
            "key",
            "lengths",
            "loss",
            "model",
            "notes",
            "objective",
            "plan",
            "qk_whole",
            "sequences",
            "settings",
            "tensors",
            "tensors_sha256",
            "text",
            "tokens",
            "versions",
            "weights_sha256",
        ]
    )
    assert written["format"] == "headwise-profile/1"
    assert set(written["text"]) == {"source", "sha256"}
    assert [n for n in written["tensors"] if not n.startswith("layers.")] == ["ids"]
    assert profile.tensors["ids"].dtype == np.int32
    assert profile.inputs[0] == "input_ids"
    assert np.array_equal(profile.inputs[1], profile.ids)
    assert profile.record.calibration.to_dict() == {
        "source": "text.txt",
        "sha256": written["text"]["sha256"],
        "tokens": 23 * 17,
    }
