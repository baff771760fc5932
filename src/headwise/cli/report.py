"""`headwise report`: one HTML page about what headwise made."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import headwise as hw
from headwise.artifacts import check_output
from headwise.cli.console import quiet_transformers, show
from headwise.cli.options import ForceFlag, JsonFlag


def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="A cut model, a profile, a training run or a comparison.", show_default=False
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--out", help="The page.", show_default=True)
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
    check_output(output, force=force)
    if samples and (run / "model").is_dir():
        quiet_transformers()
    hw.report(run, output, force=force, profile=profile, compare=compare, samples=samples)
    document = {"report": str(output), "bytes": output.stat().st_size}
    show(document, as_json=json, render=f"Wrote {output}.")
