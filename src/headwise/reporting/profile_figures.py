"""Figures of heads and layers: the widths a plan gives them, and what a profile measured there."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import altair as alt
import numpy as np

from headwise.plan import Plan
from headwise.planning.fit import HeadWorth
from headwise.profiling.format import Profile
from headwise.profiling.worth import head_worth, kept_directions
from headwise.reporting.page import (
    DEPTH,
    FIRST,
    QUIET,
    SECOND,
    WIDTH,
    Figure,
    Figures,
    Section,
    log_y,
    places,
    rows_chart,
)

MOST_LAYERS = 6  # whose spectra are shown
MOST_HEADS = 8  # lines in one of them
_SIDES = (("query-key", "qk_dim"), ("value-output", "vo_dim"))
_PARTS = {"query-key": ("planes", "free"), "value-output": ("vo",)}


def profile_section(profile: Profile, plan: Plan | None) -> Section:
    """What a profile measured in layers and heads; with a plan, what it drops of that."""
    saturation = saturation_figure(profile)
    figures = [sensitivity_figure(profile, plan), *([saturation] if saturation else [])]
    return Section(
        "Inside the heads", [Figures([*figures, *spectrum_figures(profile, plan)], "inside")]
    )


def width_figures(plan: Plan) -> list[Figure]:
    """The kept widths of each side as a layers × heads map, and the MLPs' where they differ."""
    found = []
    full = max(plan.shape.qk_dim, plan.shape.vo_dim)
    groups = max((1 + max(layer.sources, default=0) for layer in plan.layers), default=1)
    for side, field in _SIDES:
        widths = [
            [getattr(layer.by_source.get(j), field, 0) for j in range(groups)]
            for layer in plan.layers
        ]
        flat = [w for row in widths for w in row]
        dense = getattr(plan.shape, field)
        found.append(
            Figure(
                title=f"Kept {side} widths",
                caption=f"From {min(flat)} to {max(flat)} of {dense}, {np.mean(flat):.1f} on "
                f"average, over {len(widths)} layers and {groups} head groups{_gone(plan)}.",
                chart=_map(widths, max(full, *flat)),
                columns=("layer", *(f"head group {j}" for j in range(groups))),
                rows=[(f"layer {i}", *row) for i, row in enumerate(widths)],
            )
        )
    if plan.changes_ffn:
        found.append(_ffn_figure(plan))
    return found


def _ffn_figure(plan: Plan) -> Figure:
    neurons, dense = plan.ffn_dims, plan.shape.ffn_dim
    rows = [{"layer": i, "neurons": n} for i, n in enumerate(neurons)]
    chart = (
        rows_chart(rows)
        .mark_bar(color=FIRST)
        .encode(
            x=alt.X("layer:O", axis=alt.Axis(labelAngle=0, values=places(len(neurons), 11))),
            y=alt.Y("neurons:Q", scale=alt.Scale(domain=[0, max(dense, *neurons)])),
        )
        .properties(width=WIDTH, height=120)
    )
    return Figure(
        title="MLP widths",
        caption=f"From {min(neurons)} to {max(neurons)} neurons, {np.mean(neurons):.0f} on "
        f"average, over {len(neurons)} layers; the uniform model has {dense} in each.",
        chart=chart,
        columns=("layer", "neurons"),
        rows=[(f"layer {i}", n) for i, n in enumerate(neurons)],
    )


def _gone(plan: Plan) -> str:
    """How many of the uniform model's head groups are gone, as the end of a sentence."""
    gone = plan.shape.n_layers * plan.shape.n_kv_heads - sum(len(x.heads) for x in plan.layers)
    return f"; {gone} of them are gone (0)" if gone > 0 else ""


def _map(widths: list[list[int]], full: int) -> Any:
    rows = [
        {"layer": i, "head group": j, "width": w}
        for i, row in enumerate(widths)
        for j, w in enumerate(row)
    ]
    groups = max(len(row) for row in widths)
    base = rows_chart(rows).encode(
        x=alt.X("layer:O", axis=alt.Axis(labelAngle=0, values=places(len(widths), 11))),
        y=alt.Y("head group:O", axis=alt.Axis(values=places(groups, 9))),
    )
    # One hue whose opacity is the width: it reads the same way on white and on black.
    cells = base.mark_rect(color=FIRST).encode(
        opacity=alt.Opacity(
            "width:Q",
            scale=alt.Scale(domain=[0, full], range=[0.06, 1]),
            legend=alt.Legend(orient="bottom", symbolType="square", symbolFillColor=FIRST),
        )
    )
    return cells.properties(width=WIDTH, height=min(240, max(8, 200 // groups) * groups))


def spectrum_figures(profile: Profile, plan: Plan | None) -> list[Figure]:
    """Sorted sensitivities of some heads; with a plan, what it drops is grey."""
    found = []
    for side in ("query-key", "value-output"):
        rows = _spectrum(profile, plan, side)
        if not rows:
            continue
        shares = _dropped_shares(rows)
        kept = (
            f" Dots mark the cut; grey is dropped: {shares:.1%} of the sensitivity shown."
            if plan
            else ""
        )
        found.append(
            Figure(
                title=f"Spectra, {side}",
                caption="Predicted rise of the loss if a direction is dropped; directions "
                f"from most to least needed, one line per head of some layers.{kept}",
                chart=_spectrum_chart(rows, plan is not None),
                columns=("layer and head", "kept", "directions", "largest", "median", "least"),
                rows=_spectrum_table(rows),
            )
        )
    return found


def _side(worth: HeadWorth, side: str) -> tuple[np.ndarray, ...]:
    return (worth.vo,) if side == "value-output" else (worth.planes, worth.free)


@dataclass(frozen=True, slots=True)
class _Direction:
    """One direction of a head group, ranked by what dropping it would cost."""

    layer: int
    head: int
    rank: int
    sensitivity: float
    kept: bool


def _spectrum(profile: Profile, plan: Plan | None, side: str) -> list[_Direction]:
    if side == "query-key" and profile.record.qk_whole:
        return []
    found: list[_Direction] = []
    layers = profile.plan.layers
    for i in places(len(layers), MOST_LAYERS):
        for j in places(len(layers[i].heads), MOST_HEADS):
            parts = _side(head_worth(profile, "sensitivity", i, j), side)
            kept = _kept(profile, plan, i, j, side)
            values = [
                (float(x), place in kept[part])
                for part, worth in enumerate(parts)
                for place, x in enumerate(worth)
            ]
            values.sort(key=lambda pair: (-pair[0], not pair[1]))
            found += [
                _Direction(i, j, rank, 0.5 * x, keeps)
                for rank, (x, keeps) in enumerate(values, start=1)
            ]
    return found


def _kept(
    profile: Profile, plan: Plan | None, layer: int, head: int, side: str
) -> tuple[frozenset[int], ...]:
    """Places kept of each part of a side; everything without a plan."""
    if plan is None:
        worth = head_worth(profile, "sensitivity", layer, head)
        return tuple(frozenset(range(len(part))) for part in _side(worth, side))
    kept = kept_directions(profile, plan, layer, head)
    return (
        (frozenset(kept.vo),)
        if side == "value-output"
        else (frozenset(kept.planes), frozenset(kept.free))
    )


def _spectrum_chart(rows: list[_Direction], cut: bool) -> Any:
    """One small panel per layer; a line changes to dashed grey where the plan cuts it."""
    positive = [row.sensitivity for row in rows if row.sensitivity > 0]
    low = max(min(positive, default=1e-9), 1e-6 * max(positive, default=1e-3))
    drawn = [
        {**asdict(row), "sensitivity": max(row.sensitivity, low), "panel": f"layer {row.layer}"}
        for row in rows
    ]
    base = alt.Chart().encode(
        x=alt.X("rank:Q", title=None, axis=alt.Axis(tickCount=4)),
        y=log_y("sensitivity", None, ticks=4),
        detail="head:N",
    )
    kept, gone = base.transform_filter("datum.kept"), base.transform_filter("!datum.kept")
    lines: list[Any] = [kept.mark_line(strokeWidth=1.2, color=FIRST)]
    if cut:
        ends = kept.transform_aggregate(
            rank="max(rank)", sensitivity="min(sensitivity)", groupby=["head"]
        )
        lines = [
            gone.mark_line(strokeWidth=1, color=QUIET, strokeDash=[3, 2]),
            *lines,
            ends.mark_point(color=SECOND, filled=True, size=28, opacity=1),
        ]
    panels = list(dict.fromkeys(row["panel"] for row in drawn))
    return (
        alt.layer(*lines)
        .properties(width=WIDTH // 3 - 22, height=90)
        .facet(
            facet=alt.Facet("panel:N", title=None, sort=panels),
            columns=3,
            data=alt.InlineData(values=drawn),
        )
    )


def _spectrum_table(rows: list[_Direction]) -> list[tuple[Any, ...]]:
    groups: dict[tuple[int, int], list[_Direction]] = {}
    for row in rows:
        groups.setdefault((row.layer, row.head), []).append(row)
    return [
        (
            f"layer {i}, head group {j}",
            sum(row.kept for row in own),
            len(own),
            own[0].sensitivity,
            own[len(own) // 2].sensitivity,
            own[-1].sensitivity,
        )
        for (i, j), own in groups.items()
    ]


def _dropped_shares(rows: list[_Direction]) -> float:
    total = sum(row.sensitivity for row in rows)
    gone = sum(row.sensitivity for row in rows if not row.kept)
    return gone / total if total else 0.0


def sensitivity_figure(profile: Profile, plan: Plan | None) -> Figure:
    """What dropping each side of a layer would cost, and what the plan drops of it."""
    table = [_layer(profile, plan, i) for i in range(len(profile.plan.layers))]
    rows = [
        {"layer": i, "side": side, "what": what, "rise": value}
        for i, layer in enumerate(table)
        for (side, what), value in layer.items()
        if value > 0
    ]
    whole = {i: sum(v for (_, what), v in x.items() if what == "all") for i, x in enumerate(table)}
    most = max(whole, key=lambda i: whole[i])
    kinds = ["all", "dropped"] if plan else ["all"]
    chart = (
        rows_chart(rows)
        .mark_line(point=alt.OverlayMarkDef(size=24), strokeWidth=1.4)
        .encode(
            x=alt.X(
                "layer:Q",
                scale=alt.Scale(nice=False, domain=[0, max(1, len(table) - 1)]),
                axis=alt.Axis(values=places(len(table), 11), format="d"),
            ),
            y=log_y("rise", "predicted rise of the loss"),
            color=alt.Color(
                "side:N",
                title=None,
                scale=alt.Scale(domain=list(_PARTS), range=[FIRST, SECOND]),
                legend=alt.Legend(orient="bottom"),
            ),
            strokeDash=alt.StrokeDash(
                "what:N",
                title=None,
                scale=alt.Scale(domain=["all", "dropped"], range=[[1, 0], [4, 3]]),
                legend=None,
            ),
        )
        .properties(width=WIDTH, height=200)
    )
    dropped = " Dashed: the part that this plan drops." if plan else ""
    return Figure(
        title="Sensitivity by layer",
        caption=f"The rise of the loss if a whole side of a layer were dropped. Layer {most} "
        f"matters most.{dropped}",
        chart=chart,
        columns=("layer", *(f"{side}, {what}" for side in _PARTS for what in kinds)),
        rows=[
            (f"layer {i}", *(x[side, what] for side in _PARTS for what in kinds))
            for i, x in enumerate(table)
        ],
    )


def _layer(profile: Profile, plan: Plan | None, layer: int) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    heads = [
        head_worth(profile, "sensitivity", layer, j)
        for j in range(len(profile.plan.layers[layer].heads))
    ]
    for side, parts in _PARTS.items():
        total = sum(float(getattr(head, part).sum()) for head in heads for part in parts)
        found[side, "all"] = 0.5 * total
        if plan is None:
            continue
        kept = 0.0
        for j, head in enumerate(heads):
            places = kept_directions(profile, plan, layer, j)
            kept += sum(float(getattr(head, p)[list(getattr(places, p))].sum()) for p in parts)
        found[side, "dropped"] = max(0.0, 0.5 * (total - kept))
    return found


def saturation_figure(profile: Profile) -> Figure | None:
    """The softmax Jacobian's norm by the number of tokens in view, one line per layer."""
    lengths, n = profile.record.lengths, len(profile.plan.layers)
    if not all(profile.has(i, "jacobian_norm") for i in range(n)):
        return None
    norms = [[float(x.mean()) for x in profile.get(i, "jacobian_norm")] for i in range(n)]
    rows = [
        {"layer": i, "tokens": length, "norm": x}
        for i, layer in enumerate(norms)
        for length, x in zip(lengths, layer, strict=False)
        if x > 0
    ]
    first, last = norms[0], norms[-1]
    chart = (
        rows_chart(rows)
        .mark_line(strokeWidth=1.4, point=alt.OverlayMarkDef(size=14))
        .encode(
            x=alt.X(
                "tokens:Q",
                title="tokens in view",
                scale=alt.Scale(type="log", base=2, nice=False),
                axis=alt.Axis(values=list(lengths), format="d"),
            ),
            y=log_y("norm", "norm of the softmax Jacobian"),
            color=alt.Color(
                "layer:Q",
                scale=alt.Scale(range=DEPTH),
                legend=alt.Legend(orient="bottom", gradientLength=160, format="d", tickMinStep=1),
            ),
            detail="layer:N",
        )
        .properties(width=WIDTH, height=200)
    )
    return Figure(
        title="Saturation by length",
        caption="How far the attention can move when its scores move (0.5 at most): lower is more "
        f"saturated. At {lengths[-1]} tokens, {first[-1]:.3g} in the first layer and "
        f"{last[-1]:.3g} in the last.",
        chart=chart,
        columns=("layer", *(f"{length} tokens" for length in lengths)),
        rows=[(f"layer {i}", *x) for i, x in enumerate(norms)],
    )
