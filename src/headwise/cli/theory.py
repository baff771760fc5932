"""`headwise theory`: what the known theories say, as numbers."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from headwise.cli.console import draw, show, table
from headwise.cli.options import ForceFlag, JsonFlag, PlotFile
from headwise.errors import HeadwiseError
from headwise.plan import Plan
from headwise.planning.families import new_shape
from headwise.plans import read_plan
from headwise.theory.advise import advise as views_on
from headwise.theory.allocation import allocate as best_allocation
from headwise.theory.bounds import bound_curve
from headwise.theory.diagnosis import failure_signs
from headwise.theory.estimators import Spectrum, read_vectors, token_spectrum

MAX_COUNTS = 10_000

app = typer.Typer(
    help="What the known theories say about heads and widths.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Width = Annotated[int, typer.Option(help="Total width D, the sum of all head widths.")]
Kernel = Annotated[
    str | None, typer.Option(help="Weight of each lag, such as 1,0.5,0.25 (default: all 1).")
]
Vectors = Annotated[
    Path | None,
    typer.Option(
        help="A .npy file of token vectors (tokens × width), whose measured spectrum replaces "
        "--token-dim.",
    ),
]


@app.command()
def bound(
    width: Width,
    heads: Annotated[str, typer.Option(help="Heads per lag: 8, 1,2,4 or 1-80.")],
    token_dim: Annotated[int | None, typer.Option(help="Width d of a token.")] = None,
    lags: Annotated[int, typer.Option(help="How many lags the heads look at.")] = 1,
    kernel: Kernel = None,
    vectors: Vectors = None,
    plot: PlotFile = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """The error bound of arXiv 2510.03784 along a list of head counts.

    Example: headwise theory bound --width 128 --token-dim 16 --heads 1-80 --plot bound.svg
    """
    counts = _counts(heads)
    weights = _weights(kernel) if kernel else None
    tokens = _tokens(token_dim, vectors)
    curve = bound_curve(width, tokens, counts, lags=lags, kernel=weights)
    vacuous = [value >= curve.zero_error for value in curve.bound]
    document = {
        "heads": list(curve.heads),
        "bound": list(curve.bound),
        "best": {"heads": curve.best.heads, "bound": curve.best.bound},
        "head_dim": list(curve.head_dim),
        "zero_error": curve.zero_error,
        "vacuous": vacuous,
    }
    if plot:
        draw(plot, lambda charts: charts.bound_chart(curve, width), force=force)
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
    show(document, as_json=json, render=table(title, columns, rows))


@app.command()
def allocate(
    width: Width,
    kernel: Annotated[str, typer.Option(help="Weight of each lag, such as 1,1,1,1.")],
    token_dim: Annotated[int | None, typer.Option(help="Width d of a token.")] = None,
    vectors: Vectors = None,
    json: JsonFlag = False,
) -> None:
    """The heads that minimise the error bound exactly, spending at most --width.

    Example: headwise theory allocate --width 256 --token-dim 8 --kernel 1,1,1,1
    """
    weights = _weights(kernel)
    best = best_allocation(width, _tokens(token_dim, vectors), weights)
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
        f"{width - best.slack} of {width} spent"
    )
    rows = [(str(g.lag), str(g.heads), str(g.head_dim)) for g in best.groups]
    show(document, as_json=json, render=table(title, (">lag", ">heads", ">head width"), rows))


@app.command()
def advise(
    d_model: Annotated[int, typer.Option(help="Width of the model.")],
    heads: Annotated[int, typer.Option(help="Attention heads in a layer.")],
    head_dim: Annotated[int, typer.Option(help="Width of a head.")],
    context: Annotated[int, typer.Option(help="Tokens a head attends to.")],
    eps: Annotated[float, typer.Option(help="Distortion the JL lemma may leave, in (0, 1).")] = 0.5,
    plan: Annotated[
        Path | None, typer.Option(help="A plan to look for failure signs in [equal layers].")
    ] = None,
    fitted: Annotated[
        Path | None,
        typer.Option(help="A plan of about the same cost, fitted to a profile or to proxies."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Four views on one configuration, the failure signs it shows, and what to change.

    Example: headwise theory advise --d-model 4096 --heads 32 --head-dim 128 --context 8192
    """
    views = views_on(d_model, heads, head_dim, context, eps=eps)
    measured = None if fitted is None else read_plan(fitted)
    if plan is not None:
        own = read_plan(plan)
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
    words = {True: "shown", False: "not shown", None: "cannot be told"}
    told = [(s.name, words[s.shown], s.why, s.change or "–") for s in signs]
    columns = ("failure sign", "", "why", "what to change")
    render = Group(
        table(title, ("view", "verdict", "why"), rows), table("Failure signs", columns, told)
    )
    show(document, as_json=json, render=render)


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


def _weights(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise HeadwiseError(
            f"--kernel must be numbers separated by commas, such as 1,0.5,0.25, got {text!r}."
        ) from None


def _tokens(token_dim: int | None, vectors: Path | None) -> int | Spectrum:
    """White tokens of a width, or the measured spectrum of a file; exactly one is given."""
    if (token_dim is None) == (vectors is None):
        came = "neither" if vectors is None else "both"
        raise HeadwiseError(f"One of --token-dim and --vectors is needed, got {came}; give one.")
    if vectors is None:
        assert token_dim is not None
        return token_dim
    return token_spectrum(read_vectors(vectors))
