"""The command in a process of its own, and the small model that commands are tried on."""

import subprocess
import sys

import pytest

from headwise.cli import main


@pytest.fixture
def headwise_process():
    """Run a command line in a process of its own."""

    def run(*words: str, **options) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "headwise", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)

    return run


@pytest.fixture(scope="session")
def run_command():
    """Run a command line that succeeds, in this process: what the tests of a module share."""

    def run(*words) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["headwise", *map(str, words)])
            with pytest.raises(SystemExit) as end:
                main.main()
        assert not end.value.code

    return run


@pytest.fixture(scope="session")
def write_llama():
    """Writes text.txt and a random Llama with a tokenizer of that text into a folder."""
    from tests import tiny

    return tiny.write_llama
