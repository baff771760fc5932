"""A toy claim that the runner's processes can import by name."""

import importlib
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def toy():
    """The module of the toy claim, importable here and in processes started from here."""
    sys.path.insert(0, str(HERE))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(HERE)
    yield importlib.import_module("toy_claim")
    sys.path.remove(str(HERE))
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def known(toy, monkeypatch):
    """The toy claim as the only one there is."""
    from headwise.reproduce import runner

    monkeypatch.setattr(runner, "claims", lambda: {"toy": toy.CLAIM})
    return toy.CLAIM
