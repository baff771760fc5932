"""The few kinds of figure that claims need, drawn from numbers that are already measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.papers.harness.judging import Summary, summary

if TYPE_CHECKING:
    from headwise.reporting.charts import Chart

NUMBER = ".12~g"  # no exponent below a million million, no trailing zeros


@dataclass(frozen=True, slots=True)
class Point:
    """One mark: its place, its height with spread, and the line it belongs to."""

    x: float | int
    y: Summary
    series: str


@dataclass(frozen=True, slots=True)
class Axes:
    """Titles and scales of a figure; a logarithmic scale leaves out values that are not above 0."""

    title: str
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    x_values: tuple[float | int, ...] | None = None  # where to put ticks
    from_zero: bool = True  # the vertical axis


def series(curve: Mapping[Any, Sequence[float]], name: str) -> list[Point]:
    """One line: at every place the values of all seeds."""
    return [Point(place, summary(values), name) for place, values in curve.items()]


def curves(points: Sequence[Point], axes: Axes) -> Chart:
    """Lines through means, with bars from the lowest seed to the highest."""
    from headwise.reporting import charts  # says what to install where altair is missing

    alt: Any = charts.alt  # type: ignore[attr-defined]
    rows = [_row(point, axes) for point in points if point.y.mean > 0 or not axes.log_y]
    ticks: Any = alt.Undefined if axes.x_values is None else list(axes.x_values)
    step: Any = 1 if all(isinstance(point.x, int) for point in points) else alt.Undefined
    # Colour and shape share one legend only if they share title, order and domain.
    names = list(dict.fromkeys(point.series for point in points))
    key = {"title": None, "scale": alt.Scale(domain=names), "legend": alt.Legend(labelLimit=320)}
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=alt.X(
            "x:Q",
            title=axes.x,
            scale=alt.Scale(type="log", base=2) if axes.log_x else alt.Scale(zero=False),
            axis=alt.Axis(values=ticks, format=NUMBER, tickMinStep=step),
        ),
        color=alt.Color("series:N", **key),
    )
    scale = alt.Scale(type="log") if axes.log_y else alt.Scale(zero=axes.from_zero)
    y = alt.Y("mean:Q", title=axes.y, scale=scale, axis=alt.Axis(format=NUMBER))
    line = base.mark_line(point=True).encode(y=y, shape=alt.Shape("series:N", **key))
    spread = base.mark_rule(strokeWidth=1.5).encode(y="low:Q", y2="high:Q")
    return alt.layer(line, spread).properties(  # type: ignore[no-any-return]
        title=axes.title, width=560, height=300
    )


def panels(figures: Sequence[Chart]) -> Chart:
    """Figures one below the other, each with its own lines and scales."""
    from headwise.reporting import charts

    alt: Any = charts.alt  # type: ignore[attr-defined]
    return alt.vconcat(*figures).resolve_scale(color="independent", shape="independent")  # type: ignore[no-any-return]


def described(chart: Chart) -> str:
    """What a figure shows, in words: the title and the axes of every panel."""
    drawn = chart.to_dict()
    words = []
    for panel in drawn.get("vconcat", [drawn]):
        encoding = panel["layer"][0]["encoding"]
        across, up = encoding["x"]["title"], encoding["y"]["title"]
        words.append(f"{panel['title']}: {up} over {across}")
    return "; ".join(words)


def _row(point: Point, axes: Axes) -> dict[str, float | str]:
    # On a logarithmic scale a seed at 0 has no place: its bar ends at the mean.
    low = point.y.mean if axes.log_y and point.y.low <= 0 else point.y.low
    return {
        "x": point.x,
        "mean": point.y.mean,
        "low": low,
        "high": point.y.high,
        "series": point.series,
    }
