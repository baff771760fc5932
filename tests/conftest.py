"""Shape annotations are checked in every test (jaxtyping + beartype); one thread per process."""

import os
import sys
from typing import NamedTuple

import pytest

# Set before NumPy or torch load, and for every process that a test starts. Small matrices on two
# threads in two workers only get in each other's way, and sums split over threads may differ
# between a busy and an idle machine.
os.environ["OMP_NUM_THREADS"] = "1"
# Nothing in the tests may reach for a network.
os.environ["HF_HUB_OFFLINE"] = "1"

from tests import annotations, lanes

# The rooms whose signatures state shapes.
CHECKED = (
    "theory",
    "planning",
    "data",
    "measure",
    "profiling",
    "cutting",
    "baselines",
    "papers",
)
annotations.install([f"headwise.{room}" for room in CHECKED])


def pytest_configure(config):
    lanes.is_fast = config.option.markexpr == lanes.FAST_MARKS


@pytest.fixture(autouse=True, scope="module")
def _pictures(request):
    """Only the tests of reports draw in the fast lane: a picture takes longer than a tiny model."""
    if not lanes.is_fast or "reporting" in request.path.parts:
        yield
        return
    from tests import blank_pictures

    with pytest.MonkeyPatch.context() as patch:
        blank_pictures.install(patch.setattr)
        yield


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


@pytest.fixture
def subject(tmp_path):
    """Makes a tiny model of a family, with its profile, in this test's folder."""
    from tests import tiny

    return lambda name, **options: tiny.ProfiledModel(name, tmp_path, **options)
