"""Figures of what was measured: predictions against measurements, drift, training, methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from headwise.baselines.record import ComparisonRecord
from headwise.errors import BudgetError
from headwise.measure.record import (
    ImageQuality,
    LanguageQuality,
    Quality,
    Verification,
)
from headwise.plan import Budget, Limit
from headwise.planning.fit import fit
from headwise.planning.rules import WidthRules
from headwise.profiling.format import Profile
from headwise.profiling.worth import fit_problem
from headwise.reporting.charts import pareto_chart
from headwise.reporting.names import text_name
from headwise.reporting.page import (
    FIRST,
    QUIET,
    SECOND,
    THIRD,
    WIDTH,
    Facts,
    Figure,
    Figures,
    Paragraph,
    Part,
    Section,
    Table,
    log_y,
    rows_chart,
)
from headwise.training.checkpoint import StepRecord

MOST_POINTS = 400  # of a training curve
# Percent of the attention parameters kept, by policy.
SHARES = {"sensitivity": (95, 90, 85, 80, 75, 70, 60, 50, 40), "uniform": (90, 75, 50)}


def _measured_loss(text: Quality) -> tuple[float, str]:
    """What a cut cost on a text, and its unit."""
    if isinstance(text, LanguageQuality):
        return text.nll - text.dense_nll, "rise of the loss, nats per token"
    if isinstance(text, ImageQuality) and text.kl is not None:
        return text.kl, "divergence of the classes, nats per image"
    return 1 - text.cosine, "1 − cosine of embeddings"


def prediction_figure(predicted: float, found: Verification) -> Figure:
    """The predicted rise of the loss beside the measured ones."""
    rows = [("predicted from the profile", predicted)]
    rows += [(text_name(text), _measured_loss(text)[0]) for text in found.texts]
    unit = _measured_loss(found.texts[0])[1]
    data = [
        {"what": what, "rise": x, "kind": "measured" if i else "predicted", "label": f"{x:+.3f}"}
        for i, (what, x) in enumerate(rows)
    ]
    base = rows_chart(data).encode(
        y=alt.Y("what:N", title=None, sort=None, axis=alt.Axis(labelLimit=170, ticks=False)),
        x=alt.X("rise:Q", title=unit),
    )
    bars = base.mark_bar(height=14).encode(
        color=alt.Color(
            "kind:N",
            title=None,
            scale=alt.Scale(domain=["predicted", "measured"], range=[QUIET, FIRST]),
            legend=None,
        )
    )
    labels = base.mark_text(align="left", dx=4, color="currentColor").encode(text="label:N")
    measured = "; ".join(f"{x:+.3f} on {what}" for what, x in rows[1:])
    return Figure(
        title="Predicted against measured",
        caption=f"Predicted {predicted:+.3f}, measured {measured}. The prediction does not count "
        "the refit or any training after the cut.",
        chart=alt.layer(bars, labels).properties(width=WIDTH - 150, height=30 * len(rows)),
        columns=("", unit),
        rows=rows,
    )


def drift_figure(found: Verification) -> Figure | None:
    """How far the predictions are from the dense model's, by position in the text."""
    texts = [text for text in found.texts if isinstance(text, LanguageQuality)]
    if not texts:
        return None
    rows = [
        {"text": text_name(t), "position": x.last, "kl": x.kl} for t in texts for x in t.by_position
    ]
    names = [text_name(t) for t in texts]
    chart = (
        rows_chart(rows)
        .mark_line(point=alt.OverlayMarkDef(size=24), strokeWidth=1.6)
        .encode(
            x=alt.X(
                "position:Q",
                title="up to this position",
                scale=alt.Scale(type="log", base=2, nice=False),
                axis=alt.Axis(format="d", labelOverlap="greedy", labelSeparation=4),
            ),
            y=alt.Y("kl:Q", title="divergence, nats per token"),
            color=alt.Color(
                "text:N",
                title=None,
                sort=names,
                scale=alt.Scale(domain=names, range=[FIRST, SECOND, THIRD, QUIET]),
                legend=alt.Legend(orient="bottom", labelLimit=280, direction="vertical"),
            ),
        )
        .properties(width=WIDTH, height=190)
    )
    ends = "; ".join(
        f"{t.by_position[-1].kl:.3f} at position {t.by_position[-1].last} of {text_name(t)}"
        for t in texts
    )
    return Figure(
        title="Drift by position",
        caption=f"How far each prediction is from the dense model's (Kullback–Leibler): {ends}.",
        chart=chart,
        columns=("text", "positions", "tokens", "divergence"),
        rows=[
            (text_name(t), f"{x.first}–{x.last}", x.tokens, x.kl)
            for t in texts
            for x in t.by_position
        ],
    )


def loss_figure(rows: Sequence[StepRecord]) -> Figure:
    """Training and held-out loss by step."""
    every = max(1, len(rows) // MOST_POINTS)
    data = [
        {"step": row.step, "loss": row.loss, "text": "trained on"}
        for k, row in enumerate(rows)
        if k % every == 0 or k == len(rows) - 1
    ]
    held = [row for row in rows if row.held_out_loss is not None]
    data += [{"step": r.step, "loss": r.held_out_loss, "text": "held out"} for r in held]
    base = rows_chart(data).encode(
        x=alt.X("step:Q", axis=alt.Axis(format="d", tickMinStep=1)),
        y=alt.Y("loss:Q", title="loss, nats per token", scale=alt.Scale(zero=False)),
        color=alt.Color(
            "text:N",
            title=None,
            scale=alt.Scale(domain=["trained on", "held out"], range=[QUIET, FIRST]),
            legend=alt.Legend(orient="bottom"),
        ),
    )
    points = base.transform_filter("datum.text == 'held out'").mark_point(filled=True, size=30)
    ends = f"It ended at {rows[-1].loss:.3f}"
    ends += f", held-out {held[-1].held_out_loss:.3f}" if held else ""
    return Figure(
        title="Loss",
        caption=f"{ends}, after {rows[-1].tokens:,} tokens in {rows[-1].seconds:.0f} seconds.",
        chart=alt.layer(base.mark_line(strokeWidth=1.4), points).properties(
            width=WIDTH, height=210
        ),
        columns=("step", "loss", "held-out loss", "tokens", "tokens per second"),
        rows=[_step(row) for row in _spread(rows)],
    )


def rate_figure(rows: Sequence[StepRecord]) -> Figure:
    """Learning rate and gradient norm by step."""
    every = max(1, len(rows) // MOST_POINTS)
    data = [row for k, row in enumerate(rows) if k % every == 0 or k == len(rows) - 1]
    panels = []
    for name, title in (("lr", "learning rate"), ("grad_norm", "gradient norm")):
        own = [{"step": row.step, "value": getattr(row, name)} for row in data]
        panels.append(
            rows_chart(own)
            .mark_line(strokeWidth=1.4, color=FIRST)
            .encode(
                x=alt.X("step:Q", axis=alt.Axis(format="d", tickMinStep=1)),
                y=alt.Y("value:Q", title=title, axis=alt.Axis(format="~g", tickCount=4)),
            )
            .properties(width=WIDTH, height=75)
        )
    highest = max(row.lr for row in rows)
    return Figure(
        title="Learning rate and gradient",
        caption=f"The learning rate rose to {highest:.3g}; the gradient norm was at most "
        f"{max(row.grad_norm for row in rows):.3g} before clipping.",
        chart=alt.vconcat(*panels),
        columns=("step", "learning rate", "gradient norm"),
        rows=[(f"{row.step}", row.lr, row.grad_norm) for row in _spread(rows)],
    )


def _spread(rows: Sequence[StepRecord]) -> list[StepRecord]:
    """At most 20 rows: those with a validation, else evenly spaced."""
    held = [row for row in rows if row.held_out_loss is not None] or list(rows)
    every = -(-len(held) // 20)
    return held[::-1][::every][::-1]


def _step(row: StepRecord) -> tuple[Any, ...]:
    return (
        f"{row.step}",
        row.loss,
        row.held_out_loss,
        row.tokens,
        row.tokens_per_second,
    )


def budgets_figure(profile: Profile) -> Figure | None:
    """Predicted loss by attention parameters kept: the exact solver beside equal widths."""
    rows: list[dict[str, Any]] = []
    for policy, shares in SHARES.items():
        task = fit_problem(profile, policy, WidthRules())
        for share in shares:
            try:
                found = fit(task, Budget(attn_params=Limit(share=share / 100)))
            except BudgetError:
                continue
            rise = found.loss_increase
            rows.append({"policy": policy, "kept": share / 100, "rise": rise})
    if not rows:
        return None
    best = {row["kept"]: row["rise"] for row in rows if row["policy"] == "sensitivity"}
    equal = {row["kept"]: row["rise"] for row in rows if row["policy"] == "uniform"}
    names = ["fitted widths", "equal widths"]
    drawn = [
        {**row, "policy": names[row["policy"] == "uniform"]} for row in rows if row["rise"] > 0
    ]
    chart = (
        rows_chart(drawn)
        .mark_line(point=True, strokeWidth=1.6)
        .encode(
            x=alt.X(
                "kept:Q",
                title="attention parameters kept",
                axis=alt.Axis(format="%", tickCount=6),
                scale=alt.Scale(zero=False),
            ),
            y=log_y("rise", "predicted rise of the loss"),
            color=alt.Color(
                "policy:N",
                title=None,
                scale=alt.Scale(domain=names, range=[FIRST, QUIET]),
                legend=alt.Legend(orient="bottom"),
            ),
        )
        .properties(width=WIDTH, height=220)
    )
    words = "; ".join(f"{k:.0%} kept: +{best[k]:.3g}" for k in (0.9, 0.75, 0.5) if k in best)
    return Figure(
        title="Predicted rise of the loss",
        caption=f"{words}. Deep cuts lose more than predicted; refitting after the cut recovers "
        "some of it.",
        chart=chart,
        columns=("kept", *names),
        rows=[(f"{k:.0%}", best.get(k), equal.get(k)) for k in sorted({*best, *equal})],
    )


def comparison_section(record: ComparisonRecord) -> Section:
    """Every method at every budget: figures, a table, and what the methods are."""
    parts: list[Part] = [
        Paragraph(
            f"Perplexity ÷ dense; every method has the same counted budget of {record.counted}."
        )
    ]
    if record.measured:
        parts.append(Figures(method_figures(record), "methods"))
        parts.append(Table(*method_table(record), "Methods at each budget"))
    methods = [(name, f"{one.what}. {one.source}") for name, one in record.methods.items()]
    return Section("Compared with other methods", [*parts, Facts(methods)])


def method_figures(record: ComparisonRecord) -> list[Figure]:
    """The methods at every budget, one figure for each text."""
    columns, rows = method_table(record)
    return [
        Figure(
            title=f"On {Path(text.source).name}",
            caption=_winners(record, i),
            chart=pareto_chart(record, i),
            columns=columns,
            rows=rows,
        )
        for i, text in enumerate(record.texts)
        if any(cell.texts[i].ratio is not None for cell in record.measured)
    ]


def method_table(record: ComparisonRecord) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows: every method at every budget."""
    names = [Path(text.source).name for text in record.texts]
    rows = []
    for cell in record.cells:
        figures = ["not reached", *("–" for _ in names)]
        if cell.texts and cell.share is not None:
            ratios = ("∞" if s.ratio is None else f"{s.ratio:.3f}" for s in cell.texts)
            figures = [f"{cell.share:.2%}", *ratios]
        rows.append((f"{cell.method} at {cell.budget}", *figures))
    return ("method and budget", "counted", *(f"× on {name}" for name in names)), rows


def _winners(record: ComparisonRecord, i: int) -> str:
    """Which method loses least at each budget on one text."""
    best: dict[str, tuple[float, str]] = {}
    for cell in record.measured:
        ratio = cell.texts[i].ratio
        if ratio is not None:
            best[cell.budget] = min(best.get(cell.budget, (math.inf, "")), (ratio, cell.method))
    found = (f"{name} loses least at {b} (×{ratio:.3f})" for b, (ratio, name) in best.items())
    return f"{'; '.join(found)}."
