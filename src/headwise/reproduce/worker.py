"""One trial in some process: what it measured, or how it failed. Never raises.

Light on import, because a spawned process loads it before the number of threads is set.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headwise.artifacts import versions
from headwise.reproduce.claim import Trial, Unavailable, Values

Job = tuple[Callable[[Trial], Values], Trial]
PACKAGES = ("headwise", "numpy", "scipy", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of a finished trial, or one line of error with the way there."""

    values: Values | None
    seconds: float  # of processor time: what else the machine does is not counted
    versions: tuple[tuple[str, str], ...] = ()
    cores: int = 0  # of the machine that ran it
    error: str | None = None
    trace: tuple[str, ...] = ()
    unavailable: bool = False


def one_thread() -> None:
    """One thread for everything: trials run side by side, and sums keep their order."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def outcome(job: Job) -> Outcome:
    """Run a trial; its function travels by name, so it must be importable where this runs."""
    run, trial = job
    start = time.process_time()
    try:
        values = json.loads(json.dumps(run(trial), allow_nan=False))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        return Outcome(
            None,
            time.process_time() - start,
            error=f"{type(error).__name__}: {error}",
            trace=tuple(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames),
            unavailable=isinstance(error, Unavailable),
        )
    seconds = time.process_time() - start
    return Outcome(values, seconds, versions(PACKAGES), os.cpu_count() or 1)
