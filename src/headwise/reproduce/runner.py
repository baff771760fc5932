"""From claims to a folder of results: run what is missing, judge, draw.

    folder/
      run.json                    size, claims and seeds asked for
      trials/<claim>/<key>.json   one finished trial: its spec, its numbers, its time, versions
      trials/<claim>/<key>.failed.json   the last error of one that failed; it is tried again
      table.md  results.json  index.html  figures/<claim>.svg      drawn from the above

Everything in the last line is a function of the files above it, so a run may be stopped at any
moment, continued with the same command, copied, or drawn again elsewhere without running anything.

Trials go out seed by seed, all claims of seed 0 first: whenever a run stops, most claims have
whole seeds to be judged by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headwise.errors import reason_of
from headwise.reproduce.claim import (
    Claim,
    Finding,
    ReproduceError,
    Results,
    Size,
    Trial,
    Verdict,
)
from headwise.reproduce.registry import chosen, claims
from headwise.reproduce.store import Failure, Run, Store, Stored
from headwise.reproduce.sweep import Pool, Watch, sweep

DEFAULT_SEEDS: dict[Size, int] = {"quick": 3, "full": 5}


@dataclass(frozen=True, slots=True)
class Request:
    """What to run: these claims at this size with seeds 0 … n_seeds − 1."""

    claims: tuple[Claim, ...]
    size: Size
    n_seeds: int

    @classmethod
    def of(cls, ids: Sequence[str], size: Size, n_seeds: int | None = None) -> Request:
        """The request for claims by name (none: all) with a size's usual number of seeds."""
        if n_seeds is not None and n_seeds < 1:
            raise ReproduceError(f"Expected at least 1 seed, got {n_seeds}; 3 or more show spread.")
        return cls(chosen(ids), size, n_seeds or DEFAULT_SEEDS[size])


@dataclass(frozen=True, slots=True)
class Judged:
    """A claim with its finding and what is behind it."""

    claim: Claim
    finding: Finding
    results: Results  # whole seeds only
    stored: tuple[Stored, ...]  # every finished trial
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


def reproduce(request: Request, folder: Path, pool: Pool, watch: Watch) -> tuple[Judged, ...]:
    """Run what is missing and draw everything the folder holds; the findings of all its claims."""
    store = Store(folder)
    with store.alone():
        pool.check()  # before anything is noted: a pool that cannot run leaves nothing behind
        store.begin(request.size, {claim.id: request.n_seeds for claim in request.claims})
        sweep(wanted_trials(request), store, pool, watch)
        return redraw(folder)


def redraw(folder: Path) -> tuple[Judged, ...]:
    """Judge and draw what the folder holds, running nothing."""
    from headwise.reproduce.outputs import write_outputs

    store = Store(folder)
    run = store.run()
    if run is None:
        raise ReproduceError(f"{folder} holds no results yet; run without --draw first.")
    found = tuple(
        judged(claim, store, run) for name, claim in claims().items() if name in run.seeds
    )
    write_outputs(folder, run, found)
    return found


def wanted_trials(request: Request) -> list[tuple[Claim, Trial]]:
    """All trials of a request, seed by seed."""
    seeds = range(request.n_seeds)
    pairs = [(c, t) for c in request.claims for t in c.trials(request.size, seeds)]
    return sorted(pairs, key=lambda pair: pair[1].seed)


def judged(claim: Claim, store: Store, run: Run) -> Judged:
    """A claim judged by its whole seeds."""
    trials = claim.trials(run.size, range(run.seeds[claim.id]))
    found = [store.stored(claim, trial) for trial in trials]
    holes = {t.seed for t, stored in zip(trials, found, strict=True) if stored is None}
    there = tuple(stored for stored in found if stored is not None)
    whole = tuple(s.result for s in there if s.result.trial.seed not in holes)
    failures = tuple(
        failure
        for trial, stored in zip(trials, found, strict=True)
        if stored is None and (failure := store.failure(claim, trial)) is not None
    )
    results = Results(run.size, whole)
    if whole:
        finding = _found(claim, results, there)
    else:
        finding = _unfinished(failures, len(there), len(trials))
    return Judged(claim, finding, results, there, failures, len(trials) - len(there))


def _found(claim: Claim, results: Results, there: Sequence[Stored]) -> Finding:
    """The claim's own finding; a rule that fails spoils no other claim's."""
    try:
        finding = claim.judge(results)
    except Exception as error:  # results of any age, which a rule may not expect
        return Finding("not finished", f"The results could not be judged: {reason_of(error)}.")
    mixed = _mixed_versions(there)
    return replace(finding, reasons=(*finding.reasons, mixed)) if mixed else finding


def _mixed_versions(there: Sequence[Stored]) -> str | None:
    """A warning where trials ran on different versions: the built-in text is Python's own."""
    seen: dict[str, set[str]] = {}
    for stored in there:
        for name, version in stored.versions.items():
            seen.setdefault(name, set()).add(version)
    mixed = [f"{name} {'/'.join(sorted(v))}" for name, v in sorted(seen.items()) if len(v) > 1]
    if not mixed:
        return None
    return f"The trials ran on different versions ({', '.join(mixed)}) and may not compare."


def _unfinished(failures: Sequence[Failure], done: int, total: int) -> Finding:
    """The finding of a claim without one whole seed."""
    absent = list(dict.fromkeys(f.error for f in failures if f.unavailable))
    others = [f"{f.name}, seed {f.seed}: {f.error}" for f in failures if not f.unavailable]
    reasons = (*absent, *dict.fromkeys(others))
    verdict: Verdict = "cannot be tested here" if absent and not others else "not finished"
    return Finding(verdict, f"{done} of {total} trials are done, no seed whole.", reasons)
