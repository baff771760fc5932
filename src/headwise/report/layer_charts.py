"""Charts by layer: where the loss is sensitive, and how saturated the attention is."""

from __future__ import annotations

from typing import Any

import altair as alt

from headwise.plan import Plan
from headwise.profile.format import Profile
from headwise.profile.worth import head_worth, kept_directions
from headwise.report.figure import DEPTH, FIRST, SECOND, WIDTH, Figure, log_y, places, rows_chart

_PARTS = {"query-key": ("planes", "free"), "value-output": ("vo",)}


def sensitivity_chart(profile: Profile, plan: Plan | None) -> Figure:
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
        words=f" What the loss would rise by if a whole side of a layer were dropped. Layer {most} "
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


def saturation_chart(profile: Profile) -> Figure | None:
    """The softmax Jacobian's norm by the number of tokens in view, one line per layer."""
    lengths, n = profile.record.lengths, len(profile.plan.layers)
    if not all(profile.has(i, "jacobian_norm") for i in range(n)):
        return None
    norms = [[float(x.mean()) for x in profile.get(i, "jacobian_norm")] for i in range(n)]
    rows: list[dict[str, Any]] = [
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
        words=" How far the attention can move when its scores move (0.5 at most): lower is more "
        f"saturated. At {lengths[-1]} tokens, {first[-1]:.3g} in the first layer and "
        f"{last[-1]:.3g} in the last.",
        chart=chart,
        columns=("layer", *(f"{length} tokens" for length in lengths)),
        rows=[(f"layer {i}", *x) for i, x in enumerate(norms)],
    )
