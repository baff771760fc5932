"""Charts of what was measured: the loss beside its prediction, by position, and in training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from headwise.report.card_metadata import shown_source
from headwise.report.figure import FIRST, QUIET, SECOND, THIRD, WIDTH, Figure, rows_chart

MOST_POINTS = 400  # of a training curve


def text_name(text: Mapping[str, Any]) -> str:
    """A text of verify.json as people know it."""
    name = shown_source(str(text["source"]))
    # The held-out part of a text says so in brackets already.
    return f"{name[:-1]}, {text['role']})" if name.endswith(")") else f"{name} ({text['role']})"


def prediction_chart(predicted: float, proof: Mapping[str, Any]) -> Figure:
    """The predicted rise of the loss beside the measured ones."""
    rows = [("predicted from the profile", predicted)]
    if proof["kind"] == "causal":
        rows += [(text_name(t), t["nll"] - t["dense_nll"]) for t in proof["texts"]]
        unit = "rise of the loss, nats per token"
    elif all("kl" in t for t in proof["texts"]):
        rows += [(text_name(t), t["kl"]) for t in proof["texts"]]
        unit = "divergence of the classes, nats per image"
    else:
        rows += [(text_name(t), 1 - t["cosine"]) for t in proof["texts"]]
        unit = "1 − cosine of embeddings"
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
        words=f" Predicted {predicted:+.3f}, measured {measured}. The prediction counts neither "
        "the refit after the cut nor any training.",
        chart=alt.layer(bars, labels).properties(width=WIDTH - 150, height=30 * len(rows)),
        columns=("", unit),
        rows=rows,
    )


def drift_chart(proof: Mapping[str, Any]) -> Figure | None:
    """How far the predictions are from the dense model's, by position in the text."""
    texts = [t for t in proof["texts"] if t.get("by_position")]
    if not texts:
        return None
    rows = [
        {"text": text_name(t), "position": x["last"], "kl": x["kl"]}
        for t in texts
        for x in t["by_position"]
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
        f"{t['by_position'][-1]['kl']:.3f} at position {t['by_position'][-1]['last']} of "
        f"{text_name(t)}"
        for t in texts
    )
    return Figure(
        title="Drift by position",
        words=f" How far each prediction is from the dense model's (Kullback–Leibler): {ends}.",
        chart=chart,
        columns=("text", "positions", "tokens", "divergence"),
        rows=[
            (text_name(t), f"{x['first']}–{x['last']}", x["tokens"], x["kl"])
            for t in texts
            for x in t["by_position"]
        ],
    )


def loss_chart(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Training and held-out loss by step."""
    every = max(1, len(rows) // MOST_POINTS)
    data = [
        {"step": row["step"], "loss": row["loss"], "text": "trained on"}
        for k, row in enumerate(rows)
        if k % every == 0 or k == len(rows) - 1
    ]
    held = [row for row in rows if row.get("held_out_loss") is not None]
    data += [{"step": r["step"], "loss": r["held_out_loss"], "text": "held out"} for r in held]
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
    ends = f" It ended at {rows[-1]['loss']:.3f}"
    ends += f", held-out {held[-1]['held_out_loss']:.3f}" if held else ""
    return Figure(
        title="Loss",
        words=f"{ends}, after {rows[-1]['tokens']:,} tokens in {rows[-1]['seconds']:.0f} seconds.",
        chart=alt.layer(base.mark_line(strokeWidth=1.4), points).properties(
            width=WIDTH, height=210
        ),
        columns=("step", "loss", "held-out loss", "tokens", "tokens per second"),
        rows=[_step(row) for row in _spread(rows)],
    )


def rate_chart(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Learning rate and gradient norm by step."""
    every = max(1, len(rows) // MOST_POINTS)
    data = [row for k, row in enumerate(rows) if k % every == 0 or k == len(rows) - 1]
    panels = []
    for name, title in (("lr", "learning rate"), ("grad_norm", "length of the gradient")):
        own = [{"step": row["step"], "value": row[name]} for row in data]
        panels.append(
            rows_chart(own)
            .mark_line(strokeWidth=1.4, color=FIRST)
            .encode(
                x=alt.X("step:Q", axis=alt.Axis(format="d", tickMinStep=1)),
                y=alt.Y("value:Q", title=title, axis=alt.Axis(format="~g", tickCount=4)),
            )
            .properties(width=WIDTH, height=75)
        )
    highest = max(row["lr"] for row in rows)
    return Figure(
        title="Learning rate and gradient",
        words=f" The rate rose to {highest:.3g}; the gradient's length was at most "
        f"{max(row['grad_norm'] for row in rows):.3g} before clipping.",
        chart=alt.vconcat(*panels),
        columns=("step", "learning rate", "gradient norm"),
        rows=[(f"{row['step']}", row["lr"], row["grad_norm"]) for row in _spread(rows)],
    )


def _spread(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """At most 20 rows: those with a validation, else evenly spaced."""
    held = [row for row in rows if row.get("held_out_loss") is not None] or list(rows)
    every = -(-len(held) // 20)
    return held[::-1][::every][::-1]


def _step(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        f"{row['step']}",
        row["loss"],
        row.get("held_out_loss"),
        row["tokens"],
        row["tokens_per_second"],
    )
