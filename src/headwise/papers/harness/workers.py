"""Where trials run: in processes of this machine, or on a Ray cluster. No failure stops the rest.

    runner ──jobs──► pool ──► worker: one process, one thread ──► run(trial) ──► TrialOutcome
       ▲                                                                             │
       └─────────────── every trial once, with its numbers or its error ◄────────────┘

Locally every worker is an executor of one process, so a death is known to be that of its trial. A
process that dies (killed, out of memory) is replaced and its trial given out again, a few times at
most. A worker whose runner is gone ends at once, so that a resumed run never has a rival. Ray does
the same for its tasks. Only outcomes come back: the runner alone writes files, and the nodes of a
cluster need no common disk.

This module is light on import, because a new process loads it before a trial's own imports.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from headwise.artifacts import versions
from headwise.papers.harness.claim import ReproduceError, Trial, Unavailable, Values

TrialJob = tuple[Callable[[Trial], Values], Trial]
PACKAGES = ("headwise", "numpy", "scipy", "torch", "transformers")
MAX_DEATHS = 3  # of a trial's process: then the trial has failed
RAY_RETRIES = 2
RAY_STARTS = 3
CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The numbers of a finished trial, or a one-line error with its trace."""

    values: Values | None
    seconds: float  # of processor time: what else the machine does is not counted
    versions: tuple[tuple[str, str], ...] = ()
    cores: int = 0  # of the machine that ran it
    error: str | None = None
    trace: tuple[str, ...] = ()
    unavailable: bool = False


@runtime_checkable
class Pool(Protocol):
    """Somewhere trials run: every trial comes back once, with its numbers or its error."""

    def check(self) -> None:
        """Raise if trials could not run here."""

    def outcomes(self, jobs: Sequence[TrialJob]) -> Iterator[tuple[Trial, TrialOutcome]]:
        """Every trial with its outcome, as they finish."""


def run_trial(job: TrialJob) -> TrialOutcome:
    """Run a trial here; its function is pickled by name, so it must be importable here.

    Whatever a trial raises is its outcome.
    """
    run, trial = job
    start = time.process_time()
    try:
        values = json.loads(json.dumps(run(trial), allow_nan=False))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        return TrialOutcome(
            None,
            time.process_time() - start,
            error=f"{type(error).__name__}: {error}",
            trace=tuple(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames),
            unavailable=isinstance(error, Unavailable),
        )
    seconds = time.process_time() - start
    return TrialOutcome(values, seconds, versions(PACKAGES), os.cpu_count() or 1)


def _use_one_thread() -> None:
    """One thread for everything: trials run side by side, and sums keep their order."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


# --- processes of this machine -----------------------------------------------------------------


class LocalPool:
    """At most ``workers`` processes at a time."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def check(self) -> None:
        """Processes can always be started."""

    def outcomes(self, jobs: Sequence[TrialJob]) -> Iterator[tuple[Trial, TrialOutcome]]:
        """Every trial with its outcome, as they finish."""
        waiting = deque((job, 1) for job in jobs)  # with the number of this attempt
        idle: list[_Worker] = []
        busy: dict[Future[TrialOutcome], tuple[_Worker, TrialJob, int]] = {}
        try:
            while waiting or busy:
                while waiting and len(busy) < self.workers:
                    job, attempt = waiting.popleft()
                    worker = idle.pop() if idle else _Worker()
                    busy[worker.submit(job)] = worker, job, attempt
                for future in wait(busy, return_when=FIRST_COMPLETED).done:
                    worker, job, attempt = busy.pop(future)
                    try:
                        outcome = future.result()
                        idle.append(worker)
                    except BrokenProcessPool:
                        how = worker.stop()
                        if attempt < MAX_DEATHS:
                            waiting.appendleft((job, attempt + 1))
                            continue
                        died = f"its process ended {attempt} times, last with {how}"
                        outcome = TrialOutcome(None, 0.0, error=died)
                    yield job[1], outcome
        finally:
            for worker in (*idle, *(worker for worker, _, _ in busy.values())):
                worker.stop()


class _Worker:
    """An executor of one process."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(1, mp_context=spawn, initializer=_begin_work)
        self._process: BaseProcess | None = None

    def submit(self, job: TrialJob) -> Future[TrialOutcome]:
        """Begin a trial; the first one starts the process."""
        if self._process is not None:
            return self._executor.submit(run_trial, job)
        before = os.environ.get("OMP_NUM_THREADS")
        others = {child.pid for child in multiprocessing.active_children()}
        os.environ["OMP_NUM_THREADS"] = "1"  # read by the child's libraries while they load
        try:
            future = self._executor.submit(run_trial, job)
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before
        started = (c for c in multiprocessing.active_children() if c.pid not in others)
        self._process = next(started, None)
        return future

    def stop(self) -> str:
        """End the process, whatever it does; how it ended."""
        if self._process is not None:
            self._process.kill()
        self._executor.shutdown(cancel_futures=True)  # waits for the process
        code = self._process.exitcode if self._process is not None else None
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _begin_work() -> None:
    """In a new process: leave interrupts to the runner, and end when the runner is gone."""
    _use_one_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait_for_process([sentinel])
    os._exit(1)


# --- Ray ---------------------------------------------------------------------------------------


class RayPool:
    """``address`` of a cluster, or "local" for a Ray of ``workers`` processes on this machine."""

    def __init__(self, address: str, workers: int) -> None:
        self.address, self.workers = address, workers

    def check(self) -> None:
        """Raise if Ray is missing, or nothing listens at its address."""
        _ray()
        match = re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d{1,5})", self.address)
        if match is None:
            return
        try:
            socket.create_connection((match[1], int(match[2])), CONNECT_SECONDS).close()
        except OSError as error:
            raise self._unanswered(error) from error

    def outcomes(self, jobs: Sequence[TrialJob]) -> Iterator[tuple[Trial, TrialOutcome]]:
        """Every trial with its outcome, as they finish."""
        if not jobs:
            return
        self.check()  # Ray itself would keep trying for minutes
        ray = _ray()
        self._connect(ray)
        try:
            yield from _ray_outcomes(ray, jobs)
        finally:
            ray.shutdown()

    def _unanswered(self, error: Exception) -> ReproduceError:
        return ReproduceError(
            f"No Ray cluster answers at {self.address!r} ({_first_line(error)}); give the address "
            "of a running one, such as 10.0.0.5:6379, or local."
        )

    def _connect(self, ray: Any) -> None:
        """Join the cluster or start one; a busy machine may miss the 30 s Ray gives itself."""
        local = self.address == "local"
        started = {"num_cpus": self.workers, "include_dashboard": False} if local else {}
        for attempt in range(RAY_STARTS if local else 1, 0, -1):
            try:
                ray.init(
                    address=self.address,
                    runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
                    log_to_driver=False,
                    logging_level="ERROR",
                    **started,
                )
            except Exception as error:  # Ray has no class of its own for this
                ray.shutdown()
                if attempt == 1:
                    raise self._unanswered(error) from error
            else:
                return


def _ray_outcomes(ray: Any, jobs: Sequence[TrialJob]) -> Iterator[tuple[Trial, TrialOutcome]]:
    task = ray.remote(num_cpus=1, max_retries=RAY_RETRIES)(_ray_task)
    pending = {task.remote(job): job[1] for job in jobs}
    while pending:
        (ready,), _ = ray.wait(list(pending), num_returns=1)
        trial = pending.pop(ready)
        try:
            outcome = ray.get(ready)
        except ray.exceptions.RayError as error:  # the worker died again and again
            why = f"{type(error).__name__}: {_first_line(error)}"
            outcome = TrialOutcome(None, 0.0, error=why)
        yield trial, outcome


def _ray_task(job: TrialJob) -> TrialOutcome:
    _use_one_thread()
    return run_trial(job)


def _ray() -> Any:
    try:
        import ray
    except ImportError as missing:
        raise ReproduceError(
            "--ray needs Ray, which is not installed; run: pip install 'headwise[ray]'."
        ) from missing
    return ray


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
