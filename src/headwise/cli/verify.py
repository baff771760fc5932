"""`headwise verify`: what a cut model lost and saved, against the model it was cut from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headwise.cli.console import say, show, table
from headwise.cli.options import Common, options_command
from headwise.measure.record import (
    SIZE_NAMES,
    ImageQuality,
    LanguageQuality,
    Quality,
    Rate,
    Verification,
)
from headwise.recipe import VerifyRecipe

if TYPE_CHECKING:
    from rich.console import RenderableType

MISSED = 1  # the exit code when the work was done, but a target was missed


@options_command(VerifyRecipe, out="Also write the JSON document here.", required=False)
def verify(recipe: VerifyRecipe, common: Common) -> None:
    """Measure a cut model against its source; exit code 1 means that a target was missed.

    Example: headwise verify smaller --against ./model --text held-out.txt --max-ratio 1.1
    """
    found = common.run(recipe)
    render = verification_table(found)
    show(found.model_dump(mode="json"), as_json=common.as_json, render=render)
    conclude(found)


def conclude(found: Verification) -> None:
    """Print the warnings and the missed targets; a missed target is exit code 1."""
    for warning in (*found.warnings, *(found.speed.left_out if found.speed else ())):
        say(f"Note: {warning}")
    for target in found.targets:
        if not target.met:
            say(f"Missed: {target.sentence}")
    if not found.met:
        raise typer.Exit(MISSED)


def verification_table(found: Verification) -> RenderableType:
    """A verification as people read it."""
    rows = [row for text in found.texts for row in _quality_rows(text)]
    for name, size in found.size.items():
        share = f"{size.share:.2%}"
        rows.append((SIZE_NAMES[name], f"{size.dense:,}", f"{size.cut:,}", share))
    for point in found.speed.points if found.speed else ():
        rates = (_rate(point.dense), _rate(point.cut))
        rows.append((f"{point.title}, tokens/s", *rates, _times(point.ratio)))
        if point.same_code is not None:
            alike = _times(point.same_code_ratio)
            rows.append(("  dense in the same code", _rate(point.same_code), "", alike))
        if point.peak is not None:
            peaks = (_gib(point.peak.dense), _gib(point.peak.cut))
            share = f"{point.peak.cut / point.peak.dense:.2%}"
            rows.append(("  peak memory, GiB", *peaks, share))
    if found.fits is not None:
        fits = found.fits
        what = f"sequences of {fits.context:,} tokens in {_gib(fits.memory)} GiB"
        ratio = _times(fits.cut / fits.dense) if fits.dense else ""
        rows.append((what, f"{fits.dense:,}", f"{fits.cut:,}", ratio))
    for task in found.tasks:
        rows.append(
            (
                f"{task.name} ({task.metric}, {task.questions:,} questions)",
                f"{task.dense:.2%} ±{task.dense_stderr:.2%}",
                f"{task.cut:.2%} ±{task.cut_stderr:.2%}",
                f"{task.difference:+.2%} ±{task.difference_stderr:.2%}",
            )
        )
    title = f"{found.model} against {found.against}"
    return table(title, ("", ">dense", ">cut", ">cut ÷ dense"), rows)


def _quality_rows(text: Quality) -> list[tuple[str, str, str, str]]:
    where = f"{Path(text.source).name} ({text.role})"
    if isinstance(text, LanguageQuality):
        first, last = text.by_position[0], text.by_position[-1]
        perplexities = (_number(text.dense_perplexity), _number(text.perplexity))
        drift = f"{first.kl:.4f} → {last.kl:.4f} at {last.last}"
        return [
            (f"perplexity, {where}", *perplexities, _times(text.ratio)),
            ("  top token agrees", "", f"{text.top_agreement:.2%}", ""),
            ("  KL, nats per token", "", f"{text.kl:.4f}", drift),
        ]
    rows = [
        (f"cosine, {where}", "1", _number(text.cosine), ""),
        (f"lowest cosine, {where}", "1", _number(text.least_cosine), ""),
    ]
    if isinstance(text, ImageQuality) and text.top_agreement is not None:
        rows.append(("  top class agrees", "", f"{text.top_agreement:.2%}", ""))
        rows.append(("  KL, nats per image", "", _number(text.kl), ""))
    return rows


def _gib(amount: int) -> str:
    return f"{amount / 2**30:.2f}"


def _number(value: float | None) -> str:
    return "∞" if value is None else f"{value:.4f}"


def _times(ratio: float | None) -> str:
    return "∞" if ratio is None else f"×{ratio:.4f}"


def _rate(rate: Rate) -> str:
    """The median, and how far the repetitions were from it."""
    spread = max(rate.high / rate.median - 1, 1 - rate.low / rate.median)
    return f"{rate.median:,.0f} ±{spread:.0%}"
