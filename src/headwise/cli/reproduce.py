"""`headwise reproduce`: run the papers' experiments and judge their claims."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from headwise.cli.console import say, show, stderr_progress, table
from headwise.cli.options import Common, options_command
from headwise.errors import HeadwiseError
from headwise.papers.claims import choose_claims, known_claims
from headwise.papers.harness.pages import ReproduceReport
from headwise.papers.harness.runner import ReproduceOptions, RunRequest, redraw
from headwise.papers.harness.runner import reproduce as run_trials
from headwise.papers.harness.workers import LocalPool, Pool, RayPool


@options_command(
    ReproduceOptions, out="Folder for the results.", argument="claims", required=False, force=False
)
def reproduce(options: ReproduceOptions, common: Common) -> None:
    """Run the papers' experiments and judge each claim: it holds, holds in part, or does not.

    Run the same command again to resume after a stop: finished trials are never run twice.

    Example: headwise reproduce bound-curve four-gram --quick -o results
    """
    out = common.out
    if options.list_:
        _list(options.claims, as_json=common.as_json)
        return
    if out is None:
        raise HeadwiseError("reproduce needs a folder for its results; give one with -o.")
    if options.draw and options.stated.keys() - {"draw"}:
        raise HeadwiseError("--draw redraws everything in the folder; give it only -o.")
    report = redraw(out, known_claims()) if options.draw else _run(options, out)
    rows = [
        (c.id, c.verdict, c.measured, str(len(c.seeds)), str(c.missing) if c.missing else "")
        for c in report.claims
    ]
    found = table("Claims", ("claim", "verdict", "measured", ">seeds", ">missing"), rows)
    document = {"folder": str(out), **report.model_dump(mode="json")}
    show(document, as_json=common.as_json, render=found)
    say(f"Wrote {out / 'index.html'}, table.md, results.json and figures.")
    if not options.draw:
        _fail_if_trials_failed(options.claims, report)


def _fail_if_trials_failed(chosen: tuple[str, ...], report: ReproduceReport) -> None:
    """Exit with 1 if a trial of this request failed; missing packages are not failures."""
    mine = [claim for claim in report.claims if not chosen or claim.id in chosen]
    failed = sum(not f.unavailable for claim in mine for f in claim.failures)
    if failed:
        say(f"{failed} trials failed (see table.md). Run the same command again to retry them.")
        raise typer.Exit(1)


def _run(options: ReproduceOptions, out: Path) -> ReproduceReport:
    import headwise.reporting.charts  # noqa: F401  (a missing extra is reported before the long work)

    claims, pool = choose_claims(options.claims), _pool(options.workers, options.ray)
    request = RunRequest(claims, "quick" if options.quick else "full", options.seeds)
    with stderr_progress() as bar:

        def progress(what: str, done: int, total: int) -> None:
            bar(f"reproduce: {what}", done, total)

        try:
            return run_trials(request, out, pool, known_claims(), progress)
        except KeyboardInterrupt:
            say("Stopped. Run the same command again to resume.")
            raise


def _pool(workers: int | None, ray: str | None) -> Pool:
    if workers is not None and ray not in (None, "local"):
        raise HeadwiseError(
            f"--workers is for this machine, but trials run on {ray}, which sets their number by "
            "its own resources; leave it out."
        )
    count = workers or os.cpu_count() or 1
    return RayPool(ray, count) if ray else LocalPool(count)


def _list(ids: tuple[str, ...], *, as_json: bool) -> None:
    names = ("id", "statement", "source")
    rows = [(claim.id, claim.statement, claim.source) for claim in choose_claims(ids)]
    document = {"claims": [dict(zip(names, row, strict=True)) for row in rows]}
    show(document, as_json=as_json, render=table("Claims", names, rows))
