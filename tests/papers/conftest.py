"""A toy claim that the runner's processes can import by name, and results nobody measured."""

import importlib
import os
import sys
from pathlib import Path

import pytest

from headwise.papers.harness.claim import Results, TrialResult

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def toy():
    """The module of the toy claim, importable here and in processes started from here."""
    sys.path.insert(0, str(HERE))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), before)))
    yield importlib.import_module("toy_claim")
    sys.path.remove(str(HERE))
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def made_up():
    """Every trial of a claim with the values that `values` gives it, to see how its rule ends."""

    def results(claim, values, size="quick", seeds=(0, 1, 2)):
        made = [TrialResult(t, values(t), 1.0) for t in claim.trials(size, seeds)]
        return Results(size, tuple(made))

    return results
