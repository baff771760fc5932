"""Shape annotations are checked in every test (jaxtyping + beartype); one thread per worker."""

import os
import sys
from typing import NamedTuple

import pytest

# Set before NumPy or torch load. Small matrices on two threads in two workers only get in each
# other's way, and one thread makes sums reproducible.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nothing in the tests may reach for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from jaxtyping import install_import_hook

CHECKED = ("theory", "planning", "compress", "data.tasks", "nn.one_layer")
install_import_hook([f"headwise.{room}" for room in CHECKED], "beartype.beartype")


class Result(NamedTuple):
    """What a command line came to."""

    code: int
    out: str
    err: str


@pytest.fixture
def headwise(capsys, monkeypatch):
    """Run a command line in this process; returns exit code, stdout and stderr."""
    from headwise.cli import main

    def run(*words) -> Result:
        monkeypatch.setattr(sys, "argv", ["headwise", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main.main()
        captured = capsys.readouterr()
        return Result(end.value.code or 0, captured.out, captured.err)

    return run
