"""Commands in odd surroundings: closed and full streams, odd variables, special files, names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.plan import Plan
from tests import tiny

SHAPE = tiny.SHAPE


@pytest.fixture
def place(tmp_path, monkeypatch):
    (tmp_path / "plan.json").write_text(Plan.uniform(SHAPE).to_json())
    (tmp_path / "text.txt").write_text("Some words of a text. " * 200)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shell(script, **variables):
    """A line of shell in which $H is the command."""
    return subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"H": f"{sys.executable} -m headwise"} | variables,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("$H plan show plan.json >&-", 0, ""),
        ("$H plan show absent.json 2>&-", 2, ""),
        ("$H plan show plan.json >&- 2>&- <&-", 0, ""),
        ("$H plan show plan.json > /dev/full", 2, "No space left"),
        ("$H plan show plan.json --json > /dev/full", 2, "No space left"),
        ("$H --help > /dev/full", 2, "No space left"),
        ("$H plan show absent.json 2> /dev/full", 2, ""),
        ("$H plan show plan.json --json | head -c 1 > first; exit ${PIPESTATUS[0]}", 0, ""),
        (
            "ulimit -f 0; $H plan show plan.json --plot x.html 2>&1 | cat; exit ${PIPESTATUS[0]}",
            2,
            "",
        ),
    ],
)
def test_closed_and_full_streams(place, script, code, said):
    done = shell(script)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert said in done.stderr
    assert not list(place.glob(".*.tmp"))


@pytest.mark.slow
def test_the_same_without_asserts_and_docstrings(place):
    for words in ("plan show plan.json", "plan show absent.json", "plan new --layers x"):
        plain, optimised = shell(f"$H {words}"), shell(f"$H {words}", PYTHONOPTIMIZE="2")
        assert (plain.returncode, plain.stdout) == (optimised.returncode, optimised.stdout)
        assert plain.stderr == optimised.stderr


@pytest.mark.slow
def test_a_whole_run_without_asserts(place, write_llama, tmp_path):
    write_llama(tmp_path, characters=4000, max_position_embeddings=32)
    words = "--text text.txt --tokens 96 --length 16 --attn-params 60% --multiple-of 2 -o out"
    done = shell(f"$H compress model {words} --verify-tokens 64", PYTHONOPTIMIZE="1")
    assert done.returncode == 0, done.stderr
    assert (place / "out" / "verify.json").exists()
    # Without docstrings transformers itself cannot build a model.
    done = shell("$H eval model --text text.txt", PYTHONOPTIMIZE="2")
    assert done.returncode == 2
    assert "PYTHONOPTIMIZE=1" in done.stderr


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"])
def test_variables_of_torchrun_that_are_no_numbers(headwise, place, monkeypatch, name):
    monkeypatch.setenv(name, "x")
    words = ("train", "plan.json", "--text", "text.txt", "--steps", "1", "--device", "cpu")
    result = headwise(*words, "--vocab-size", "263", "-o", "run")
    assert result.code == 2
    assert f"{name} must be a whole number, got 'x'" in result.err


OUTPUTS = (".", "/", "pipe", "~nobody-here/x", "/dev/null", "text.txt/x", "x" * 300)


@pytest.mark.parametrize("out", OUTPUTS)
@pytest.mark.parametrize("force", [(), ("--force",)])
def test_odd_outputs(headwise, place, out, force):
    os.mkfifo(place / "pipe")
    before = sorted(place.rglob("*"))
    for words in (
        ("train", "plan.json", "--text", "text.txt", "--steps", "1", "--device", "cpu"),
        ("plan", "new", "--layers", "1", "--d-model", "16", "--heads", "2", "--context", "8"),
    ):
        result = headwise(*words, "-o", out, *force)
        assert result.code == 2, (words, result)
        assert "Traceback" not in result.err
        assert sorted(place.rglob("*")) == before


def special(place, kind):
    """Something in the place of a file."""
    path = place / "special"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "terabyte":
        path.write_text("x")
        os.truncate(path, 2**40)
    else:
        path.symlink_to(kind)
    return path


@pytest.mark.parametrize("kind", ["pipe", "folder", "terabyte", "/dev/zero", "/dev/urandom"])
def test_special_files_as_inputs(headwise, place, kind):
    path = special(place, kind)
    for words in (
        ("plan", "show", path),
        ("run", path, "-o", "out"),
        ("train", path, "--text", "text.txt", "-o", "out"),
        ("theory", "allocate", "--width", "8", "--kernel", "1", "--vectors", path),
    ):
        result = headwise(*words)
        assert result.code == 2, (words, result)
        assert "special" in result.err
    if kind != "folder":
        result = headwise("train", "plan.json", "--text", path, "--steps", "1", "-o", "out")
        assert result.code == 2
        assert "special" in result.err


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "terabyte", "/dev/zero"])
def test_special_files_in_a_model(headwise, place, write_llama, file, kind):
    write_llama(place, characters=3000)
    (place / "model" / file).unlink()
    special(place, kind).rename(place / "model" / file)
    result = headwise("eval", "model", "--text", "text.txt", "--tokens", "20")
    assert result.code == 2
    assert file in result.err


def test_homes_of_nobody(headwise, place):
    for words in (
        ("eval", "~nobody-here/x", "--text", "text.txt"),
        ("profile", "~nobody-here/x.gguf", "--text", "text.txt", "-o", "out"),
        ("train", "plan.json", "--text", "~nobody-here/x", "-o", "out"),
    ):
        result = headwise(*words)
        assert result.code == 2
        assert "home of an unknown user" in result.err


@pytest.mark.parametrize("seed", [2**64, 10**40, -1])
def test_seeds_beyond_a_generator(headwise, place, seed):
    for words in (
        ("train", "plan.json", "--text", "text.txt", "-o", "out"),
        ("profile", "model", "--text", "text.txt", "-o", "out"),
        ("recover", "cut", "--against", "model", "--text", "text.txt", "-o", "out"),
        ("generate", "model", "--prompt", "x"),
    ):
        result = headwise(*words, "--seed", seed)
        assert result.code == 2, result
        assert "seed" in result.err


@pytest.mark.parametrize("name", ["cuda", "nonsense", ""])
def test_device_maps_that_are_not_there(headwise, place, write_llama, name):
    write_llama(place, characters=3000)
    words = ("profile", "model", "--text", "text.txt", "--tokens", "32", "--length", "16")
    result = headwise(*words, "--device-map", name, "-o", "out")
    assert result.code == 2
    assert "device" in result.err
    assert not (place / "out").exists()


def test_what_came_is_quoted_in_200_characters(headwise, place):
    long = "x" * 100_000
    (place / "plan.json").write_text(f'{{"format": "{long}"}}')
    (place / "recipe.yaml").write_text(
        f"format: headwise-recipe/1\nverb: compress\nmodel: {long}\ntext: t\n{long}: 1\n"
    )
    for words in (
        ("plan", "show", "plan.json"),
        ("run", "recipe.yaml", "-o", "out"),
        ("plan", "new", "--layers", long),
        (
            "plan",
            "new",
            "--layers",
            "1",
            "--d-model",
            "8",
            "--heads",
            "1",
            "--context",
            "8",
            "--attn-params",
            long,
        ),
        ("plan", "new", "--layers", "1", "--d-model", "8", "--heads", long, "--context", "8"),
        ("train", "plan.json", "--text", long, "-o", "out"),
        ("eval", long, "--text", "text.txt"),
        (long,),
        ("plan", long),
        ("theory", "bound", "--heads", long),
        ("generate", "model", "--prompt", "x", "--device", long),
        ("reproduce", long, "-o", "out"),
        ("compare", "model", "--text", "text.txt", "--methods", long, "-o", "out"),
        ("plan", "show", f"--{long}"),
    ):
        result = headwise(*words)
        assert result.code == 2, words
        assert len(result.err) < 1000, (str(words)[:60], len(result.err))


def test_plans_of_absurd_length_are_refused(headwise, place):
    shape = ("--d-model", "16", "--heads", "1", "--context", "8")
    for layers in ("200000", str(10**9), str(10**18)):
        result = headwise("plan", "new", "--layers", layers, *shape)
        assert result.code == 2
        assert "at most" in result.err


@pytest.mark.slow
def test_names_that_are_not_text(place):
    done = subprocess.run(
        [sys.executable, "-m", "headwise", "plan", "show", b"\xff\xfe.json"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert b"not valid UTF-8" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to …"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
    ids=lambda error: str(error)[:20],
)
def test_memory_that_runs_out_is_one_sentence(headwise, place, monkeypatch, error):
    def fail(*given, **more):
        raise error

    monkeypatch.setattr("headwise.cli.plan.read_plan", fail)
    result = headwise("plan", "show", "plan.json")
    assert result.code == 2
    assert result.err.startswith("Error: this needs more memory than there is")
    monkeypatch.setattr("headwise.cli.plan.read_plan", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # our own mistakes keep their traceback
        headwise("plan", "show", "plan.json")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_no_more_is_read_than_the_system_says_is_there(headwise, place):
    """Files of /proc have no size, and some have no end."""
    for words in (("plan", "show", "/proc/self/maps"), ("run", "/proc/self/maps", "-o", "out")):
        assert headwise(*words).code == 2
    result = headwise("train", "plan.json", "--text", "/proc/self/maps", "-o", "out")
    assert result.code == 2
    assert "holds no text (it is empty or blank)" in result.err


@pytest.mark.slow
def test_a_plan_of_absurd_heads_is_shown_or_refused(headwise, place):
    head = {"qk_dim": 2**31 - 1, "vo_dim": 4}
    plan = Plan.uniform(SHAPE).to_dict() | {"format": "headwise-plan/2"}
    layer = {"heads": [head]}
    (place / "plan.json").write_text(json.dumps(plan | {"layers": [layer]}))
    assert headwise("plan", "show", "plan.json").code == 0
    many = {"heads": [{"repeat": 100_000, "qk_dim": 4, "vo_dim": 4}]}
    (place / "plan.json").write_text(json.dumps(plan | {"layers": [many]}))
    result = headwise("plan", "show", "plan.json", "--plot", "plan.svg")
    assert result.code == 2
    assert "at most 20,000 head groups, and this plan has 100,000" in result.err
    assert not (place / "plan.svg").exists()


def test_steps_of_absurd_size_are_refused(headwise, place):
    words = ("train", "plan.json", "--text", "text.txt", "--batch-size", 10**11, "-o", "out")
    result = headwise(*words)
    assert result.code == 2
    assert "batch-size must be at most 1,000,000 windows" in result.err
