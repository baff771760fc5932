"""`headwise reproduce`: run the papers' experiments and judge their claims."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.console import say, show, shown, table
from headwise.cli.options import JsonFlag
from headwise.errors import HeadwiseError
from headwise.papers.claims import choose_claims, known_claims
from headwise.papers.harness.pages import ReproduceReport
from headwise.papers.harness.runner import RunRequest, redraw
from headwise.papers.harness.runner import reproduce as run_trials
from headwise.papers.harness.workers import LocalPool, Pool, RayPool


def reproduce(
    claims: Annotated[list[str] | None, typer.Argument(help="Claims to test, by id [all].")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder for the results.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Toy sizes: minutes instead of about a day.")
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(help="Random seeds to repeat each experiment with [3 quick, 5 full]."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Trials to run in parallel [cores].")] = None,
    ray: Annotated[
        str | None, typer.Option("--ray", help="Run on Ray: the address of a cluster, or local.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the claims and exit.")] = False,
    draw: Annotated[
        bool, typer.Option("--draw", help="Only redraw what the folder holds; run nothing.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run the papers' experiments and judge each claim: it holds, holds in part, or does not.

    Run the same command again to resume after a stop: finished trials are never run twice.

    Example: headwise reproduce bound-curve four-gram --quick -o results
    """
    if listing:
        _list(claims or [], as_json=as_json)
        return
    if out is None:
        raise HeadwiseError("reproduce needs a folder for its results; give one with -o.")
    if draw and (claims or quick or any(x is not None for x in (seeds, workers, ray))):
        raise HeadwiseError("--draw draws all that the folder holds; give it only -o.")
    report = (
        redraw(out, known_claims())
        if draw
        else _run(claims or [], out, quick, seeds, _pool(workers, ray))
    )
    rows = [
        (c.id, c.verdict, c.measured, str(len(c.seeds)), str(c.missing) if c.missing else "")
        for c in report.claims
    ]
    found = table("Claims", ("claim", "verdict", "measured", ">seeds", ">missing"), rows)
    document = {"folder": str(out), **report.model_dump(mode="json")}
    show(document, as_json=as_json, render=found)
    say(f"Wrote {out / 'index.html'}, table.md, results.json and figures.")
    if not draw:
        _fail_if_trials_failed(claims or [], report)


def _fail_if_trials_failed(chosen: list[str], report: ReproduceReport) -> None:
    """Exit with 1 if a trial of this request failed; what this machine lacks is no failure."""
    mine = [claim for claim in report.claims if not chosen or claim.id in chosen]
    failed = sum(not f.unavailable for claim in mine for f in claim.failures)
    if failed:
        say(f"{failed} trials failed (see table.md). Run the same command again to retry them.")
        raise typer.Exit(1)


def _run(ids: list[str], out: Path, quick: bool, seeds: int | None, pool: Pool) -> ReproduceReport:
    import headwise.reporting.charts  # noqa: F401  (a missing extra is reported before the long work)

    request = RunRequest(choose_claims(ids), "quick" if quick else "full", seeds)
    with shown() as bar:

        def progress(what: str, done: int, total: int) -> None:
            bar(f"reproduce: {what}", done, total)

        try:
            return run_trials(request, out, pool, known_claims(), progress)
        except KeyboardInterrupt:
            say("Stopped. Run the same command again to resume.")
            raise


def _pool(workers: int | None, ray: str | None) -> Pool:
    if workers is not None and workers < 1:
        raise HeadwiseError(f"--workers must be at least 1, got {workers}.")
    if workers is not None and ray not in (None, "local"):
        raise HeadwiseError(
            f"--workers is for this machine, but trials go to {ray}, which runs as many as it has "
            "room for; leave it out."
        )
    count = workers or os.cpu_count() or 1
    return RayPool(ray, count) if ray else LocalPool(count)


def _list(ids: list[str], *, as_json: bool) -> None:
    names = ("id", "statement", "source")
    rows = [(claim.id, claim.statement, claim.source) for claim in choose_claims(ids)]
    document = {"claims": [dict(zip(names, row, strict=True)) for row in rows]}
    show(document, as_json=as_json, render=table("Claims", names, rows))
