"""Charts, one function per figure; one specification gives offline HTML, SVG and PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.artifacts import atomic_file
from headwise.errors import HeadwiseError, printable
from headwise.reporting.template import page_text, unescaped

try:
    import altair as alt
    import vl_convert
except ImportError as missing:
    raise HeadwiseError(
        "Charts need altair and vl-convert, which are not installed; "
        "run: pip install 'headwise[plot]'."
    ) from missing

if TYPE_CHECKING:
    from headwise.baselines.record import ComparisonRecord
    from headwise.plan import Plan
    from headwise.theory.allocation import BoundCurve

Chart = alt.TopLevelMixin
USEFUL_RATIO = 4.0  # perplexity ÷ dense above which nobody would take a cut
ENDINGS = (".png", ".svg", ".html")
MOST_DRAWN = 20_000  # head groups in a map of a plan; drawing more would take minutes
MOST_LABELLED_GROUPS = 24  # wider maps are too dense for numbers
# Words are measured in one font and drawn in the reader's own, which may be wider: without room at
# the right, legends lose their last letters.
_VEGA_LITE = alt.SCHEMA_VERSION.removeprefix("v").rpartition(".")[0]  # as altair writes it
SVG_PADDING = {"left": 5, "top": 5, "right": 48, "bottom": 5}


def bound_chart(curve: BoundCurve, width: int) -> Chart:
    """The error bound by number of heads, its lowest point, and what predicting zero costs."""
    rows = [
        {"heads": h, "bound": b, "head width": d}
        for h, b, d in zip(curve.heads, curve.bound, curve.head_dim, strict=True)
    ]
    best = {"heads": curve.best.heads, "bound": curve.best.bound}
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=alt.X("heads:Q", title="heads per lag"),
        y=alt.Y("bound:Q", title="error bound"),
        tooltip=["heads:Q", "head width:Q", "bound:Q"],
    )
    line = base.mark_line(point=alt.OverlayMarkDef(size=18))
    low = alt.Chart(alt.InlineData(values=[best])).encode(x="heads:Q", y="bound:Q")
    mark = low.mark_point(size=120, color="#d62728", strokeWidth=2)
    label = low.mark_text(align="left", dx=10, dy=-10, color="#d62728").encode(
        text=alt.value(f"{best['heads']} heads: {best['bound']:.3f}")
    )
    zero = (
        alt.Chart(alt.InlineData(values=[{"bound": curve.zero_error}]))
        .mark_rule(strokeDash=[4, 4], color="#888")
        .encode(y="bound:Q")
    )
    return alt.layer(line, zero, mark, label).properties(
        title=f"Error bound at total width {width} (dashed: predicting zero)",
        width=560,
        height=300,
    )


def plan_chart(plan: Plan) -> Chart:
    """Every head group's two widths as a layers × heads map, value-output beside query-key.

    If MLP widths differ from the uniform model's, they are shown next to the map as bars.
    """
    count = sum(len(layer.heads) for layer in plan.layers)
    if count > MOST_DRAWN:
        raise HeadwiseError(
            f"a chart shows at most {MOST_DRAWN:,} head groups, and this plan has {count:,}; leave "
            "the chart out."
        )
    rows: list[dict[str, Any]] = [
        {"layer": i, "head group": j, "side": side, "width": width, "queries": head.queries}
        for i, layer in enumerate(plan.layers)
        for j, head in layer.by_source.items()
        for side, width in (("query-key", head.qk_dim), ("value-output", head.vo_dim))
    ]
    full: int = max((row["width"] for row in rows), default=1)
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=alt.X("head group:O", axis=alt.Axis(labelAngle=0)), y=alt.Y("layer:O")
    )
    cells = base.mark_rect(stroke="white").encode(
        color=alt.Color("width:Q", scale=alt.Scale(scheme="viridis", domain=[0, full])),
        tooltip=["layer:O", "head group:O", "width:Q", "queries:Q"],
    )
    numbers = base.mark_text(fontSize=9).encode(
        text="width:Q",
        color=alt.condition(f"datum.width > {full / 2}", alt.value("black"), alt.value("white")),
    )
    shape = plan.shape
    policy = f", policy {plan.origin.policy}" if plan.origin.policy else ""
    groups = max(1 + max(layer.sources, default=0) for layer in plan.layers)
    few = groups <= MOST_LABELLED_GROUPS
    layers = alt.layer(cells, numbers) if few else alt.layer(cells)
    panel = layers.properties(width=22 * groups if few else 300, height=14 * shape.n_layers)
    heads = panel.facet(column=alt.Column("side:N", title=None))
    sizes = f"{shape.n_layers} layers, d_model {shape.d_model}{policy}"
    if not plan.changes_ffn:
        return heads.properties(title=f"Head widths: {sizes}")
    neurons = [{"layer": i, "neurons": n} for i, n in enumerate(plan.ffn_dims)]
    bars = (
        alt.Chart(alt.InlineData(values=neurons))
        .mark_bar()
        .encode(x=alt.X("neurons:Q", title="MLP width"), y=alt.Y("layer:O"))
        .properties(width=160, height=14 * shape.n_layers)
    )
    return alt.hconcat(heads, bars).properties(title=f"Head and MLP widths: {sizes}")


def pareto_chart(record: ComparisonRecord, only: int | None = None) -> Chart:
    """Perplexity ÷ dense by counted attention parameters, one line per method, one panel per text.

    `only` is the index of the text to show. A cell without figures has no point.
    """
    rows: list[dict[str, Any]] = [
        {
            "method": cell.method,
            "budget": cell.budget,
            "share": cell.share,
            "ratio": score.ratio,
            "text": f"{Path(text.source).name}: {text.role}",
        }
        for cell in record.measured
        for i, (text, score) in enumerate(zip(record.texts, cell.texts, strict=True))
        if only in (None, i) and score.ratio is not None
    ]
    ratios = [row["ratio"] for row in rows]
    least, most = min(ratios, default=1.0), max(ratios, default=1.0)
    # Methods that break a model would squeeze the others onto the axis: they leave the panel.
    top = min(most, max(USEFUL_RATIO, USEFUL_RATIO * least))
    whole = [0.98 * least, 1.02 * top]  # a log axis would else go to powers of ten
    methods = list(record.methods)
    base = alt.Chart(alt.InlineData(values=rows)).encode(
        x=alt.X(
            "share:Q",
            title=f"{record.counted} kept",
            axis=alt.Axis(format="%"),
            scale=alt.Scale(zero=False, padding=8),
        ),
        y=alt.Y(
            "ratio:Q",
            title="perplexity ÷ dense",
            scale=alt.Scale(type="log", domain=whole, nice=False),
        ),
        color=alt.Color("method:N", sort=methods),
        tooltip=["method:N", "budget:N", "share:Q", "ratio:Q"],
    )
    points = base.mark_point(size=60, filled=True, clip=True).encode(
        shape=alt.Shape("method:N", sort=methods, legend=None)
    )
    panel = alt.layer(base.mark_line(clip=True), points).properties(width=420, height=320)
    texts = list(dict.fromkeys(row["text"] for row in rows))
    words = f"Methods at equal counted budgets: {Path(record.model).name}"
    title = alt.TitleParams(words)
    if most > top:
        title.subtitle = f"Points above ×{top:.3g} (up to ×{most:,.0f}) are only in the table."
    facets: Chart = panel.facet(column=alt.Column("text:N", title=None, sort=texts)).properties(
        title=title
    )
    return facets


def save_chart(
    chart: Chart, path: Path, *, force: bool = False, inputs: Sequence[Path | str] | None = None
) -> None:
    """Write a chart as PNG, SVG or a self-contained HTML page, by the ending of `path`.

    `inputs` as for `artifacts.atomic_file`.
    """
    kind = path.suffix.lower()
    if kind not in ENDINGS:
        raise HeadwiseError(f"A chart's file must end in {', '.join(ENDINGS)}, got {path.name!r}.")
    drawn: Any = without_controls(chart)
    with atomic_file(path, force=force, inputs=inputs, kind="page") as temporary:
        if kind == ".html":
            temporary.write_text(chart_html(drawn, path.stem), encoding="utf-8")
        elif kind == ".svg":
            with temporary.open("w", encoding="utf-8") as text:
                drawn.copy().configure(padding=SVG_PADDING).save(text, format="svg")
        else:
            with temporary.open("wb") as binary:
                drawn.save(binary, format="png", scale_factor=2)


def chart_html(chart: Chart, title: str) -> str:
    """The chart as a page of its own, with the program that draws it inside."""
    # Its stub forgets that the snippet may be left out.
    bundle = vl_convert.javascript_bundle(vl_version=_VEGA_LITE)  # type: ignore[call-arg]
    return page_text(
        "chart.html", title=title, script=unescaped(bundle), specification=chart.to_dict()
    )


def without_controls(chart: Chart) -> Chart:
    """The chart with printable texts only: SVG cannot hold control characters."""
    specification = chart.to_dict()
    cleaned = _printable(specification)
    return chart if cleaned == specification else alt.Chart.from_dict(cleaned)


def _printable(data: Any) -> Any:
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, list):
        return [_printable(one) for one in data]
    if isinstance(data, dict):
        return {name: _printable(one) for name, one in data.items()}
    return data
