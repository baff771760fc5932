"""From claims to a folder of results: run what is missing, judge, draw.

    folder/
      run.json  trials/CLAIM.jsonl                                kept by the store
      table.md  results.json  index.html  figures/CLAIM.svg       drawn from the above

Everything in the last line is a function of the files above it. So a run may be stopped at any
moment, resumed with the same command, copied, or drawn again elsewhere without running anything.

Trials go out seed by seed, all claims of seed 0 first: wherever a run stops, most claims have
whole seeds to be judged by.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headwise.artifacts import one_writer
from headwise.errors import reason_of
from headwise.papers.harness.claim import (
    Claim,
    Finding,
    ReproduceError,
    Results,
    Size,
    Trial,
    Verdict,
)
from headwise.papers.harness.pages import ReproduceReport, duration, versions_of, write_outputs
from headwise.papers.harness.store import Failure, ReproduceInputs, Store, StoredTrial
from headwise.papers.harness.workers import Pool
from headwise.progress import Progress, silent
from headwise.recipe import CommandOptions, Names, option

DEFAULT_SEEDS: dict[Size, int] = {"quick": 3, "full": 5}
Claims = Mapping[str, Claim]  # by id


class ReproduceOptions(CommandOptions):
    """The options of `headwise reproduce`."""

    claims: Names = option((), "Claims to test, by id [all].")
    quick: bool = option(False, "Toy sizes: minutes instead of about a day.")
    seeds: int | None = option(
        None, "Random seeds to repeat each experiment with [3 quick, 5 full].", ge=1
    )
    workers: int | None = option(None, "Trials to run in parallel [cores].", ge=1)
    ray: str | None = option(None, "Run on Ray: the address of a cluster, or local.")
    list_: bool = option(False, "List the claims and exit.")
    draw: bool = option(False, "Only redraw what the folder holds; run nothing.")


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What to run: these claims at this size with seeds 0 … n_seeds − 1 (None: as is usual)."""

    claims: tuple[Claim, ...]
    size: Size
    n_seeds: int | None = None

    def __post_init__(self) -> None:
        if self.n_seeds is not None and self.n_seeds < 1:
            raise ReproduceError(
                f"Expected at least 1 seed, got {self.n_seeds}; 3 or more show spread."
            )

    @property
    def seeds(self) -> range:
        """The seeds to run."""
        return range(self.n_seeds or DEFAULT_SEEDS[self.size])

    def trials(self) -> list[tuple[Claim, Trial]]:
        """All trials, seed by seed."""
        pairs = [(c, t) for c in self.claims for t in c.trials(self.size, self.seeds)]
        return sorted(pairs, key=lambda pair: pair[1].seed)


@dataclass(frozen=True, slots=True)
class JudgedClaim:
    """A claim with its finding and what is behind it."""

    claim: Claim
    finding: Finding
    results: Results  # whole seeds only
    stored: tuple[StoredTrial, ...]  # every finished trial
    failures: tuple[Failure, ...]
    missing: int  # trials not run yet, failed ones included

    @property
    def drawable(self) -> bool:
        """Whether there is something to draw."""
        return bool(self.results.items) and self.finding.verdict != "not finished"

    @property
    def seconds(self) -> float:
        """The run times of all finished trials together."""
        return sum(s.result.seconds for s in self.stored)


def reproduce(
    request: RunRequest, folder: Path, pool: Pool, known: Claims, progress: Progress = silent
) -> ReproduceReport:
    """Run what is missing and draw everything the folder holds, of all the `known` claims."""
    store = Store(folder)
    pool.check()  # before anything is noted: a pool that cannot run leaves nothing behind
    with store.resumed(request.size, {claim.id: len(request.seeds) for claim in request.claims}):
        run_missing(request.trials(), store, pool, progress)
        return write_outputs(folder, *judge_folder(folder, known), known)


def run_missing(
    wanted: Sequence[tuple[Claim, Trial]], store: Store, pool: Pool, progress: Progress
) -> None:
    """Run the trials without a result; an outcome is on disk before the next is waited for.

    The time left is the time so far, scaled by the expected costs of what is done and what is not.
    """
    missing = [(claim, trial) for claim, trial in wanted if store.stored(claim, trial) is None]
    claims = {claim.id: claim for claim, _ in missing}
    done, failures, cost_done = len(wanted) - len(missing), 0, 0.0
    cost_left = sum(trial.cost for _, trial in missing)
    progress("trials", done, len(wanted))
    start = time.monotonic()
    for trial, outcome in pool.outcomes([(claim.run, trial) for claim, trial in missing]):
        store.put(claims[trial.claim], trial, outcome)
        done += 1
        cost_done, cost_left = cost_done + trial.cost, cost_left - trial.cost
        left = (time.monotonic() - start) * max(0.0, cost_left) / cost_done
        words = f"trials, about {duration(left)} left"
        if outcome.error is not None:
            failures += 1
            words += f", failed: {trial.claim} {trial.name}, seed {trial.seed}: {outcome.error}"
        elif failures:
            words += f", {failures} failed"
        progress(words, done, len(wanted))


def redraw(folder: Path, known: Claims) -> ReproduceReport:
    """Judge and draw what the folder holds, running nothing."""
    run, judged = judge_folder(folder, known)
    with one_writer(folder):
        return write_outputs(folder, run, judged, known)


def judge_folder(folder: Path, known: Claims) -> tuple[ReproduceInputs, tuple[JudgedClaim, ...]]:
    """Every claim that the folder holds results of, judged."""
    store = Store(folder)
    run = store.asked()
    if run is None:
        raise ReproduceError(f"{folder} holds no results yet; run without --draw first.")
    asked = [claim for name, claim in known.items() if name in run.seeds]
    return run, tuple(judge_claim(claim, store, run) for claim in asked)


def judge_claim(claim: Claim, store: Store, run: ReproduceInputs) -> JudgedClaim:
    """A claim judged by its whole seeds."""
    trials = claim.trials(run.size, range(run.seeds[claim.id]))
    results = [store.stored(claim, trial) for trial in trials]
    gaps = [trial for trial, stored in zip(trials, results, strict=True) if stored is None]
    found = tuple(stored for stored in results if stored is not None)
    whole = tuple(s.result for s in found if s.result.trial.seed not in {t.seed for t in gaps})
    errors = (store.failure(claim, trial) for trial in gaps)
    failures = tuple(failure for failure in errors if failure is not None)
    if whole:
        finding = _finding(claim, Results(run.size, whole), found)
    else:
        finding = _unfinished(failures, len(found), len(trials))
    finding = replace(finding, reasons=(*finding.reasons, *_contrasts(claim, run.size, found)))
    return JudgedClaim(claim, finding, Results(run.size, whole), found, failures, len(gaps))


def _finding(claim: Claim, results: Results, stored: Sequence[StoredTrial]) -> Finding:
    """The claim's own finding; a rule that fails spoils no other claim's."""
    try:
        finding = claim.judge(results)
    except Exception as error:  # results of any age, which a rule may not expect
        return Finding("not finished", f"The results could not be judged: {reason_of(error)}.")
    seen = sorted(versions_of(stored).items())
    # The built-in text is that of the running Python.
    mixed = [f"{name} {'/'.join(sorted(v))}" for name, v in seen if len(v) > 1]
    if not mixed:
        return finding
    warning = (
        f"The trials ran on different versions ({', '.join(mixed)}) and may not be comparable."
    )
    return replace(finding, reasons=(*finding.reasons, warning))


def _contrasts(claim: Claim, size: Size, stored: Sequence[StoredTrial]) -> tuple[str, ...]:
    """What the claim says of all its finished trials; a rule that fails says nothing."""
    try:
        return claim.contrasts(Results(size, tuple(s.result for s in stored)))
    except Exception:  # as above
        return ()


def _unfinished(failures: Sequence[Failure], done: int, total: int) -> Finding:
    """The finding of a claim without one whole seed."""
    absent = list(dict.fromkeys(f.error for f in failures if f.unavailable))
    others = [f"{f.name}, seed {f.seed}: {f.error}" for f in failures if not f.unavailable]
    reasons = (*absent, *dict.fromkeys(others))
    verdict: Verdict = "cannot be tested here" if absent and not others else "not finished"
    return Finding(verdict, f"{done} of {total} trials are done; no seed is whole.", reasons)
