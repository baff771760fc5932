"""A chart inside a page: a drawing in the page's own colours, its meaning in words, its numbers.

Charts become SVG once, when the page is written, so the page needs no script and prints as it
looks.
Colours are the page's (`currentColor`, `var(--accent)`) and follow it into the dark. For a screen
reader the drawing is one image named by its sentence; the numbers follow as a table.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from headwise.report.charts import Chart

FIRST, SECOND, THIRD = "var(--accent)", "var(--second)", "var(--good)"
QUIET = "var(--quiet)"
DEPTH = ["#4f7be0", "#c04a8a", "#d98a2b"]  # first to last layer; readable on white and on black
WIDTH = 380  # of a plot, so that a chart with its axes fits a phone without tiny letters


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its title, what it shows in words, and its numbers."""

    title: str
    words: str
    chart: Chart
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]


def inline_svg(chart: Chart, name: str) -> str:
    """The chart as an SVG element; `name` keeps its inner names apart from other charts'."""
    drawn: Any = chart
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
    return text.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1)


def places(count: int, most: int) -> list[int]:
    """Evenly spaced places among `count`, first and last among them, at most `most`."""
    if count <= most:
        return list(range(count))
    return sorted({round(k * (count - 1) / (most - 1)) for k in range(most)})


def log_y(field: str, title: str | None, ticks: int = 5) -> alt.Y:
    """A logarithmic axis upwards with few, plain numbers."""
    return alt.Y(
        f"{field}:Q",
        title=title,
        scale=alt.Scale(type="log", nice=False),
        axis=alt.Axis(format="~g", tickCount=ticks),
    )


def rows_chart(rows: Sequence[dict[str, Any]]) -> alt.Chart:
    """A chart of rows."""
    return alt.Chart(alt.InlineData(values=list(rows)))
