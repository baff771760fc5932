"""Trials as Ray tasks: on a cluster (headwise installed on its nodes), or a Ray started here.

Ray runs a task again whose worker or node died; a trial is a pure function, so nothing is lost
and the runner gets exactly one outcome for each. Outcomes come back to the runner, which alone
writes files: the nodes need no common disk.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from headwise.reproduce.claim import ReproduceError, Trial
from headwise.reproduce.worker import Job, Outcome, one_thread, outcome

MAX_RETRIES = 2
START_ATTEMPTS = 3
KNOCK_SECONDS = 10.0


class RayPool:
    """``address`` of a cluster, or "local" for a Ray of ``workers`` processes on this machine."""

    def __init__(self, address: str, workers: int) -> None:
        self.address, self.workers = address, workers

    def check(self) -> None:
        """Raise if Ray is missing, or nothing listens at its address."""
        _ray()
        try:
            _knock(self.address)
        except OSError as error:
            raise self._unanswered(error) from error

    def outcomes(self, jobs: Sequence[Job]) -> Iterator[tuple[Trial, Outcome]]:
        """Every trial with its outcome, as they finish."""
        if not jobs:
            return
        self.check()  # Ray itself would knock for minutes
        ray = _ray()
        self._connect(ray)
        try:
            yield from _finished(ray, jobs)
        finally:
            ray.shutdown()

    def _unanswered(self, error: Exception) -> ReproduceError:
        return ReproduceError(
            f"No Ray cluster answers at {self.address!r} ({_first_line(error)}); give the address "
            "of a running one, such as 10.0.0.5:6379, or local."
        )

    def _connect(self, ray: Any) -> None:
        """Join the cluster or start one; a busy machine may miss the 30 s Ray gives itself."""
        attempts = START_ATTEMPTS if self.address == "local" else 1
        for attempt in range(1, attempts + 1):
            try:
                ray.init(**self._arguments())
            except Exception as error:  # Ray has no class of its own for this
                ray.shutdown()
                if attempt == attempts:
                    raise self._unanswered(error) from error
            else:
                return

    def _arguments(self) -> dict[str, Any]:
        joined: dict[str, Any] = {
            "address": self.address,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}},
            "log_to_driver": False,
            "logging_level": "ERROR",
        }
        started = {"num_cpus": self.workers, "include_dashboard": False}
        return joined | started if self.address == "local" else joined


def _knock(address: str) -> None:
    """Whether anything listens at host:port."""
    match = re.fullmatch(r"(?:ray://)?\[?(.+?)\]?:(\d{1,5})", address)
    if match:
        with contextlib.closing(socket.create_connection((match[1], int(match[2])), KNOCK_SECONDS)):
            pass


def _finished(ray: Any, jobs: Sequence[Job]) -> Iterator[tuple[Trial, Outcome]]:
    task = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(_task)
    pending = {task.remote(job): job[1] for job in jobs}
    while pending:
        (ready,), _ = ray.wait(list(pending), num_returns=1)
        trial = pending.pop(ready)
        try:
            came = ray.get(ready)
        except ray.exceptions.RayError as error:  # the worker died again and again
            came = Outcome(None, 0.0, error=f"{type(error).__name__}: {_first_line(error)}")
        yield trial, came


def _task(job: Job) -> Outcome:
    one_thread()
    return outcome(job)


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
