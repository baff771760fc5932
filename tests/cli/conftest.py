"""The command as a user runs it, and in-process for speed."""

import subprocess
import sys

import pytest

from headwise.cli import main


class Result:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def headwise(capsys, monkeypatch):
    """Run a command line in this process; returns exit code, stdout and stderr."""

    def run(*words: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["headwise", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main.main()
        captured = capsys.readouterr()
        return Result(end.value.code or 0, captured.out, captured.err)

    return run


@pytest.fixture
def headwise_process():
    """Run a command line in a process of its own."""

    def run(*words: str, **options) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "headwise", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)

    return run
