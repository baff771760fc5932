"""`headwise report`: one HTML page about what headwise made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.console import ForceFlag, JsonFlag, say, show


def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="A cut model, a profile, a training run or a comparison.", show_default=False
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The page.", show_default=True)
    ] = Path("report.html"),
    profile: Annotated[
        Path | None, typer.Option(help="The cut model's profile [RUN.profile, if it is there].")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Also show this comparison (`headwise compare`).")
    ] = None,
    samples: Annotated[bool, typer.Option(help="Let a trained model write a few lines.")] = True,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Write one self-contained HTML page: figures, charts, warnings, where it came from.

    Example: headwise report smaller -o report.html
    """
    from headwise.artifacts import refuse_existing, write_text
    from headwise.report.report import report_page
    from headwise.report.run_report import with_samples
    from headwise.report.sources import TrainingRun, read_report_source

    refuse_existing(output, force=force)
    source = read_report_source(run, profile=profile, compare=compare)
    if samples and isinstance(source, TrainingRun):
        from headwise.cli.evaluate import quiet_transformers

        quiet_transformers()
        source = with_samples(source)
    page = report_page(source)
    write_text(output, page, force=force)
    document = {"report": str(output), "kind": type(source).__name__, "bytes": len(page.encode())}
    show(document, as_json=json, render=f"Wrote {output}.")


def report_beside(made: Path, profile: Path | None = None) -> None:
    """The report of a finished folder, in it; the work is done, so a failure is only said."""
    from headwise.errors import HeadwiseError

    page = made / "report.html"
    try:
        from headwise.report.report import write_report

        write_report(made, page, profile=profile, force=True)
    except HeadwiseError as error:
        say(f"No report: {error}")
    else:
        say(f"Wrote {page}.")
