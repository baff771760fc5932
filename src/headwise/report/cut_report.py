"""The report of a cut model: what was gained, what was lost, and where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from headwise.planning.cost import cost, dense_cost
from headwise.planning.fit import predicted_loss
from headwise.planning.worth_curves import FitRules
from headwise.profile.worth import fit_task
from headwise.report import pieces
from headwise.report.card_metadata import shown_source
from headwise.report.compare_report import comparison_section
from headwise.report.head_charts import spectra, width_maps
from headwise.report.layer_charts import saturation_chart, sensitivity_chart
from headwise.report.model_kind import calibrated_on, calibration_sha256, kind_of
from headwise.report.pieces import Card
from headwise.report.proof_charts import drift_chart, prediction_chart, text_name
from headwise.report.sources import CutModel
from headwise.report.warnings import NOTICEABLE, cut_warnings, speed_change

_SIZES = {
    "attn_params": "Attention parameters",
    "total_params": "Parameters",
    "kv_bytes": "Cached bytes per token",
}


def cut_page(cut: CutModel) -> str:
    """The whole page."""
    predicted = _predicted(cut)
    used = cut.record.get("calibration") or {}
    model, text = (
        shown_source(str(x)) for x in (cut.record.get("model", "?"), used.get("source", "?"))
    )
    lead = f"{model} with narrower attention heads, calibrated on {calibrated_on(used)} of {text}."
    warnings = cut_warnings(cut, predicted)
    parts = [pieces.section("What was gained, what was lost", pieces.cards(headline(cut)))]
    if warnings:
        parts.append(pieces.section("Mind this", pieces.warnings(warnings)))
    parts.append(
        pieces.section(
            "The plan",
            pieces.paragraph(
                "Every cell is a key-value head with the query heads it serves; a stronger colour "
                "is a wider head."
            ),
            pieces.figures(width_maps(cut.plan), "map"),
        )
    )
    parts += _measured(cut, predicted)
    if cut.profile is not None:
        parts.append(_inside(cut))
    if cut.compared is not None:
        parts.append(comparison_section(cut.compared))
    parts += [_loading(cut), _provenance(cut)]
    return pieces.page(cut.folder.resolve().name, lead, *parts)


def headline(cut: CutModel) -> Iterator[Card]:
    """Before and after, counted or measured."""
    if cut.proof is None:
        spent, dense = cost(cut.plan), dense_cost(cut.plan.shape)
        for name, title in _SIZES.items():
            own, whole = getattr(spent, name), getattr(dense, name)
            if whole:
                yield Card(title, f"{own / whole:.1%}", f"{whole:,} → {own:,}, by the plan")
        return
    for name, size in cut.proof["size"].items():
        yield Card(
            _SIZES[name], f"{size['share']:.1%}", f"{size['dense']:,} → {size['cut']:,}, counted"
        )
    for text in cut.proof["texts"]:
        if "cosine" in text:
            beside = f"{text_name(text)}; least {text['least_cosine']:.4f}"
            yield Card("Cosine with the dense model", f"{text['cosine']:.4f}", beside)
            if "top_agreement" in text:
                of = f"of {text['images']:,} images, {text_name(text)}"
                yield Card("Same top class", f"{text['top_agreement']:.1%}", of)
            continue
        ratio = text["ratio"]
        value = "beyond use" if ratio is None else f"×{ratio:.3f}"
        mood = "bad" if ratio is None or ratio > NOTICEABLE else "good"
        before, after = (_number(text[key]) for key in ("dense_perplexity", "perplexity"))
        yield Card("Perplexity", value, f"{before} → {after} on {text_name(text)}", mood)
    for name, words in (("decode", "Writing"), ("prefill", "Reading")):
        speed = (cut.proof.get("speed") or {}).get(name)
        if speed:
            beside = " → ".join(f"{speed[which]['median']:,.0f}" for which in ("dense", "cut"))
            change = speed_change(speed)
            mood = {"faster": "good", "slower": "bad"}.get(change, "")
            title = f"{words} speed ({name})"
            yield Card(title, f"×{speed['ratio']:.2f}", f"{beside} tokens/s, {change}", mood)


def _predicted(cut: CutModel) -> float | None:
    """What the profile predicted; without it, what the plan noted."""
    if cut.profile is not None:
        return predicted_loss(fit_task(cut.profile, "sensitivity", FitRules()), cut.plan)
    for note in cut.plan.origin.notes:
        head, _, number = note.rpartition(" ")
        if head == "predicted loss increase":
            return float(number)
    return None


def _measured(cut: CutModel, predicted: float | None) -> list[str]:
    if cut.proof is None:
        return []
    charts = [] if predicted is None else [prediction_chart(predicted, cut.proof)]
    drift = drift_chart(cut.proof)
    charts += [drift] if drift else []
    agreement = [
        f"On {text_name(t)} the likeliest next token is the dense model's in "
        f"{t['top_agreement']:.1%} of {t['tokens']:,} places."
        for t in cut.proof["texts"]
        if "top_agreement" in t and "tokens" in t
    ]
    return [
        pieces.section("Measured", pieces.paragraph(*agreement), pieces.figures(charts, "proof"))
    ]


def _inside(cut: CutModel) -> str:
    assert cut.profile is not None
    saturation = saturation_chart(cut.profile)
    charts = [sensitivity_chart(cut.profile, cut.plan), *([saturation] if saturation else [])]
    charts += spectra(cut.profile, cut.plan)
    return pieces.section("Inside the heads", pieces.figures(charts, "inside"))


def _loading(cut: CutModel) -> str:
    kind = kind_of(cut.folder, cut.record, causal=cut.plan.shape.causal)
    program = kind.program(cut.folder.resolve().name)
    return pieces.section(
        "How to load it",
        pieces.code(program),
        pieces.paragraph(
            "Without headwise installed, leave out its import and give from_pretrained "
            "trust_remote_code=True: the folder's own model code is run then."
        ),
    )


def _provenance(cut: CutModel) -> str:
    record = cut.record
    used, recovery = record.get("calibration") or {}, record.get("recovery")
    what = "images" if "images" in used else "text"
    rows = [
        ("source model", record.get("model")),
        (f"calibration {what}", f"{used.get('source')}, {calibrated_on(used)}"),
        ("SHA-256 of it", calibration_sha256(used)),
        ("profile's SHA-256", record.get("profile_sha256")),
        ("settings of the cut", json.dumps(record.get("settings") or {})),
        ("trained after the cut", f"{recovery['tokens']:,} tokens" if recovery else "no"),
        ("made with", ", ".join(f"{n} {v}" for n, v in (record.get("versions") or {}).items())),
    ]
    if cut.proof is not None:
        place = f"{cut.proof['device']} in {cut.proof['dtype']}"
        rows.append(("measured on", f"{place}, against {cut.proof['against']}"))
    command = record.get("command") or cut.plan.origin.command
    return pieces.section(
        "Where it came from",
        pieces.facts(rows),
        pieces.code(command) if command else "",
    )


def _number(value: float | None) -> Any:
    return "∞" if value is None else f"{value:.2f}"
