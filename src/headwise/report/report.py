"""One page for whatever headwise made."""

from __future__ import annotations

from pathlib import Path

from headwise.artifacts import write_text
from headwise.report import charts  # noqa: F401  (first: it says what to install for charts)
from headwise.report.compare_report import comparison_page
from headwise.report.cut_report import cut_page
from headwise.report.profile_report import profile_page
from headwise.report.run_report import run_page, with_samples
from headwise.report.sources import (
    ComparedRecipes,
    CutModel,
    ProfiledModel,
    Source,
    TrainingRun,
    read_report_source,
)


def report_page(source: Source) -> str:
    """The page of a source."""
    match source:
        case CutModel():
            return cut_page(source)
        case ProfiledModel():
            return profile_page(source)
        case TrainingRun():
            return run_page(source)
        case ComparedRecipes():
            return comparison_page(source.document)


def write_report(
    path: Path,
    output: Path,
    *,
    profile: Path | None = None,
    force: bool = False,
    samples: bool = True,
) -> None:
    """Read what lies in `path` and write its page; a finished run is asked for samples."""
    source = read_report_source(path, profile=profile)
    if samples and isinstance(source, TrainingRun):
        source = with_samples(source)
    write_text(output, report_page(source), force=force)
