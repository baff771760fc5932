"""What a run leaves for people and programs: figures, one table, one page, one JSON document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.artifacts import write_text
from headwise.reproduce.page import page
from headwise.reproduce.registry import claims
from headwise.reproduce.store import FORMAT_VERSION, Run
from headwise.reproduce.table import markdown

if TYPE_CHECKING:
    from headwise.reproduce.runner import Judged


def write_outputs(folder: Path, run: Run, found: Sequence[Judged]) -> None:
    """Write everything that is drawn; what stood there before is replaced file by file."""
    from headwise.report.charts import save_chart

    figures, drawn = folder / "figures", {}
    for item in found:
        if item.drawable:
            chart = item.claim.figure(item.results)
            save_chart(chart, figures / f"{item.claim.id}.svg", force=True)
            drawn[item.claim.id] = _described(chart.to_dict())
    info = document(run, found, drawn)
    write_text(folder / "results.json", _text(info), force=True)
    write_text(folder / "table.md", markdown(info), force=True)
    write_text(folder / "index.html", page(info, figures), force=True)


def document(run: Run, found: Sequence[Judged], drawn: Mapping[str, str]) -> dict[str, Any]:
    """The findings and where they come from; the table and the page are made of this alone.

    `drawn` says of every claim with a figure what the figure shows.
    """
    return {
        "format": "headwise-reproduce",
        "version": FORMAT_VERSION,
        "size": run.size,
        "claims": [_claim(item, drawn.get(item.claim.id)) for item in found],
        "not_run": [name for name in claims() if name not in run.seeds],
        "provenance": {
            "versions": _versions(found),
            "cores": sorted({s.cores for item in found for s in item.stored}),
            "trials": sum(len(item.stored) for item in found),
            "seconds": round(sum(item.seconds for item in found), 1),
        },
    }


def _claim(item: Judged, drawn: str | None) -> dict[str, Any]:
    claim, finding, table = item.claim, item.finding, item.finding.table
    return {
        "id": claim.id,
        "statement": claim.statement,
        "expected": claim.expected,
        "source": claim.source,
        "setting": claim.setting,
        "claim_version": claim.version,
        "verdict": finding.verdict,
        "measured": finding.measured,
        "reasons": list(finding.reasons),
        "table": table and {"columns": list(table.columns), "rows": [list(r) for r in table.rows]},
        "figure": f"figures/{claim.id}.svg" if drawn else None,
        "figure_shows": drawn,
        "seeds": list(item.results.seeds),
        "trials": len(item.stored),
        "missing": item.missing,
        "failures": [{"name": f.name, "seed": f.seed, "error": f.error} for f in item.failures],
        "seconds": round(item.seconds, 1),
    }


def _described(chart: dict[str, Any]) -> str:
    """What a figure shows, in words: the title and the axes of every panel."""
    words = []
    for panel in chart.get("vconcat", [chart]):
        encoding = panel["layer"][0]["encoding"]
        across, up = encoding["x"]["title"], encoding["y"]["title"]
        words.append(f"{panel['title']}: {up} over {across}")
    return "; ".join(words)


def _versions(found: Sequence[Judged]) -> dict[str, list[str]]:
    """Every version of every package that some trial ran with."""
    seen: dict[str, set[str]] = {}
    for item in found:
        for stored in item.stored:
            for name, version in stored.versions.items():
                seen.setdefault(name, set()).add(version)
    return {name: sorted(values) for name, values in sorted(seen.items())}


def _text(info: dict[str, Any]) -> str:
    return json.dumps(info, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
