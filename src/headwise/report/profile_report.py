"""The report of a profile: where the model is sensitive, and what budgets would cost."""

from __future__ import annotations

import shlex
from typing import Any

import altair as alt

from headwise.errors import BudgetError
from headwise.plan import Budget, Limit
from headwise.planning.cost import cost
from headwise.planning.fit import fit
from headwise.planning.worth_curves import FitRules
from headwise.profile.worth import fit_task
from headwise.report import pieces
from headwise.report.card_metadata import shown_source
from headwise.report.figure import FIRST, QUIET, WIDTH, Figure, log_y, rows_chart
from headwise.report.head_charts import spectra
from headwise.report.layer_charts import saturation_chart, sensitivity_chart
from headwise.report.model_kind import calibrated_on
from headwise.report.pieces import Card
from headwise.report.sources import ProfiledModel

SHARES = {"sensitivity": (95, 90, 85, 80, 75, 70, 60, 50, 40), "uniform": (90, 75, 50)}


def profile_page(source: ProfiledModel) -> str:
    """The whole page."""
    profile, record = source.profile, source.profile.record
    shape, dense = profile.plan.shape, cost(profile.plan)
    groups = f"{shape.n_heads} query heads, {shape.n_kv_heads} key-value heads"
    items = [
        Card("Layers", f"{shape.n_layers}", f"{groups} in each"),
        Card("Attention parameters", f"{dense.attn_params:,}", f"of {dense.total_params:,} in all"),
    ]
    if shape.causal:
        beside = f"{shape.kv_dtype_bytes} bytes per number"
        items.append(Card("Cached bytes per token", f"{dense.kv_bytes:,}", beside))
    what = "images" if record.of_images else "text"
    if record.loss is not None:
        beside = f"{record.unit}, {record.objective}"
        items.append(Card(f"Loss on the {what}", f"{record.loss:.3f}", beside))
    saturation = saturation_chart(profile)
    charts = [sensitivity_chart(profile, None), *([saturation] if saturation else [])]
    charts += spectra(profile, None)
    warned = [f"{note[0].upper()}{note[1:]}." for note in record.notes]
    budgets = _budgets(source)
    lead = (
        f"Measured on {calibrated_on(record.calibration)} of {shown_source(record.text.source)}: "
        "which directions of every head the loss needs."
    )
    return pieces.page(
        f"Profile of {shown_source(record.model)}",
        lead,
        pieces.section("The model", pieces.cards(items)),
        pieces.section("Mind this", pieces.warnings(warned)) if warned else "",
        pieces.section("What a budget would cost", pieces.figures([budgets], "budgets"))
        if budgets
        else "",
        pieces.section("Inside the heads", pieces.figures(charts, "inside")),
        _next(source),
        _provenance(source),
    )


def _budgets(source: ProfiledModel) -> Figure | None:
    """Predicted loss by attention parameters kept: the exact solver beside equal widths."""
    rows: list[dict[str, Any]] = []
    for policy, shares in SHARES.items():
        task = fit_task(source.profile, policy, FitRules())
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
        words=f" {words}. Deep cuts lose more than predicted; a refit after it wins some back.",
        chart=chart,
        columns=("kept", *names),
        rows=[(f"{k:.0%}", best.get(k), equal.get(k)) for k in sorted({*best, *equal})],
    )


def _next(source: ProfiledModel) -> str:
    where = shlex.quote(str(source.folder))
    commands = f"headwise explore {where}\nheadwise plan fit {where} --attn-params 75% -o plan.json"
    return pieces.section(
        "What to do with it",
        pieces.paragraph("Try budgets with sliders, or fit a plan to one:"),
        pieces.code(commands),
    )


def _provenance(source: ProfiledModel) -> str:
    record = source.profile.record
    rows = [
        ("model", record.model),
        ("weights' SHA-256", record.weights_sha256),
        ("images" if record.of_images else "text", record.text.source),
        ("SHA-256 of it", record.text.sha256),
        ("read", f"{record.sequences} sequences, {record.settings}"),
        ("computed", f"on {record.device} in {record.dtype}"),
        ("made with", ", ".join(f"{n} {v}" for n, v in record.versions.items())),
    ]
    return pieces.section("Where it came from", pieces.facts(rows))
