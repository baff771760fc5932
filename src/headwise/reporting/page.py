"""What a page is made of: sections of paragraphs, tables, cards and figures, as data.

A figure is a chart with a caption and its numbers. Charts become SVG when the page is
written, so it needs no script and prints as it looks. Colours are the page's (`currentColor`,
`var(--accent)`) and follow it into a dark theme. For a screen reader the drawing is one image,
named by its sentence; the numbers follow as a table.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import altair as alt

from headwise.reporting.charts import Chart, without_controls
from headwise.reporting.template import page_text, unescaped

if TYPE_CHECKING:
    from markupsafe import Markup

FIRST, SECOND, THIRD = "var(--accent)", "var(--second)", "var(--good)"
QUIET = "var(--quiet)"
DEPTH = ["#4f7be0", "#c04a8a", "#d98a2b"]  # first to last layer; readable on white and on black
WIDTH = 380  # of a plot, so that a chart with its axes fits a phone without tiny letters


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Sentences."""

    kind: ClassVar = "paragraph"
    text: str
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """A command or a program."""

    kind: ClassVar = "code"
    text: str


@dataclass(frozen=True, slots=True)
class Quotation:
    """Words a model wrote."""

    kind: ClassVar = "quotation"
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table; numbers are aligned to the right, the first cell of a row names it."""

    kind: ClassVar = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values; an empty value is left out."""

    kind: ClassVar = "facts"
    rows: Sequence[tuple[str, str | None]]


@dataclass(frozen=True, slots=True)
class Card:
    """One headline figure: what it is, its value, and what to compare it with."""

    name: str
    value: str
    beside: str = ""
    mood: str = ""  # good, bad or nothing


@dataclass(frozen=True, slots=True)
class Cards:
    """The headline."""

    kind: ClassVar = "cards"
    cards: Sequence[Card]


@dataclass(frozen=True, slots=True)
class Warnings:
    """What a reader must know."""

    kind: ClassVar = "warnings"
    sentences: Sequence[str]


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its title, caption and numbers."""

    title: str
    caption: str
    chart: Chart
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Figures:
    """Charts beside each other where there is room; `name` is theirs in the whole page."""

    kind: ClassVar = "figures"
    figures: Sequence[Figure]
    name: str


Part = Paragraph | Code | Quotation | Table | Facts | Cards | Warnings | Figures


@dataclass(frozen=True, slots=True)
class Section:
    """Parts under a heading."""

    title: str
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Page:
    """A whole report."""

    title: str
    lead: str
    sections: Sequence[Section]


def warnings_section(sentences: Sequence[str]) -> list[Section]:
    """The warnings under their heading; nothing if there are none."""
    return [Section("Warnings", [Warnings(sentences)])] if sentences else []


def provenance_section(rows: Iterable[tuple[str, str | None]], command: str = "") -> Section:
    """Where a result came from: facts, and the command that made it."""
    parts: list[Part] = [Facts(list(rows))]
    return Section("Provenance", [*parts, Code(command)] if command else parts)


def sentence(note: str) -> str:
    """A note as a sentence: a capital at its start, a full stop at its end."""
    return f"{note[:1].upper()}{note[1:].rstrip('.')}."


def named_versions(versions: Mapping[str, str]) -> str:
    """Packages with their versions."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def page_html(page: Page) -> str:
    """The page as text: no script, no network."""
    return page_text("page.html", page=page, inline_svg=inline_svg)


def inline_svg(chart: Chart, name: str) -> Markup:
    """The chart as an SVG element; `name` keeps its inner names apart from other charts'."""
    drawn: Any = without_controls(chart)
    drawn = drawn.configure(background="transparent", aria=False, font="system-ui, sans-serif")
    drawn = drawn.configure_view(stroke=None)
    drawn = drawn.configure_axis(
        labelColor="currentColor",
        titleColor="currentColor",
        tickColor=QUIET,
        domainColor=QUIET,
        gridColor="var(--line)",
        labelFontSize=11,
        titleFontSize=12,
        titleFontWeight="normal",
        titlePadding=10,
    )
    drawn = drawn.configure_legend(
        labelColor="currentColor",
        titleColor="currentColor",
        labelFontSize=11,
        titleFontSize=11,
        titleFontWeight="normal",
        columnPadding=24,  # the reader's letters may be wider than those measured here
    )
    drawn = drawn.configure_header(
        labelColor="currentColor", titleColor="currentColor", labelFontSize=12
    )
    drawn = drawn.configure_title(color="currentColor", fontSize=12, fontWeight="normal")
    stream = io.StringIO()
    drawn.save(stream, format="svg")
    text = stream.getvalue()
    start = text.index("<svg")
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text[start:])
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    # The words in the drawing were escaped when it was made.
    return unescaped(text.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1))


def places(count: int, most: int) -> list[int]:
    """Evenly spaced places among `count`, first and last among them, at most `most`."""
    if count <= most:
        return list(range(count))
    return sorted({round(k * (count - 1) / (most - 1)) for k in range(most)})


def log_y(field: str, title: str | None, ticks: int = 5) -> alt.Y:
    """A logarithmic vertical axis with few, plain numbers."""
    return alt.Y(
        f"{field}:Q",
        title=title,
        scale=alt.Scale(type="log", nice=False),
        axis=alt.Axis(format="~g", tickCount=ticks),
    )


def rows_chart(rows: Sequence[Mapping[str, object]]) -> alt.Chart:
    """A chart of rows."""
    return alt.Chart(alt.InlineData(values=list(rows)))
