"""`headwise reproduce`: the papers' experiments, run and judged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.console import JsonFlag, say, show, table
from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headwise.reproduce.runner import Judged
    from headwise.reproduce.sweep import Pool


def reproduce(
    claims: Annotated[list[str] | None, typer.Argument(help="Ids of claims [all].")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The folder of results.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Toy sizes: minutes, not a day.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Repetitions [3 quick, 5 full].")] = None,
    workers: Annotated[int | None, typer.Option(help="Trials at a time [cores].")] = None,
    ray: Annotated[
        str | None, typer.Option("--ray", help="Run on Ray: a cluster's address, or local.")
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the claims and stop.")] = False,
    draw: Annotated[
        bool, typer.Option("--draw", help="Only draw what the folder holds, running nothing.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run the papers' experiments and judge each claim: holds, in part, or not.

    Run the same command again to go on after a stop: finished trials are never run twice.

    Example: headwise reproduce bound-curve four-gram --quick -o results
    """
    if listing:
        _list(claims or [], as_json=as_json)
        return
    if out is None:
        raise HeadwiseError("reproduce needs a folder for its results; give one with -o.")
    if draw and (claims or quick or any(x is not None for x in (seeds, workers, ray))):
        raise HeadwiseError("--draw draws all that the folder holds; give it only -o.")
    found = _drawn(out) if draw else _run(claims or [], out, quick, seeds, _pool(workers, ray))
    show(_document(out), as_json=as_json, render=_picture(found))
    say(f"Wrote {out / 'index.html'}, table.md, results.json and figures.")
    if not draw:
        _tell_failures(claims or [], found)


def _tell_failures(asked: list[str], found: tuple[Judged, ...]) -> None:
    """Exit with 1 if a trial of this request failed; what this machine lacks is no failure."""
    mine = [item for item in found if not asked or item.claim.id in asked]
    failed = sum(not f.unavailable for item in mine for f in item.failures)
    if failed:
        say(f"{failed} trials failed (see table.md); the same command tries them again.")
        raise typer.Exit(1)


def _run(
    ids: list[str], out: Path, quick: bool, seeds: int | None, pool: Pool
) -> tuple[Judged, ...]:
    import headwise.report.charts  # noqa: F401  (a missing extra is told before a day's work)
    from headwise.cli.progress import shown
    from headwise.reproduce.runner import Request, reproduce
    from headwise.reproduce.sweep import Progress
    from headwise.reproduce.table import duration

    request = Request.of(ids, "quick" if quick else "full", seeds)
    with shown("trials") as bar:

        def watch(now: Progress) -> None:
            left = "" if now.seconds_left is None else f"about {duration(now.seconds_left)} left"
            failed = f", {now.failed} failed" if now.failed else ""
            at = f", after {now.last.claim} {now.last.name}" if now.last else ""
            bar.update(now.done, now.total, f"{left}{failed}{at}")
            if now.error and now.last:
                last = now.last
                bar.note(f"Failed: {last.claim} {last.name}, seed {last.seed}: {now.error}")

        return reproduce(request, out, pool, watch)


def _drawn(out: Path) -> tuple[Judged, ...]:
    from headwise.reproduce.runner import redraw

    return redraw(out)


def _pool(workers: int | None, ray: str | None) -> Pool:
    from headwise.reproduce.local_pool import LocalPool
    from headwise.reproduce.ray_pool import RayPool

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
    from headwise.reproduce.registry import chosen

    found = chosen(ids)
    rows = [(claim.id, claim.statement, claim.source) for claim in found]
    names = ("id", "statement", "source")
    document = {"claims": [dict(zip(names, row, strict=True)) for row in rows]}
    show(document, as_json=as_json, render=table("Claims", names, rows))


def _document(out: Path) -> dict[str, Any]:
    import json

    document: dict[str, Any] = json.loads((out / "results.json").read_text(encoding="utf-8"))
    return {"folder": str(out), **document}


def _picture(found: tuple[Judged, ...]) -> RenderableType:
    rows = [
        (
            item.claim.id,
            item.finding.verdict,
            item.finding.measured,
            str(len(item.results.seeds)),
            str(item.missing) if item.missing else "",
        )
        for item in found
    ]
    return table("Claims", ("claim", "verdict", "measured", ">seeds", ">missing"), rows)
