"""`headwise train` as people run it: real processes, killed and resumed, and under torchrun."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

from headwise.cli.train import train
from headwise.errors import HeadwiseError
from headwise.plan import HeadSpec, LayerPlan, ModelShape, Plan
from headwise.training.checkpoint import TIME_FIELDS
from headwise.training.settings import TrainSettings

OPTIONS = (
    *("--text", "builtin:python", "--max-chars", "40000", "--context", "16", "--batch-size", "4"),
    *("--steps", "40", "--eval-every", "15", "--save-every", "7", "--lr", "0.003", "--seed", "5"),
    *("--device", "cpu"),
)

app = typer.Typer()
app.command()(train)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    """Two layers, one of them with heads of different widths."""
    shape = ModelShape(
        n_layers=2,
        d_model=12,
        context=32,
        n_heads=3,
        n_kv_heads=3,
        qk_dim=4,
        vo_dim=4,
        ffn_dim=23,
        vocab_size=307,
    )
    mixed = LayerPlan(heads=(HeadSpec(qk_dim=2, vo_dim=3), HeadSpec(qk_dim=6, vo_dim=5, queries=2)))
    plan = Plan(shape=shape, layers=(Plan.uniform(shape).layers[0], mixed))
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(plan.to_json())
    return path


def _command(*arguments):
    return [sys.executable, "-m", "headwise", "train", *map(str, arguments)]


def _run(*arguments, launcher=()):
    command = _command(*arguments)
    if launcher:
        command = [sys.executable, "-m", "torch.distributed.run", *launcher, *command[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def _timeless(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in TIME_FIELDS} for row in rows]


@pytest.fixture(scope="module")
def whole(plan_file, tmp_path_factory):
    """The run that is never killed."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    done = _run(plan_file, *OPTIONS, "-o", run, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "finished"
    assert result["step"] == 40
    return run


@pytest.mark.slow
def test_the_run_folder_tells_everything(whole, plan_file):
    record = json.loads((whole / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["inputs"]["settings"]["seed"] == 5
    assert record["inputs"]["text"]["sources"] == ["builtin:python"]
    assert len(record["inputs"]["text"]["sha256"]) == 64
    assert record["versions"]["torch"] == torch.__version__
    assert "--max-chars 40000" in record["command"]
    assert Plan.from_json((whole / "plan.json").read_text()) == Plan.from_json(
        plan_file.read_text()
    )
    names = sorted(p.name for p in (whole / "checkpoints").iterdir())
    assert names == ["step-00000035", "step-00000040"]
    assert not [p for p in whole.rglob("*") if p.suffix in {".pt", ".bin", ".pkl", ".tmp"}]
    rows = _timeless(whole)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert [r["step"] for r in rows if "held_out_loss" in r] == [15, 30, 40]


@pytest.mark.slow
def test_the_model_loads_with_its_tokenizer(whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(whole / "model")
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id == 0
        assert config.pad_token_id is None
    stored = load_file(whole / "checkpoints" / "step-00000040" / "model.safetensors")
    for name, p in model.named_parameters():
        assert torch.equal(p, stored[name])
    assert tokenizer.decode(tokenizer("def f(x):\n    return x")["input_ids"]) == (
        "def f(x):\n    return x"
    )


@pytest.mark.slow
def test_held_out_text_is_never_trained_on(whole):
    train_tokens, held_out = (np.load(whole / "tokens" / f"{n}.npy") for n in ("train", "held-out"))
    assert len(held_out) > 16
    windows = np.lib.stride_tricks.sliding_window_view(train_tokens, 16)
    assert not (windows == held_out[:16]).all(axis=1).any()


KILLED = str(Path(__file__).with_name("killed_after.py"))


@pytest.mark.slow
def test_killed_at_random_moments_it_ends_with_the_same_bits(whole, plan_file, tmp_path):
    """SIGKILL, then SIGTERM, each after a drawn number of steps, then to the end."""
    run, rng = tmp_path / "run", random.Random(7)
    moments = []
    for number, low, high in ((signal.SIGKILL, 1, 20), (signal.SIGTERM, 21, 30)):
        moments.append(rng.randint(low, high))
        asked = ("train", plan_file, *OPTIONS, "-o", run, "--resume")
        line = [sys.executable, KILLED, *map(str, (int(number), moments[-1], *asked))]
        done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
        if number == signal.SIGTERM:
            assert done.returncode == 143, (moments, done.stderr)
            assert f"headwise train -o {run} --resume" in done.stderr
        else:
            assert done.returncode == -signal.SIGKILL, (moments, done.stderr)
    done = _run("-o", run, "--resume", "--save-every", "9")
    assert done.returncode == 0, done.stderr
    assert "Resuming after step" in done.stderr
    weights = "model/model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes(), moments
    assert _timeless(run) == _timeless(whole), moments


def _wait_for_row(run, step, process):
    metrics = run / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
            return
        time.sleep(0.002)
    pytest.fail(process.communicate()[1])


@pytest.mark.slow
def test_killed_after_its_last_step_it_still_ends(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "model")
    record = json.loads((run / "run.json").read_text())
    del record["details"]["last"]
    (run / "run.json").write_text(json.dumps({**record, "status": "running"}))
    result = _invoke("-o", run, "--resume", "--json")
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout)["step"] == 40
    weights = "model/model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused(whole, plan_file, tmp_path):
    """Two real processes, started again and again while the first one trains."""
    run = tmp_path / "run"
    arguments = (plan_file, *OPTIONS, "-o", run)
    slowly = ("--eval-every", "1", "--save-every", "1", "--steps", "100000")
    command = _command(*arguments, *slowly)
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        _wait_for_row(run, 1, first)
        for other in (("-o", run, "--resume"), arguments, (*arguments, "--force")):
            done = _run(*other)
            assert first.poll() is None, "the first run ended too early to prove anything"
            assert done.returncode == 2, done.stderr
            assert done.stderr.count("\n") == 1, done.stderr
            assert f"another run is using {run}" in done.stderr
    finally:
        first.send_signal(signal.SIGTERM)
        _, messages = first.communicate(timeout=120)
    assert first.returncode == 143, messages
    steps = [row["step"] for row in _timeless(run)]
    assert steps == list(range(1, len(steps) + 1))
    # The control: with nobody at work the folder is free again.
    assert "settings.lr (0.003 → 0.1)" in _message(*arguments, "--resume", "--lr", "0.1")


TWO = (
    *("--nproc_per_node", "2", "--master_port", "0", "--rdzv_backend", "c10d"),
    *("--rdzv_endpoint", "localhost:0"),
)


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("--shard",)], ids=["copied", "split"])
def test_two_processes_reach_the_losses_of_one(whole, plan_file, tmp_path, how):
    """Each with the whole model, or with half of every tensor; the files are those of one."""
    done = _run(plan_file, *OPTIONS, *how, "-o", tmp_path / "two", "--json", launcher=TWO)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "finished"  # printed once
    one, two = _timeless(whole), _timeless(tmp_path / "two")
    assert [r["step"] for r in two] == [r["step"] for r in one]
    # The same sums in another order: 40 steps of Adam in fp32 carry rounding (6e-8) to about 1e-6.
    for key in ("loss", "grad_norm"):
        a, b = (np.array([row[key] for row in rows]) for rows in (one, two))
        np.testing.assert_allclose(a, b, rtol=1e-4)
        assert abs(a[:-1] - a[1:]).max() > 1e-2  # the control: steps do differ
    assert one[-1]["held_out_loss"] == pytest.approx(two[-1]["held_out_loss"], rel=1e-4)
    _compare_models(whole, tmp_path / "two")
    # One process goes on from what two have saved.
    run, last = tmp_path / "two", tmp_path / "two" / "checkpoints" / "step-00000040"
    assert {p.name for p in last.iterdir()} == {
        p.name for p in (whole / "checkpoints" / "step-00000040").iterdir()
    }
    shutil.rmtree(run / "model")
    shutil.rmtree(last)
    record = json.loads((run / "run.json").read_text()) | {"status": "interrupted"}
    (run / "run.json").write_text(json.dumps(record))
    done = _run("-o", run, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert "Resuming after step 35" in done.stderr
    _compare_models(whole, run)


def _compare_models(one, other):
    a, b = (load_file(run / "model" / "model.safetensors") for run in (one, other))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, rtol=1e-3, atol=1e-4)
    config = json.loads((other / "model" / "config.json").read_text())
    assert config["architectures"] == ["HeadwiseForCausalLM"]


def _invoke(*arguments):
    """In this process; user errors come back as exceptions."""
    return CliRunner().invoke(app, [*map(str, arguments)])


def _message(*arguments):
    result = _invoke(*arguments)
    assert isinstance(result.exception, HeadwiseError), result.exception
    return str(result.exception)


@pytest.mark.slow
def test_a_finished_run_says_so(whole):
    result = _invoke("-o", whole, "--resume", "--json")
    assert result.exit_code == 0
    assert "is finished" in result.stderr
    assert json.loads(result.stdout)["status"] == "finished"


@pytest.mark.slow
def test_resuming_with_other_settings_lists_them(whole, plan_file, tmp_path):
    message = _message("-o", whole, "--resume", "--lr", "0.1", "--seed", "6", "--keep", "9")
    assert "differs in settings.lr (0.003 → 0.1), settings.seed (5 → 6);" in message
    assert "keep" not in message
    message = _message("-o", whole, "--resume", "--text", "other.txt", "--tokens", "640")
    assert "settings.steps (40 → 10)" in message
    assert "text.sources (['builtin:python'] → ['other.txt'])" in message
    other = tmp_path / "other.json"
    plan = Plan.from_json(plan_file.read_text())
    other.write_text(Plan.uniform(plan.shape).to_json())
    assert "differs in plan_sha256;" in _message(other, "-o", whole, "--resume")


@pytest.mark.slow
def test_an_existing_run_is_not_overwritten(whole, plan_file, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*")}
    same = _invoke(plan_file, *OPTIONS, "-o", whole)
    assert (same.exit_code, "is finished" in same.stderr) == (0, True)
    message = _message(plan_file, *OPTIONS, "--lr", "0.1", "-o", whole)
    assert "settings.lr (0.003 → 0.1)" in message
    assert "give --force to start again" in message
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*")} == before
    assert "give only one" in _message("-o", whole, "--resume", "--force")
    (tmp_path / "mine.txt").write_text("mine")
    message = _message(plan_file, *OPTIONS, "-o", tmp_path, "--force")
    assert "headwise did not write it (it contains mine.txt)" in message
    assert "holds no run to resume" in _message("-o", tmp_path / "none", "--resume")


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        (b"", (), "holds no text"),
        (b"\xff\xfe", (), "must be UTF-8"),
        (b"short", (), "fewer than one window of 16 + 1"),
        (b"long enough " * 99, ("--context", "64"), "at most the plan's 32"),
        (b"long enough " * 99, ("--batch-size", "5", "--accumulate", "2"), "multiple of"),
        (b"long enough " * 99, ("--vocab-size", "300"), "vocab_size of 307"),
        (b"long enough " * 99, ("--tokenizer", "nowhere.json"), "nowhere.json does not exist"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    plan_file, tmp_path, content, options, expected
):
    text, run = tmp_path / "t.txt", tmp_path / "run"
    text.write_bytes(content)
    message = _message(
        plan_file, "--text", text, "--context", "16", "--device", "cpu", "-o", run, *options
    )
    assert expected in message
    assert not run.exists()


def test_what_is_missing_is_asked_for(plan_file, tmp_path):
    without = _invoke(plan_file, "--text", "x")
    assert (without.exit_code, "Missing option '-o'" in without.stderr) == (2, True)
    assert "needs --text" in _message(plan_file, "-o", tmp_path / "r")
    assert "needs a plan file" in _message("--text", "x", "-o", tmp_path / "r")
    both = ("--steps", "3", "--tokens", "3")
    assert "give only one" in _message(plan_file, "--text", "x", "-o", tmp_path / "r", *both)


def test_a_diverging_run_stops_with_its_step(plan_file, tmp_path):
    text, run = tmp_path / "t.txt", tmp_path / "run"
    text.write_text("some text to learn\n" * 99)
    message = _message(
        *(plan_file, "--text", text, "-o", run, "--context", "16", "--device", "cpu"),
        *("--steps", "30", "--lr", "1e38", "--clip", "1e30", "--warmup", "0"),
        *("--save-every", "1", "--batch-size", "4"),
    )
    assert "at step" in message
    assert "the last good state is" in message
    assert json.loads((run / "run.json").read_text())["status"] == "diverged"


@pytest.mark.slow
def test_a_plan_without_vocabulary_gets_one(plan_file, tmp_path):
    plan = Plan.from_json(plan_file.read_text())
    free = plan.model_copy(update={"shape": plan.shape.model_copy(update={"vocab_size": 0})})
    path, text, run = tmp_path / "p.json", tmp_path / "t.txt", tmp_path / "run"
    path.write_text(free.to_json())
    text.write_text("some text to learn\n" * 99)
    options = ("--context", "16", "--device", "cpu", "--steps", "2", "--vocab-size", "263")
    result = _invoke(path, "--text", text, "-o", run, *options)
    assert result.exit_code == 0, result.exception
    assert Plan.from_json((run / "plan.json").read_text()).shape.vocab_size == 263
    again = _invoke(path, "--text", text, "-o", run, *options, "--force")
    assert again.exit_code == 0, again.exception


def test_the_flags_show_the_defaults_of_the_settings():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).stdout
    defaults = TrainSettings()
    for name in ("steps", "lr", "weight_decay", "clip", "batch_size", "split", "keep"):
        flag = f"--{name.replace('_', '-')} "
        line = next(x for x in shown.splitlines() if flag in x and "Example" not in x)
        assert f"default: {getattr(defaults, name)}" in line


@pytest.mark.slow
def test_importing_the_verbs_imports_nothing_heavy():
    code = (
        "import sys, headwise.cli.train, headwise.cli.evaluate, headwise.cli.generate;"
        "print(*{'torch', 'transformers', 'accelerate', 'numpy'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
