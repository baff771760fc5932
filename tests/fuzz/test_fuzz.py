"""Damaged files: every verb ends with an exit code and a sentence, never a traceback or a hang.

HEADWISE_FUZZ=20000 runs that many cases in the slow lane, HEADWISE_FUZZ_SEED others; a finding
says its number: python tests/fuzz/fuzzer.py --only 1234 --seed 0.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.fuzzer import attempt, wrong_with
from tests.fuzz.places import READERS, VERBS, make_small_place

SCRIPT = Path(__file__).with_name("fuzzer.py")
QUICK = ("model", "texts", "plans", "records")  # are quickly made
FEW = 60


def test_some_dozens_of_damaged_files(tmp_path, monkeypatch):
    """In this process, so without pipes and devices: those would hang it."""
    make_small_place(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    chosen = [t for t in READERS if t.folder in QUICK]
    chosen += [t for t in VERBS if t.folder in QUICK and t.words[0] in {"eval", "plan", "generate"}]
    found = [attempt(number, 1, chosen, special=False) for number in range(FEW)]
    assert [problem for problem in found if problem] == []


@pytest.mark.parametrize(
    ("code", "err", "said"),
    [
        (0, "", ""),
        (2, "Error: a sentence.\n", ""),
        (2, "Error: one.\nError: two.\n", "not one sentence"),
        (2, "Error: " + "x" * 2000 + "\n", "a sentence of 2007 characters"),
        (1, "Traceback (most recent call last)", "Traceback"),
        (70, "", "exit code 70"),
        (0, "x" * 100_001, "a flood"),
    ],
)
def test_what_counts_as_a_finding(code, err, said):
    found = wrong_with(code, "", err)
    assert found == "" if not said else found.startswith(said)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="limits memory as Linux counts it"
)
def test_many_damaged_files():
    number = os.environ.get("HEADWISE_FUZZ", "2100")
    seed = os.environ.get("HEADWISE_FUZZ_SEED", "0")
    command = [sys.executable, str(SCRIPT), "--number", number, "--seed", seed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert f"{number} cases, 0 findings" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="limits memory as Linux counts it"
)
def test_every_command_works_on_what_is_whole():
    """The control: a command that is refused whatever it reads would never find anything."""
    command = [sys.executable, str(SCRIPT), "--whole"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert ", 0 findings" in done.stdout
