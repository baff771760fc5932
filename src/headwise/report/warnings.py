"""What a reader of a report must know, in plain words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwise.report.model_kind import calibrated_on
from headwise.report.proof_charts import text_name
from headwise.report.sources import CutModel

NOTICEABLE = 1.10  # perplexity ÷ dense above which people notice
FEW_TOKENS = 8192
FAR_OFF = 2.0  # measured ÷ predicted, either way


def cut_warnings(cut: CutModel, predicted: float | None) -> list[str]:
    """What to mind about a cut model."""
    return [*_of_record(cut), *_of_proof(cut.proof), *_of_prediction(cut.proof, predicted)]


def _of_record(cut: CutModel) -> Iterator[str]:
    used = cut.record.get("calibration") or {}
    if used.get("tokens", FEW_TOKENS) < FEW_TOKENS:
        more = "images lose" if "images" in used else "text usually loses"
        yield f"It was calibrated on only {calibrated_on(used)}; more {more} less."
    if cut.profile is not None:
        for note in cut.profile.record.notes:
            yield f"{note[0].upper()}{note[1:]}."


def _of_proof(proof: dict[str, Any] | None) -> Iterator[str]:
    if proof is None:
        yield (
            "Nobody has measured this model yet: whether it is any good is not known. Run "
            "`headwise verify`."
        )
        return
    for sentence in proof["warnings"]:
        yield f"{sentence[0].upper()}{sentence[1:]}"
    for target in proof.get("targets", ()):
        if not target["met"]:
            found = "beyond any float" if target["found"] is None else f"{target['found']:g}"
            yield f"A target was missed: {target['option']} {target['limit']:g}, found {found}."
    for text in proof["texts"]:
        ratio = text.get("ratio")
        if "ratio" in text and (ratio is None or ratio > NOTICEABLE):
            words = "beyond use" if ratio is None else f"{ratio - 1:.0%} higher than before"
            yield f"On {text_name(text)} the perplexity is {words}: the cut is felt there."
    speed = proof.get("speed") or {}
    slow = [
        f"{words} runs at {speed[name]['ratio']:.0%}"
        for name, words in (("prefill", "reading"), ("decode", "writing"))
        if name in speed and speed_change(speed[name]) == "slower"
    ]
    if slow:
        yield (
            f"It is smaller but not faster: {' and '.join(slow)} of the dense model's speed here. "
            "Heads of many widths are several smaller calls; --granularity layer makes them one."
        )


def speed_change(speed: dict[str, Any]) -> str:
    """What can be said of a speed: nothing, where the repetitions of the two models overlap."""
    dense, cut = speed["dense"], speed["cut"]
    if cut["low"] > dense["high"]:
        return "faster"
    return "slower" if cut["high"] < dense["low"] else "within the spread"


def _of_prediction(proof: dict[str, Any] | None, predicted: float | None) -> Iterator[str]:
    if proof is None or predicted is None or proof["kind"] != "causal" or not proof["texts"]:
        return
    measured = proof["texts"][0]["nll"] - proof["texts"][0]["dense_nll"]
    if predicted > 0 and measured > 0 and not 1 / FAR_OFF < measured / predicted < FAR_OFF:
        yield (
            f"The profile predicted a rise of the loss by {predicted:.3f}, measured were "
            f"{measured:.3f}: trust the measurement."
        )
