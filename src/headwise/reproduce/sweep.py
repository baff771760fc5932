"""Run the trials that have no result file yet, wherever a pool runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from headwise.reproduce.claim import Claim, Trial
from headwise.reproduce.store import Store
from headwise.reproduce.worker import Job, Outcome


class Pool(Protocol):
    """Somewhere trials run: every trial comes back once, with its numbers or its error."""

    def check(self) -> None:
        """Raise if trials could not run here."""

    def outcomes(self, jobs: Sequence[Job]) -> Iterator[tuple[Trial, Outcome]]:
        """Every trial with its outcome, as they finish."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a sweep is; ``last`` is the trial that has just ended."""

    done: int
    total: int
    failed: int
    seconds_left: float | None
    last: Trial | None = None
    error: str | None = None


Watch = Callable[[Progress], None]


def sweep(wanted: Sequence[tuple[Claim, Trial]], store: Store, pool: Pool, watch: Watch) -> None:
    """Run what is missing; an outcome is on disk before the next is waited for.

    The time left is the time so far, scaled by the expected costs of what is done and what is not.
    """
    missing = [(claim, trial) for claim, trial in wanted if store.stored(claim, trial) is None]
    claims = {claim.id: claim for claim, _ in missing}
    done, failed, cost_done = len(wanted) - len(missing), 0, 0.0
    cost_left = sum(trial.cost for _, trial in missing)
    watch(Progress(done, len(wanted), failed, None))
    start = time.monotonic()
    for trial, came in pool.outcomes([(claim.run, trial) for claim, trial in missing]):
        store.put(claims[trial.claim], trial, came)
        done, failed = done + 1, failed + (came.values is None)
        cost_done, cost_left = cost_done + trial.cost, cost_left - trial.cost
        left = (time.monotonic() - start) * max(0.0, cost_left) / cost_done
        watch(Progress(done, len(wanted), failed, left, trial, came.error))
