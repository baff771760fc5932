"""Every verb killed before each of its writes: the same command ends in the same files.

Of a long chain every second to eleventh write is tried. HEADWISE_KILLS_FROM=1 tries those one
further on; from 0 to 10 they are all of them.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.plan import Plan
from tests import tiny

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("killed_before.py")
PICTURES = ("report.html", "README.md", "index.html", "table.md")  # of other files, with times
TIMES = re.compile(r'"(seconds|tokens_per_second|median|low|high|ratio)": [-+.e0-9]+')


@pytest.fixture(scope="module")
def place(tmp_path_factory, write_llama):
    """A tiny model, its cut, a text and a plan."""
    folder = tmp_path_factory.mktemp("writes")
    write_llama(
        folder,
        characters=6_000,
        vocab_size=263,
        hidden_size=16,
        intermediate_size=19,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    (folder / "plan.json").write_text(Plan.uniform(tiny.SHAPE).to_json())
    text = ("--text", folder / "text.txt", "--length", "16", "--tokens", "160")
    words = (
        "compress",
        folder / "model",
        *text,
        "-o",
        folder / "cut",
        "--no-verify",
        "--recover",
        "0",
    )
    command = [
        sys.executable,
        "-m",
        "headwise",
        *words,
        "--attn-params",
        "60%",
        "--multiple-of",
        "2",
    ]
    subprocess.run([*map(str, command)], check=True, capture_output=True)
    return folder


def contents(folder):
    """Every file, its times left out; reports and tables are pictures of the others."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in PICTURES:
            data = path.read_bytes()
            if path.suffix in {".json", ".jsonl"}:
                data = TIMES.sub("", data.decode()).encode()
            found[path.relative_to(folder).as_posix()] = data
        elif path.is_file():
            found[path.relative_to(folder).as_posix()] = b""
    return found


@pytest.fixture
def killed_before_each(tmp_path):
    def run(*words, every=1):
        first = int(os.environ.get("HEADWISE_KILLS_FROM", "0")) % every
        asked = {"words": [str(w) for w in words], "here": str(tmp_path)}
        asked |= {"every": every, "first": first}
        done = subprocess.run(
            [sys.executable, str(SCRIPT), json.dumps(asked)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert done.returncode == 0, done.stderr
        whole = contents(tmp_path / "whole")
        folders = [p for p in tmp_path.iterdir() if p.is_dir() and p.name != "whole"]
        for folder in folders:
            found = contents(folder)
            assert found.keys() == whole.keys(), folder.name
            assert [n for n in whole if found[n] != whole[n]] == [], folder.name
        return int(done.stdout), len(folders)

    return run


def test_train(killed_before_each, place):
    sizes = ("--steps", "4", "--save-every", "1", "--eval-every", "2", "--batch-size", "2")
    effects, lives = killed_before_each(
        *("train", place / "plan.json", "--text", place / "text.txt"),
        *(*sizes, "--device", "cpu", "-o", "run"),
        every=2,
    )
    assert lives >= effects // 2
    assert effects > 40


def test_recover(killed_before_each, place):
    sizes = ("--tokens", "96", "--length", "16", "--batch-size", "2", "--save-every", "1")
    effects, lives = killed_before_each(
        *("recover", place / "cut", "--against", place / "model", "--text", place / "text.txt"),
        *(*sizes, "--device", "cpu", "-o", "out"),
    )
    assert effects == lives
    assert effects > 40


def test_profile(killed_before_each, place):
    sizes = ("--tokens", "96", "--length", "16", "--chunk", "2", "--device", "cpu")
    effects, lives = killed_before_each(
        *("profile", place / "model", "--text", place / "text.txt", *sizes, "-o", "out"),
    )
    assert effects == lives
    assert effects > 30


def test_compress(killed_before_each, place):
    """Every third of its writes, for it has many."""
    sizes = ("--tokens", "96", "--length", "16", "--attn-params", "60%", "--multiple-of", "2")
    effects, lives = killed_before_each(
        *("compress", place / "model", "--text", place / "text.txt", *sizes),
        *("--recover", "0", "--verify-tokens", "64", "-o", "out"),
        every=3,
    )
    assert lives >= effects // 3
    assert effects > 60


def test_compress_and_recover(killed_before_each, place):
    """A profile, a cut and a recovery in a chain; every fifth write."""
    sizes = ("--tokens", "96", "--length", "16", "--attn-params", "60%", "--multiple-of", "2")
    effects, lives = killed_before_each(
        *("compress", place / "model", "--text", place / "text.txt", *sizes, "--device", "cpu"),
        *("--recover", "64", "--verify-tokens", "64", "-o", "out"),
        every=5,
    )
    assert lives >= effects // 5
    assert effects > 100


def test_compare(killed_before_each, place):
    sizes = ("--tokens", "96", "--length", "16", "--attn-params", "75%", "--verify-tokens", "64")
    effects, lives = killed_before_each(
        *("compare", place / "model", "--text", place / "text.txt", *sizes),
        *("--methods", "svd-llm,headwise", "--multiple-of", "2", "-o", "out"),
        every=4,
    )
    assert lives >= effects // 4
    assert effects > 60


def test_reproduce(killed_before_each):
    effects, lives = killed_before_each(
        *("reproduce", "allocation-256", "--quick", "--workers", "1", "-o", "out"), every=2
    )
    assert lives >= effects // 2
    assert effects > 15


@pytest.mark.parametrize(("target", "out"), [("padded", "out"), ("gguf", "out.gguf")])
def test_export(killed_before_each, place, target, out):
    """To a folder and to a file; the engine's check writes nothing. Every third write."""
    effects, lives = killed_before_each(
        *("export", place / "model", "--to", target, "--no-check", "-o", out), every=3
    )
    assert lives >= effects // 3
    assert effects > 20


def test_design(killed_before_each, place):
    """A training run and a profile of each proxy; every eighth write."""
    sizes = ("--layers", "2", "--d-model", "16", "--heads", "2", "--context", "16")
    proxies = ("--seeds", "1", "--steps", "1", "--proxy-layers", "1", "--proxy-d-model", "8")
    effects, lives = killed_before_each(
        *("plan", "design", *sizes, *proxies, "--text", place / "text.txt", "--tokens", "32"),
        *("--batch-size", "2", "--attn-params", "75%", "--multiple-of", "2", "--device", "cpu"),
        *("-o", "plan.json"),
        every=8,
    )
    assert lives >= effects // 8
    assert effects > 40


def test_text_that_the_model_writes_itself(killed_before_each, place):
    """Every eleventh write."""
    sizes = ("--tokens", "32", "--length", "16", "--attn-params", "60%", "--multiple-of", "2")
    effects, lives = killed_before_each(
        *("compress", place / "model", "--self-text", "64", *sizes, "--device", "cpu"),
        *("--recover", "0", "--fit", "0", "--no-verify", "-o", "out"),
        every=11,
    )
    assert lives >= effects // 11
    assert effects > 100


def test_verify_writes_its_file_and_the_card(killed_before_each, place):
    """`verify -o` of a file beside the model renews the card, too."""
    effects, _ = killed_before_each(
        *("verify", place / "cut", "--against", place / "model", "--text", place / "text.txt"),
        *("--tokens", "64", "--repeats", "1", "-o", "verify.json"),
    )
    assert effects >= 3
