"""A cut model learns back from its source, and nothing but its attention changes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

import headwise as hw
from headwise.data.tokens import token_stream
from tests import tiny

KILLED = Path(__file__).with_name("killed_after.py")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny model that has learned something, its text, and a cut of it."""
    folder = tmp_path_factory.mktemp("recover")
    sizes = {"hidden_size": 48, "intermediate_size": 96}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    tiny.write_llama(folder, characters=40_000, vocab_size=307, **sizes, **heads)
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    words = (folder / "text.txt").read_text()
    stream = torch.from_numpy(token_stream(tokenizer, [words]).astype("int64"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(120):
        rows = torch.stack(
            [stream[(37 * step + 331 * r) % (len(stream) - 33) :][:33] for r in range(8)]
        )
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder / "model")
    command = ("compress", folder / "model", "--text", folder / "text.txt", "-o", folder / "cut")
    more = (
        "--attn-params",
        "50%",
        "--length",
        "32",
        "--tokens",
        "640",
        "--multiple-of",
        "2",
        "--no-verify",
        "--recover",
        "0",
    )
    line = [sys.executable, "-m", "headwise", *map(str, (*command, *more))]
    subprocess.run(line, check=True, capture_output=True)
    return folder


def words(place, out, *more):
    where = (place / "cut", "--against", place / "model", "--text", place / "text.txt", "-o", out)
    sizes = ("--tokens", "6400", "--length", "32", "--batch-size", "8", "--save-every", "5")
    return [str(w) for w in ("recover", *where, *sizes, "--lr", "0.03", *more)]


@pytest.mark.slow
def test_recovery_brings_quality_back_and_changes_attention_only(headwise, place, tmp_path):
    result = headwise(*words(place, tmp_path / "out", "--json"))
    assert result.code == 0, result.err
    before, after = (load_file(p / "model.safetensors") for p in (place / "cut", tmp_path / "out"))
    assert before.keys() == after.keys()
    for name in before:
        attention = any(f".{p}_proj." in name for p in "qkvo")
        assert torch.equal(before[name], after[name]) is not attention, name
    text = ("--text", place / "text.txt", "--tokens", "2000", "--window", "32", "--json")
    cut, back = (
        json.loads(headwise("eval", folder, *text).out)["texts"][0]["score"]["nll"]
        for folder in (place / "cut", tmp_path / "out")
    )
    assert back < cut - 0.02
    record = json.loads((tmp_path / "out" / "headwise.json").read_text())
    assert record["recovery"]["tokens"] == 6400
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.slow
@pytest.mark.parametrize("train", ["norms", "all", "lora"])
def test_what_is_trained_is_chosen(headwise, place, tmp_path, train):
    """Whatever is trained, the result has the cut model's tensors, and loads as it does."""
    result = headwise(*words(place, tmp_path / "out", "--train", train, "--tokens", "512"))
    assert result.code == 0, result.err
    before, after = (load_file(p / "model.safetensors") for p in (place / "cut", tmp_path / "out"))
    assert before.keys() == after.keys()
    for name in before:
        attention, norm = any(f".{p}_proj." in name for p in "qkvo"), "norm" in name
        linear = attention or ".mlp." in name
        trained = {"norms": attention or norm, "all": True, "lora": linear}[train]
        assert torch.equal(before[name], after[name]) is not trained, name
    record = json.loads((tmp_path / "out" / "headwise.json").read_text())
    assert record["recovery"]["settings"]["train"] == train
    hw.load(tmp_path / "out")


@pytest.mark.slow
def test_a_stopped_lora_recovery_ends_in_the_same_weights(place, tmp_path, monkeypatch):
    """The additions are part of the checkpoints, and drawn from the seed."""
    options = {"text": place / "text.txt", "tokens": 512, "length": 32, "batch_size": 4}
    options |= {"save_every": 1, "train": "lora", "device": "cpu"}

    def run(out, progress=lambda *a: None):
        return hw.recover(
            place / "cut", against=place / "model", out=tmp_path / out, progress=progress, **options
        )

    def killed(what, done, total):
        if done == 2:
            raise MemoryError

    run("whole")
    with pytest.raises(MemoryError):
        run("killed", killed)
    run("killed")
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "killed"))
    assert all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.slow
def test_a_killed_recovery_ends_in_the_same_weights(headwise, place, tmp_path):
    assert headwise(*words(place, tmp_path / "whole")).code == 0
    step = "8"  # in the middle, some steps after a checkpoint
    line = [sys.executable, str(KILLED), str(int(signal.SIGKILL)), step]
    line += words(place, tmp_path / "killed")
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "killed").exists()
    changed = headwise(*words(place, tmp_path / "killed", "--seed", "5"))
    assert changed.code == 2
    assert "differs in settings.seed (0 → 5);" in changed.err
    assert headwise(*words(place, tmp_path / "killed")).code == 0
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "killed"))
    assert all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.slow
def test_a_second_recovery_into_the_same_folder_is_refused(headwise, place, tmp_path):
    line = words(place, tmp_path / "out", "--tokens", "640000", "--save-every", "1")
    first = subprocess.Popen(
        [sys.executable, "-m", "headwise", *line],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = tmp_path / "out.partial" / "metrics.jsonl"
    try:
        while first.poll() is None and not (metrics.exists() and metrics.read_text()):
            time.sleep(0.01)
        second = headwise(*line)
        assert first.poll() is None, "the first run ended too early to prove anything"
    finally:
        first.kill()
        first.wait()
    assert second.code == 2
    assert "another run is using" in second.err
    steps = [json.loads(row)["step"] for row in metrics.read_text().splitlines()[:-1]]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_a_model_that_was_not_cut_is_refused(headwise, place, tmp_path):
    line = words(place, tmp_path / "out")
    line[1] = str(place / "model")
    result = headwise(*line)
    assert result.code == 2
    assert "must be a model that headwise cut, got LlamaForCausalLM" in result.err


@pytest.mark.slow
def test_models_split_over_two_processes_recover_alike(headwise, place, tmp_path):
    """Cut model and teacher in halves: the losses and the weights are those of one process."""
    few = ("--tokens", "1280", "--save-every", "3", "--dtype", "fp32")
    assert headwise(*words(place, tmp_path / "one"), *few).code == 0
    launcher = ("--nproc_per_node", "2", "--master_port", "0", "--rdzv_backend", "c10d")
    line = [sys.executable, "-m", "torch.distributed.run", *launcher]
    line += ["--rdzv_endpoint", "localhost:0", "-m", "headwise"]
    line += [*words(place, tmp_path / "two"), *few, "--shard"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    one, two = (load_file(tmp_path / n / "model.safetensors") for n in ("one", "two"))
    before = load_file(place / "cut" / "model.safetensors")
    assert one.keys() == two.keys() == before.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4)
    moved = max(float((one[n] - before[n]).abs().max()) for n in one)
    assert moved > 1e-2  # the control: training went further than that
    records = [json.loads((tmp_path / n / "headwise.json").read_text()) for n in ("one", "two")]
    losses = [r["recovery"]["loss"] for r in records]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
