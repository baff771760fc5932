"""`headwise report`: one HTML page about what headwise made."""

from __future__ import annotations

from pathlib import Path

import headwise as hw
from headwise.artifacts import check_output
from headwise.cli.console import quiet_transformers, show
from headwise.cli.options import Common, options_command
from headwise.recipe import ReportOptions


@options_command(ReportOptions, out="The page [report.html].", argument="run", required=False)
def report(asked: ReportOptions, common: Common) -> None:
    """Write one self-contained HTML page: figures, charts, warnings, where it came from.

    Example: headwise report smaller -o report.html
    """
    page = common.out or Path("report.html")
    check_output(page, force=common.force, inputs=asked.reads, kind="page")
    if asked.samples and (Path(asked.run) / "model").is_dir():
        quiet_transformers()
    how = {name: value for name, value in asked.stated.items() if name != "run"}
    hw.report(asked.run, page, force=common.force, **how)
    document = {"report": str(page), "bytes": page.stat().st_size}
    show(document, as_json=common.as_json, render=f"Wrote {page}.")
