"""The card of an exported folder: what it is, how to load it, and what was measured."""

from __future__ import annotations

from pathlib import Path

from headwise.artifacts import write_text
from headwise.exporting.record import ExportRecord
from headwise.planning.cost import cost, dense_cost
from headwise.reporting.card import CARD, code, plain
from headwise.reporting.names import shown_source
from headwise.source import Source

_LOADING = {
    "causal-lm": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
}


def write_export_card(folder: Path, record: ExportRecord, source: Source, *, name: str) -> None:
    """Write README.md of an exported folder."""
    write_text(folder / CARD, _text(record, source, name), force=True)


def _text(record: ExportRecord, source: Source, name: str) -> str:
    spent, dense = cost(source.plan), dense_cost(source.plan.shape)
    share = spent.kv_bytes / dense.kv_bytes if dense.kv_bytes else 1.0
    parts = [
        "---\ntags:\n- headwise\n---",
        f"# {plain(name)}",
        f"{code(shown_source(record.model))}, with attention planned by headwise, exported as "
        f"{code(record.architecture)} for {plain(record.target)}.",
    ]
    if record.target == "padded":
        parts.append(
            "What was cut is filled with zeros: the outputs are those of the cut model, and "
            "**nothing is saved**, neither memory nor time."
        )
    elif share < 1:
        parts.append(
            f"It caches {spent.kv_bytes:,} bytes per token, {share:.1%} of the dense model's "
            f"{dense.kv_bytes:,}."
        )
    if record.target in ("stock", "padded"):
        kind = _LOADING.get(source.task, "AutoModel")
        parts.append(
            "```python\n"
            f"from transformers import {kind}\n\n"
            f'model = {kind}.from_pretrained("path/to/this/folder")\n```'
        )
    if record.parity is not None:
        said = str(record.parity)
        parts.append(f"{said[0].upper()}{said[1:]}.")
    return "\n\n".join(parts) + "\n"
