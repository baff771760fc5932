"""What a run leaves for people and programs: figures, results.json, a Markdown table, a web page.

judged claims ──► figures/CLAIM.svg
      │
      └──► ReproduceReport ──► results.json, table.md, index.html (no scripts, no network)
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headwise.artifacts import write_text
from headwise.papers.harness.charts import described
from headwise.papers.harness.claim import Cell, ResultTable, Size, Verdict
from headwise.papers.harness.judging import listed
from headwise.papers.harness.store import Failure, ReproduceInputs, StoredTrial
from headwise.records import Frozen, Record, write_record

if TYPE_CHECKING:
    from headwise.papers.harness.runner import JudgedClaim
    from headwise.reporting.charts import Chart

TITLE = "The claims of the papers, measured"
COLUMNS = ("claim", "the paper says", "measured", "seeds", "verdict")
LEGEND = (
    "“±” is the standard deviation over seeds; bars in figures go from the lowest seed to the "
    "highest.",
    "“Within the spread” means that the interval of the mean difference, taken seed by seed, "
    "contains 0: the difference may be chance.",
    "“Cannot be tested here” means that the spread or the size of the experiment hides the answer, "
    "or that the machine lacks what is needed; “holds in part” that some of the claim was seen.",
)
VERDICT_STYLES = {"holds": "holds", "holds in part": "in-part", "does not hold": "not"}


class ClaimReport(Frozen):
    """A claim, what was found, and what is behind it."""

    id: str
    statement: str
    expected: str
    source: str
    setting: str
    claim_version: int
    verdict: Verdict
    measured: str
    reasons: tuple[str, ...]
    table: ResultTable | None
    figure: str | None
    figure_shows: str | None
    seeds: tuple[int, ...]
    trials: int
    missing: int
    failures: tuple[Failure, ...]
    seconds: float


class Provenance(Frozen):
    """Versions and cores of the machines that ran the trials, and the time it took them."""

    versions: dict[str, tuple[str, ...]]
    cores: tuple[int, ...]
    trials: int
    seconds: float


class ReproduceReport(Record):
    """The content of results.json; the table and the page are made of this and the figures."""

    format: Literal["headwise-reproduce/2"] = "headwise-reproduce/2"
    size: Size
    claims: tuple[ClaimReport, ...]
    not_run: tuple[str, ...]
    provenance: Provenance


def write_outputs(
    folder: Path, run: ReproduceInputs, judged: Sequence[JudgedClaim], known: Iterable[str]
) -> ReproduceReport:
    """Draw everything; what was there before is replaced file by file."""
    from headwise.reporting.charts import save_chart

    figures, drawn = folder / "figures", {}
    for item in judged:
        chart = _chart(item)
        if chart is not None:
            save_chart(chart, figures / f"{item.claim.id}.svg", force=True)
            drawn[item.claim.id] = described(chart)
    stored = [s for item in judged for s in item.stored]
    report = ReproduceReport(
        size=run.size,
        claims=tuple(_claim_report(item, drawn.get(item.claim.id)) for item in judged),
        not_run=tuple(name for name in known if name not in run.seeds),
        provenance=Provenance(
            versions={name: tuple(sorted(v)) for name, v in sorted(versions_of(stored).items())},
            cores=tuple(sorted({s.cores for s in stored})),
            trials=len(stored),
            seconds=round(sum(item.seconds for item in judged), 1),
        ),
    )
    write_record(folder / "results.json", report)
    write_text(folder / "table.md", markdown(report), force=True)
    write_text(folder / "index.html", page(report, figures), force=True)
    return report


def _chart(item: JudgedClaim) -> Chart | None:
    """The claim's figure; None if there is nothing to draw, or results that it does not expect."""
    if not item.drawable:
        return None
    try:
        return item.claim.figure(item.results)
    except Exception:  # results of any age, or damaged: they spoil no other claim's figure
        return None


def _claim_report(item: JudgedClaim, drawn: str | None) -> ClaimReport:
    claim, finding = item.claim, item.finding
    return ClaimReport(
        id=claim.id,
        statement=claim.statement,
        expected=claim.expected,
        source=claim.source,
        setting=claim.setting,
        claim_version=claim.version,
        verdict=finding.verdict,
        measured=finding.measured,
        reasons=finding.reasons,
        table=finding.table,
        figure=f"figures/{claim.id}.svg" if drawn else None,
        figure_shows=drawn,
        seeds=item.results.seeds,
        trials=len(item.stored),
        missing=item.missing,
        failures=item.failures,
        seconds=round(item.seconds, 1),
    )


def versions_of(stored: Sequence[StoredTrial]) -> dict[str, set[str]]:
    """Every version of every package that some trial ran with."""
    seen: dict[str, set[str]] = {}
    for one in stored:
        for name, version in one.versions.items():
            seen.setdefault(name, set()).add(version)
    return seen


# --- words that both pages use -----------------------------------------------------------------


def legend(report: ReproduceReport) -> tuple[str, ...]:
    """What the words mean, and which claims are not there."""
    missing = listed(report.not_run)
    return (*LEGEND, f"Not run: {missing}.") if report.not_run else LEGEND


def provenance(report: ReproduceReport) -> str:
    """Versions, machine and time in one line."""
    made = report.provenance
    versions = ", ".join(f"{name} {'/'.join(v)}" for name, v in made.versions.items())
    cores = "/".join(map(str, made.cores)) or "no"
    return (
        f"{made.trials} trials, {duration(made.seconds)} of processor time, each trial on "
        f"one thread (machine of {cores} cores); {versions}."
    )


def basis(claim: ClaimReport) -> str:
    """Seeds, trials and time behind a finding."""
    seeds = ", ".join(map(str, claim.seeds)) or "none whole"
    text = f"Seeds: {seeds}. Trials: {claim.trials}, {duration(claim.seconds)}."
    if claim.missing:
        text += f" Missing: {claim.missing}, of which failed: {len(claim.failures)}."
    return text


def failures(claim: ClaimReport) -> tuple[str, ...]:
    """Every failed trial in a line."""
    return tuple(f"failed: {f.name}, seed {f.seed}: {f.error}" for f in claim.failures)


def shown_cell(value: Cell) -> str:
    """A cell: floats with four digits, absent values as a dash."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """A length of time in its natural unit."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


# --- Markdown ----------------------------------------------------------------------------------


def markdown(report: ReproduceReport) -> str:
    """One table of all claims, then a section for each."""
    rows = [
        (
            f"[{claim.id}](#{claim.id}): {claim.statement}",
            f"{claim.expected} ({claim.source})",
            claim.measured,
            len(claim.seeds),
            f"**{claim.verdict}**",
        )
        for claim in report.claims
    ]
    lines = [
        f"# {TITLE}",
        "",
        f"Size: {report.size}. {provenance(report)}",
        "",
        *(f"- {line}" for line in legend(report)),
        "",
        *_markdown_table(COLUMNS, rows),
    ]
    for claim in report.claims:
        lines += ["", *_markdown_section(claim)]
    return "\n".join(lines) + "\n"


def _markdown_section(claim: ClaimReport) -> list[str]:
    lines = [f"## {claim.id}", "", claim.statement, "", f"*{claim.setting}*", ""]
    lines += [f"**{claim.verdict.capitalize()}.** {claim.measured}", ""]
    lines += [f"- {reason}" for reason in claim.reasons] + [""]
    if claim.figure:
        lines += [f"![{claim.figure_shows}]({claim.figure})", ""]
    if claim.table:
        lines += [*_markdown_table(claim.table.columns, claim.table.rows), ""]
    lines += [f"- {line}" for line in failures(claim)]
    return [*lines, basis(claim)]


def _markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> list[str]:
    def row(cells: Sequence[Cell]) -> str:
        texts = [shown_cell(c).replace("|", "\\|").replace("\n", " ") for c in cells]
        return f"| {' | '.join(texts)} |"

    return [row(columns), "|---" * len(columns) + "|", *map(row, rows)]


# --- HTML --------------------------------------------------------------------------------------


def page(report: ReproduceReport, figures: Path) -> str:
    """The whole page; figures are read from their folder."""
    from headwise.reporting.template import page_text

    drawn = [claim.id for claim in report.claims if claim.figure]
    return page_text(
        "reproduce.html",
        package="headwise.papers.harness",
        title=TITLE,
        report=report,
        columns=COLUMNS,
        styles=VERDICT_STYLES,
        legend=legend(report),
        provenance=provenance(report),
        pictures={n: base64.b64encode((figures / f"{n}.svg").read_bytes()).decode() for n in drawn},
        failures=failures,
        basis=basis,
        shown=shown_cell,
    )
