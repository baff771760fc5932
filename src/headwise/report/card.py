"""The model card of a cut checkpoint: what was done, on what, with which figures.

    OUT/config.json ─► plan ──┐
    OUT/headwise.json ────────┼─► OUT/README.md
    OUT/verify.json, if there ┘

The card is made of the files beside it and nothing else, so it can be written again whenever one
of them changes, and says the same as they do.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.artifacts import write_text
from headwise.report.card_metadata import (
    base_of,
    front_matter,
    licence_of,
    metadata_in,
    shown_source,
)
from headwise.report.model_kind import ModelKind, calibrated_on, calibration_sha256, kind_of

if TYPE_CHECKING:
    from headwise.plan import Plan

CARD = "README.md"
_SIZES = {
    "attn_params": "attention parameters",
    "total_params": "parameters",
    "kv_bytes": "cached bytes per token",
}


def write_card(folder: Path, source: Path | None = None, *, name: str | None = None) -> None:
    """Write README.md of a cut checkpoint, or write it again.

    Licence and base model are those of the card in `source` (the folder it was made from);
    without a source, of the card that is being replaced. `name` is for a folder that is yet to
    take its own.
    """
    text = model_card(folder, source, name or folder.resolve().name)
    write_text(folder / CARD, text, force=True)


def model_card(folder: Path, source: Path | None, name: str) -> str:
    """The card's text."""
    from headwise.measure.size import plan_in
    from headwise.nn.checkpoint import Checkpoint

    plan = plan_in(Checkpoint.open(folder))
    record, proof = _json(folder / "headwise.json"), _json(folder / "verify.json")
    before = metadata_in((source or folder) / CARD)
    base = base_of(before, str(record.get("model", "")))
    kind = kind_of(folder, record, causal=plan.shape.causal)
    head = front_matter(
        record,
        proof or None,
        base=base,
        licence=licence_of(before),
        name=name,
        task=kind.task,
    )
    parts = [_title(name, record, base), _done(record, plan)]
    if proof:
        parts.append(_figures(proof))
    parts += [_plan_table(plan), _loading(kind), _limits(proof, kind)]
    return head + "\n" + "\n\n".join(parts) + "\n"


def _title(name: str, record: Mapping[str, Any], base: str | None) -> str:
    shown = f"`{shown_source(str(record.get('model', 'a model')))}`"
    if base:
        shown = f"[{base}](https://huggingface.co/{base})"
    return (
        f"# {name}\n\n{shown} with narrower attention heads, made by headwise. Each head "
        "keeps the directions that the loss needs most; everything that is not attention is the "
        "source's, bit for bit."
    )


def _done(record: Mapping[str, Any], plan: Plan) -> str:
    from headwise.planning.cost import cost, dense_cost

    spent, dense = cost(plan).attn_params, dense_cost(plan.shape).attn_params
    lines = [
        f"- Attention parameters: {spent:,} of {dense:,} ({spent / dense:.1%}).",
        *_texts(record),
    ]
    settings = record.get("settings") or {}
    if settings:
        shown = ", ".join(f"{name} {json.dumps(value)}" for name, value in settings.items())
        lines.append(f"- Settings of the cut: {shown}.")
    versions = record.get("versions") or {}
    if versions:
        lines.append("- Made with " + ", ".join(f"{n} {v}" for n, v in versions.items()) + ".")
    lines.append("- `headwise.json` holds the whole record.")
    return "## What was done\n\n" + "\n".join(lines)


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    used = record.get("calibration")
    if used:
        what = "images" if "images" in used else "text"
        yield (
            f"- Calibrated on {calibrated_on(used)} of `{shown_source(used['source'])}` "
            f"(SHA-256 of the {what} `{calibration_sha256(used)}`)."
        )
    recovery = record.get("recovery")
    if recovery:
        yield (
            f"- Then the attention was trained on {recovery['tokens']:,} tokens against the "
            f"source's predictions (SHA-256 of the text `{recovery['text_sha256']}`)."
        )
    else:
        yield "- Nothing was trained end to end."


def _figures(proof: Mapping[str, Any]) -> str:
    rows: list[tuple[str, ...]] = []
    for text in proof["texts"]:
        where = f"`{shown_source(text['source'])}` ({text['role']})"
        if "cosine" in text:
            least = f"least {text['least_cosine']:.4f}"
            rows.append((f"cosine, {where}", "1", f"{text['cosine']:.4f}", least))
            if "top_agreement" in text:
                rows.append((f"top class agrees, {where}", "", f"{text['top_agreement']:.2%}", ""))
            continue
        numbers = (_number(text["dense_perplexity"]), _number(text["perplexity"]))
        rows.append((f"perplexity, {where}", *numbers, f"×{_number(text['ratio'])}"))
        rows.append((f"top token agrees, {where}", "", f"{text['top_agreement']:.2%}", ""))
    for name, size in proof["size"].items():
        counts = (f"{size['dense']:,}", f"{size['cut']:,}")
        rows.append((_SIZES[name], *counts, f"{size['share']:.1%}"))
    for name in ("prefill", "decode"):
        speed = (proof.get("speed") or {}).get(name)
        if speed:
            rates = (f"{speed[which]['median']:,.0f}" for which in ("dense", "cut"))
            rows.append((f"{name}, tokens per second", *rates, f"×{speed['ratio']:.2f}"))
    how = f"On {proof['device']} in {proof['dtype']}, both models in one run; see `verify.json`."
    return "## Measured\n\n" + _table(("", "source", "this model", "ratio"), rows) + f"\n\n{how}"


def _plan_table(plan: Plan) -> str:
    """Widths of every head group, runs of equal layers in one row."""
    rows, start = [], 0
    pairs = [
        (_widths([h.qk_dim for h in x.heads]), _widths([h.vo_dim for h in x.heads]))
        for x in plan.layers
    ]
    for widths, run in itertools.groupby(pairs):
        n = len(list(run))
        rows.append((f"{start}" if n == 1 else f"{start}–{start + n - 1}", *widths))
        start += n
    head = plan.layers[0].heads[0]
    grouped = f"; each serves {head.queries} query heads" if head.queries > 1 else ""
    note = f"One width per key-value head{grouped}."
    columns = ("layers", "query-key widths", "value-output widths")
    return f"## The plan\n\n{note}\n\n{_table(columns, rows)}"


def _loading(kind: ModelKind) -> str:
    return (
        "## How to load it\n\nWith headwise installed:\n\n```python\n"
        f"{kind.program('path/to/this/folder')}\n```\n\n"
        "Without it, the folder's own model code is run, which needs only torch and transformers: "
        f'`{kind.auto}.from_pretrained("path/to/this/folder", trust_remote_code=True)`.'
    )


def _limits(proof: Mapping[str, Any], kind: ModelKind) -> str:
    fitted = "text named above; text of another kind, or another language, loses more"
    measured = "Perplexity is not all: tasks, long contexts and safety were not measured"
    if kind.of_images:
        fitted = "images named above; images of another kind lose more"
        measured = "Agreement with the source is not all: tasks were not measured"
    lines = [
        "- It has the limits and biases of the model it was cut from, and its licence.",
        f"- It was fitted to the {fitted}.",
        f"- {measured}."
        if proof
        else "- Its quality was not measured: run `headwise verify` before you use it.",
        "- Heads of many widths in one layer run as several smaller calls, so it can be slower "
        "than its source although it is smaller.",
        "- It loads in transformers; programs with model code of their own do not know heads of "
        "mixed widths.",
    ]
    for text in proof.get("texts", ()):
        if text["is_calibration_text"]:
            what = "images" if kind.of_images else "text"
            lines.append(
                f"- `{shown_source(text['source'])}` is the {what} it was calibrated on, so the "
                "figures on it flatter the model."
            )
    return "## Limits\n\n" + "\n".join(lines)


def _widths(widths: Sequence[int]) -> str:
    """`64 × 3, 56`: runs of equal widths together."""
    runs = [(width, len(list(run))) for width, run in itertools.groupby(widths)]
    return ", ".join(f"{width} × {n}" if n > 1 else f"{width}" for width, n in runs)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruled = ["---"] * len(columns)
    cells = [[c.replace("|", "\\|") for c in row] for row in (columns, ruled, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _number(value: float | None) -> str:
    return "∞" if value is None else f"{value:.4f}"


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
