"""Trials in local processes, each with one thread, that may die without taking others along.

The runner holds one pipe per worker. A worker that ends without an answer (killed, out of memory)
is replaced and its trial given out again, a few times at most. A worker whose runner is gone ends
at once, so that a continued run never has a rival.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from headwise.reproduce.claim import Trial
from headwise.reproduce.worker import Job, Outcome, one_thread, outcome

MAX_DEATHS = 3


@dataclass(slots=True)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    job: Job


class LocalPool:
    """At most ``workers`` processes at a time."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def check(self) -> None:
        """Processes can always be started."""

    def outcomes(self, jobs: Sequence[Job]) -> Iterator[tuple[Trial, Outcome]]:
        """Every trial with its outcome, as they finish."""
        waiting, busy, deaths = deque(jobs), list[_Worker](), Counter[int]()
        try:
            while waiting or busy:
                while waiting and len(busy) < self.workers:
                    busy.append(_started(waiting.popleft()))
                ready = wait([worker.pipe for worker in busy])
                for worker in [w for w in busy if w.pipe in ready]:
                    came = _answer(worker)
                    if came is None:
                        deaths[id(worker.job)] += 1
                        busy.remove(worker)
                        if deaths[id(worker.job)] < MAX_DEATHS:
                            waiting.appendleft(worker.job)
                            continue
                        came = _died(worker)
                    yield worker.job[1], came
                    if worker in busy:
                        _go_on(worker, waiting, busy)
        finally:
            for worker in busy:
                worker.process.kill()
                worker.process.join()
                worker.pipe.close()


def _started(job: Job) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the child's libraries while they load
    try:
        process.start()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    theirs.close()
    worker = _Worker(process, ours, job)
    _give(worker)
    return worker


def _give(worker: _Worker) -> None:
    with contextlib.suppress(BrokenPipeError):  # it died; the next wait finds out
        worker.pipe.send(worker.job)


def _go_on(worker: _Worker, waiting: deque[Job], busy: list[_Worker]) -> None:
    """The next trial for a worker that has answered, or its end."""
    if waiting:
        worker.job = waiting.popleft()
        _give(worker)
        return
    busy.remove(worker)
    worker.pipe.close()
    worker.process.join()


def _answer(worker: _Worker) -> Outcome | None:
    """What a worker sent; None if it ended without an answer."""
    try:
        came = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join()
        worker.pipe.close()
        return None
    assert isinstance(came, Outcome)
    return came


def _died(worker: _Worker) -> Outcome:
    code = worker.process.exitcode
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return Outcome(None, 0.0, error=f"its process ended {MAX_DEATHS} times, last with {how}")


def _work(pipe: Connection) -> None:
    one_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner is told, and ends us
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            pipe.send(outcome(pipe.recv()))


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
