"""`headwise theory`: what the known theories say, as numbers."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Group

from headwise.cli.console import draw, show, table
from headwise.cli.options import Common, PlotFile, options_command
from headwise.errors import HeadwiseError
from headwise.plan import Plan
from headwise.planning.families import new_shape
from headwise.plans import read_plan
from headwise.recipe import AdviseOptions, AllocateOptions, BoundOptions, TokenOptions
from headwise.theory.advise import advise as views_on
from headwise.theory.advise import failure_signs
from headwise.theory.allocation import allocate as best_allocation
from headwise.theory.allocation import bound_curve
from headwise.theory.estimators import Spectrum, read_vectors, token_spectrum

MAX_COUNTS = 10_000

app = typer.Typer(
    help="What the known theories say about heads and widths.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
@options_command(BoundOptions, argument=None, force=True, plot=PlotFile)
def bound(options: BoundOptions, common: Common) -> None:
    """The error bound of arXiv 2510.03784 along a list of head counts.

    Example: headwise theory bound --width 128 --token-dim 16 --heads 1-80 --plot bound.svg
    """
    width, counts = options.width, _counts(options.heads)
    curve = bound_curve(width, _tokens(options), counts, lags=options.lags, kernel=options.kernel)
    vacuous = [value >= curve.zero_error for value in curve.bound]
    document = {
        "heads": list(curve.heads),
        "bound": list(curve.bound),
        "best": {"heads": curve.best.heads, "bound": curve.best.bound},
        "head_dim": list(curve.head_dim),
        "zero_error": curve.zero_error,
        "vacuous": vacuous,
    }
    plot = common.extra["plot"]
    if plot:
        draw(plot, lambda charts: charts.bound_chart(curve, width), force=common.force)
    rows = [
        (
            str(h),
            f"{dim:.4g}",
            f"{value:.4f}",
            "no" if v else "yes",
            "◄" if h == curve.best.heads else "",
        )
        for h, dim, value, v in zip(curve.heads, curve.head_dim, curve.bound, vacuous, strict=True)
    ]
    title = f"Error bound, width {width}; lowest {curve.best.bound:.4f} at {curve.best.heads} heads"
    columns = (">heads", ">head width", ">bound", "below predicting zero", "")
    show(document, as_json=common.as_json, render=table(title, columns, rows))


@app.command()
@options_command(AllocateOptions, argument=None)
def allocate(options: AllocateOptions, common: Common) -> None:
    """The heads that minimise the error bound exactly, spending at most --width.

    Example: headwise theory allocate --width 256 --token-dim 8 --kernel 1,1,1,1
    """
    best = best_allocation(options.width, _tokens(options), options.kernel)
    document = {
        "lags": best.lags,
        "groups": [{"lag": g.lag, "heads": g.heads, "head_dim": g.head_dim} for g in best.groups],
        "bound": best.bound,
        "slack": best.slack,
        "on_corner": best.on_corner,
        "vacuous": best.vacuous,
        "zero_error": best.zero_error,
    }
    corner = "on the corner head width = token width" if best.on_corner else "off the corner"
    worth = "vacuous (no better than predicting zero)" if best.vacuous else "below predicting zero"
    title = (
        f"Bound {best.bound:.4f}, {worth} ({best.zero_error:g}); {corner}; "
        f"{options.width - best.slack} of {options.width} spent"
    )
    rows = [(str(g.lag), str(g.heads), str(g.head_dim)) for g in best.groups]
    columns = (">lag", ">heads", ">head width")
    show(document, as_json=common.as_json, render=table(title, columns, rows))


@app.command()
@options_command(AdviseOptions, argument=None)
def advise(options: AdviseOptions, common: Common) -> None:
    """Four views on one configuration, the failure signs it shows, and what to change.

    Example: headwise theory advise --d-model 4096 --heads 32 --head-dim 128 --context 8192
    """
    d_model, heads, head_dim, context = (
        options.d_model,
        options.heads,
        options.head_dim,
        options.context,
    )
    views = views_on(d_model, heads, head_dim, context, eps=options.eps)
    measured = None if options.fitted is None else read_plan(options.fitted)
    if options.plan is not None:
        own = read_plan(options.plan)
    else:
        n_layers = 1 if measured is None else len(measured.layers)
        shape = new_shape(
            n_layers=n_layers, d_model=d_model, n_heads=heads, head_dim=head_dim, context=context
        )
        own = Plan.uniform(shape)
    signs = failure_signs(own, measured, context)
    document = {
        "views": [
            {"name": v.name, "numbers": dict(v.numbers), "verdict": str(v.verdict), "why": v.why}
            for v in views
        ],
        "signs": [asdict(sign) for sign in signs],
    }
    rows = [(v.name, str(v.verdict), v.why) for v in views]
    title = f"{heads} heads of width {head_dim}, d_model {d_model}, context {context}"
    words = {True: "shown", False: "not shown", None: "unknown"}
    told = [(s.name, words[s.shown], s.why, s.change or "–") for s in signs]
    columns = ("failure sign", "", "why", "what to change")
    render = Group(
        table(title, ("view", "verdict", "why"), rows), table("Failure signs", columns, told)
    )
    show(document, as_json=common.as_json, render=render)


def _counts(text: str) -> tuple[int, ...]:
    """Whole numbers: `8`, `1,2,4`, `1-80`, or a mixture."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?", part)
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else 0
        if not 1 <= first <= last or len(found) + last - first >= MAX_COUNTS:
            raise HeadwiseError(
                f"--heads must be whole numbers from 1 up, such as 8, 1,2,4 or 1-80 (at most "
                f"{MAX_COUNTS} of them), got {text!r}."
            )
        found += range(first, last + 1)
    return tuple(found)


def _tokens(options: TokenOptions) -> int | Spectrum:
    """White tokens of a width, or the measured spectrum of a file; exactly one is given."""
    if options.token_dim is not None and options.vectors is None:
        return options.token_dim
    if options.vectors is not None and options.token_dim is None:
        return token_spectrum(read_vectors(Path(options.vectors)))
    came = "neither" if options.vectors is None else "both"
    raise HeadwiseError(f"One of --token-dim and --vectors is needed, got {came}; give one.")
