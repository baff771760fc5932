"""`headwise report`: one HTML page about what headwise made."""

from __future__ import annotations

from pathlib import Path

import headwise as hw
from headwise.artifacts import check_output
from headwise.cli.console import quiet_transformers, show
from headwise.cli.options import Common, options_command
from headwise.recipe import ReportOptions


@options_command(ReportOptions, out="The page [report.html].", argument="run", required=False)
def report(options: ReportOptions, common: Common) -> None:
    """Write one self-contained HTML page: figures, charts, warnings, provenance.

    Example: headwise report smaller -o report.html
    """
    page = common.out or Path("report.html")
    check_output(page, force=common.force, inputs=options.reads, kind="page")
    if options.samples and (Path(options.run) / "model").is_dir():
        quiet_transformers()
    how = {name: value for name, value in options.stated.items() if name != "run"}
    hw.report(options.run, page, force=common.force, **how)
    document = {"report": str(page), "bytes": page.stat().st_size}
    show(document, as_json=common.as_json, render=f"Wrote {page}.")
