"""The model card of a cut checkpoint: what was done, on which data, with which results.

    OUT/config.json ─► plan ──┐
    OUT/headwise.json ────────┼─► OUT/README.md
    OUT/verify.json, if there ┘

The card is made only from the files next to it, so it can be written again whenever one of them
changes, and always agrees with them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.artifacts import write_text
from headwise.errors import HeadwiseError, printable
from headwise.measure.record import (
    SIZE_NAMES,
    ImageQuality,
    LanguageQuality,
    Verification,
    read_verification,
)
from headwise.models.record import CutRecord, read_cut_record
from headwise.records import read_file
from headwise.reporting.names import ModelKind, gib, hub_name, is_hub_name, kind_of, shown_source

if TYPE_CHECKING:
    from headwise.plan import Plan

CARD, REPORT = "README.md", "report.html"  # the last files of an output folder
# The Hub knows adapter, merge, quantized and finetune; a model of its own with changed weights is
# the last of them.
RELATION = "finetune"
_LICENCE = ("license", "license_name", "license_link")
_OURS = "headwise"  # the tag by which a card of ours is recognised
_SPECIAL = re.compile(r"[\\`*\[\]<>&|~]|(?<!\w)_|_(?!\w)")


def write_card(folder: Path, source: Path | None = None, *, name: str | None = None) -> None:
    """Write README.md of a cut checkpoint, or write it again.

    Licence and base model come from the card in `source` (the folder it was made from), or without
    a source from the card that is replaced. `name` is for a folder that is renamed later.
    """
    text = model_card(folder, source, name or folder.resolve().name)
    write_text(folder / CARD, text, force=True)


def note_report(folder: Path, profile: Path | None = None) -> tuple[str, ...]:
    """Write the report next to the card; the model is finished, so a failure is only noted."""
    try:
        from headwise.reporting.pages import report  # needs the card's readers and the charts

        report(folder, folder / REPORT, profile=profile, force=True)
    except HeadwiseError as error:
        return (f"No report: {error}",)
    return ()


def model_card(folder: Path, source: Path | None, name: str) -> str:
    """The card's text."""
    from headwise.source import open_source

    plan = open_source(folder).plan
    record, verification = read_cut_record(folder), read_verification(folder)
    before = _metadata_in((source or folder) / CARD)
    base = _base_of(before, record.model)
    kind = kind_of(folder, record, causal=plan.shape.causal)
    head = _front_matter(
        record,
        verification,
        base=base,
        licence={key: before[key] for key in _LICENCE if before.get(key)},
        name=name,
        task=kind.task,
    )
    parts = [_title(name, record, base, plan), _done(record, plan)]
    if verification is not None:
        parts.append(_figures(verification))
    parts += [_plan_table(plan), _loading(kind), _engines(plan), _limits(verification, kind)]
    return head + "\n" + "\n\n".join(parts) + "\n"


def _title(name: str, record: CutRecord, base: str | None, plan: Plan) -> str:
    source = (
        f"[{base}](https://huggingface.co/{base})" if base else code(shown_source(record.model))
    )
    if plan.changes_ffn:
        return (
            f"# {plain(name)}\n\n{source} with narrower attention heads and MLPs, made by "
            "headwise. Each head keeps the directions and each MLP the neurons that the loss needs "
            "most; everything else is copied from the source bit for bit."
        )
    return (
        f"# {plain(name)}\n\n{source} with narrower attention heads, made by headwise. Each head "
        "keeps the directions that the loss needs most; everything outside the attention is copied "
        "from the source bit for bit."
    )


def _done(record: CutRecord, plan: Plan) -> str:
    from headwise.planning.cost import cost, dense_cost

    spent, dense = cost(plan).attn_params, dense_cost(plan.shape).attn_params
    neurons, all_neurons = sum(plan.ffn_dims), plan.shape.n_layers * plan.shape.ffn_dim
    of_mlps = (
        f"- MLP neurons: {neurons:,} of {all_neurons:,} ({neurons / max(1, all_neurons):.1%})."
    )
    used, recovery = record.calibration, record.recovery
    lines = [
        f"- Attention parameters: {spent:,} of {dense:,} ({spent / dense:.1%}).",
        *([of_mlps] if plan.changes_ffn else []),
        f"- Calibrated on {used.amount} of {code(shown_source(used.source))} (SHA-256 of the "
        f"{used.kind} {code(used.sha256)}).",
    ]
    both = ", with the narrower MLPs," if plan.changes_ffn else ""
    if recovery is not None:
        lines.append(
            f"- Then the attention{both} was trained on {recovery.tokens:,} tokens with the "
            f"source's predictions as targets (SHA-256 of the text {code(recovery.text_sha256)})."
        )
    else:
        lines.append("- Nothing was trained end to end.")
    if record.settings:
        shown = ", ".join(f"{name} {json.dumps(value)}" for name, value in record.settings.items())
        lines.append(f"- Settings of the cut: {code(shown)}.")
    if record.versions:
        made = ", ".join(f"{name} {version}" for name, version in record.versions.items())
        lines.append(f"- Made with {plain(made)}.")
    lines.append("- `headwise.json` has the full record.")
    return "## What was done\n\n" + "\n".join(lines)


def _figures(found: Verification) -> str:
    rows: list[tuple[str, ...]] = []
    for text in found.texts:
        where = f"{code(shown_source(text.source))} ({text.role})"
        if isinstance(text, LanguageQuality):
            numbers = (_number(text.dense_perplexity), _number(text.perplexity))
            rows.append((f"perplexity, {where}", *numbers, f"×{_number(text.ratio)}"))
            rows.append((f"top token agrees, {where}", "", f"{text.top_agreement:.2%}", ""))
            continue
        least = f"lowest {text.least_cosine:.4f}"
        rows.append((f"cosine, {where}", "1", f"{text.cosine:.4f}", least))
        if isinstance(text, ImageQuality) and text.top_agreement is not None:
            rows.append((f"top class agrees, {where}", "", f"{text.top_agreement:.2%}", ""))
    for name, size in found.size.items():
        rows.append((SIZE_NAMES[name], f"{size.dense:,}", f"{size.cut:,}", f"{size.share:.1%}"))
    for point in found.speed.points if found.speed else ():
        rates = (f"{point.dense.median:,.0f}", f"{point.cut.median:,.0f}")
        rows.append((f"{point.title}, tokens per second", *rates, f"×{point.ratio:.2f}"))
        if point.same_code is not None:
            alike = (f"{point.same_code.median:,.0f}", "", f"×{point.same_code_ratio:.2f}")
            rows.append(("the same, source with this model's attention code", *alike))
        if point.peak is not None:
            peak = (gib(point.peak.dense), gib(point.peak.cut))
            share = f"{point.peak.cut / point.peak.dense:.1%}"
            rows.append((f"peak memory there ({point.batch} × {point.context:,})", *peak, share))
    if found.fits is not None:
        fits, what = found.fits, f"sequences of {found.fits.context:,} tokens that fit"
        times = f"×{fits.cut / fits.dense:.2f}" if fits.dense else ""
        rows.append((f"{what} {gib(fits.memory)}", f"{fits.dense:,}", f"{fits.cut:,}", times))
    for task in found.tasks:
        called = f"{plain(task.name)}, {plain(task.metric)} of {task.questions:,} questions"
        scores = (_percent(task.dense, task.dense_stderr), _percent(task.cut, task.cut_stderr))
        rows.append((called, *scores, _percent(task.difference, task.difference_stderr, "+")))
    place = f"On {plain(found.device)} in {plain(found.dtype)}"
    how = f"{place}, both models in one run; see `verify.json`."
    made = _table(("", "source", "this model", "ratio"), rows)
    return f"## Measured\n\n{made}\n\n{how}{_samples(found)}"


def _samples(found: Verification) -> str:
    """What both models write, side by side."""
    if not found.samples:
        return ""
    rows = [
        (plain(s.prompt), plain(s.dense), "the same" if s.same else plain(s.cut))
        for s in found.samples
    ]
    made = _table(("prompt", "source", "this model"), rows)
    return f"\n\nSamples from both models with greedy decoding:\n\n{made}"


def _plan_table(plan: Plan) -> str:
    """Widths of every head group, runs of equal layers in one row."""
    rows, start = [], 0
    pairs = [
        (
            _widths([h.qk_dim for h in x.heads]),
            _widths([h.vo_dim for h in x.heads]),
            *([f"{x.ffn_dim}"] if plan.changes_ffn else []),
        )
        for x in plan.layers
    ]
    for widths, run in itertools.groupby(pairs):
        n = len(list(run))
        rows.append((f"{start}" if n == 1 else f"{start}–{start + n - 1}", *widths))
        start += n
    queries = plan.shape.queries
    grouped = f"; each serves {queries} query heads" if queries > 1 else ""
    gone = plan.shape.n_layers * plan.shape.n_kv_heads - sum(len(x.heads) for x in plan.layers)
    without = f" {gone} whole heads were dropped." if gone > 0 else ""
    note = f"One width per key-value head{grouped}.{without}"
    mlp = ["MLP width"] if plan.changes_ffn else []
    columns = ("layers", "query-key widths", "value-output widths", *mlp)
    return f"## The plan\n\n{note}\n\n{_table(columns, rows)}"


def _loading(kind: ModelKind) -> str:
    return (
        "## How to load it\n\nWith headwise installed:\n\n```python\n"
        f"{kind.program('path/to/this/folder')}\n```\n\n"
        "Without it, the model code in the folder is run, which needs only torch and transformers: "
        f'`{kind.auto}.from_pretrained("path/to/this/folder", trust_remote_code=True)`.'
    )


def _engines(plan: Plan) -> str:
    from headwise.planning.targets import runs_in

    rows = [
        (f"{one.target}, {one.engine}", "yes" if one.yes else "no", one.how or one.why_not)
        for one in runs_in(plan)
    ]
    columns = ("target", "runs", "details")
    return f"## Other engines\n\n{_table(columns, rows)}"


def _limits(found: Verification | None, kind: ModelKind) -> str:
    fitted = "text named above; it is worse on other kinds of text and in other languages"
    tasks = "" if found is not None and found.tasks else "tasks, "
    measured = f"Perplexity is not everything: {tasks}long contexts and safety were not measured"
    if kind.of_images:
        fitted = "images named above; it is worse on other kinds of images"
        measured = "Agreement with the source is not everything: tasks were not measured"
    if found is None:
        measured = "Its quality was not measured: run `headwise verify` before you use it"
    lines = [
        "- It has the limits and biases of the model it was cut from, and its licence.",
        f"- It was fitted to the {fitted}.",
        f"- {measured}.",
        "- A layer with several head widths runs as several smaller calls, so the model can be "
        "slower than its source although it is smaller.",
        "- It loads in transformers; for engines with their own model code it must be exported "
        "(`headwise export`).",
    ]
    lines += [
        f"- {code(shown_source(text.source))} is the {text.what} it was calibrated on, so the "
        "figures on it flatter the model."
        for text in (found.texts if found is not None else ())
        if text.is_calibration_text
    ]
    return "## Limits\n\n" + "\n".join(lines)


def _widths(widths: Sequence[int]) -> str:
    """`64 × 3, 56`: runs of equal widths together."""
    runs = [(width, len(list(run))) for width, run in itertools.groupby(widths)]
    return ", ".join(f"{width} × {n}" if n > 1 else f"{width}" for width, n in runs) or "none"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruled = ["---"] * len(columns)
    cells = [[c.replace("|", "\\|") for c in row] for row in (columns, ruled, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _percent(value: float, stderr: float, sign: str = "") -> str:
    return f"{value:{sign}.1%} ± {stderr:.1%}"


def _number(value: float | None) -> str:
    return "∞" if value is None else f"{value:.4f}"


def plain(text: str) -> str:
    """A name escaped for Markdown and HTML, also in tables."""
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", _one_line(text))


def code(text: str) -> str:
    """A name as Markdown code; a name that could end the code or a table cell is escaped text."""
    shown = _one_line(text)
    return f"`{shown}`" if shown and not set(shown) & set("`|\\<>") else plain(text)


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()), keep="")


def _front_matter(
    record: CutRecord,
    verification: Verification | None,
    *,
    base: str | None,
    licence: Mapping[str, Any],
    name: str,
    task: str,
) -> str:
    """The YAML between two `---`, as the Hub reads it (https://huggingface.co/docs/hub/model-cards).

    Unknown values are left out: the language, a licence that the source's card does not state, a
    base model that has no name on the Hub.
    """
    from huggingface_hub import ModelCardData

    results = list(_results(verification, task)) if verification else []
    fields: dict[str, Any] = {
        "base_model": base,
        "base_model_relation": RELATION if base else None,
        "datasets": _datasets(record) or None,
        "library_name": "transformers",
        "pipeline_tag": task,
        "tags": [_OURS, "compressed", "low-rank", "attention"],
        **licence,
    }
    if results:
        fields |= {"model_name": _one_line(name), "eval_results": results}
    written = ModelCardData(**{k: v for k, v in fields.items() if v is not None}).to_yaml()
    return f"---\n{written}\n---\n"


def _base_of(metadata: Mapping[str, Any], model: str) -> str | None:
    """The base model: the one in an existing card of ours, else `model` if it is on the Hub.

    A path may look like a Hub name from another folder, so this is decided once, at the cut.
    """
    tags = metadata.get("tags")
    if isinstance(tags, list) and _OURS in tags:
        base = metadata.get("base_model")
        return str(base) if is_hub_name(base) else None
    return hub_name(model)


def _metadata_in(card: Path) -> dict[str, Any]:
    """The front matter of a README.md; empty if there is none, or none that can be read."""
    import yaml  # type: ignore[import-untyped]
    from huggingface_hub import metadata_load

    try:
        read_file(card)
        return metadata_load(card) or {}
    except (OSError, ValueError, yaml.YAMLError, HeadwiseError):
        return {}


def _datasets(record: CutRecord) -> list[str]:
    """Hub datasets among the texts that the model was made with."""
    source = record.calibration.source
    name = source.split(":")[1] if source.startswith("hub:") else None
    return [name] if name and is_hub_name(name) else []


def _results(verification: Verification, task: str) -> Iterator[Any]:
    """Every measured figure of quality as the Hub's evaluation result."""
    from huggingface_hub import EvalResult

    for text in verification.texts:
        one = "class" if isinstance(text, ImageQuality) else "token"
        metrics = {
            "perplexity": ("perplexity", "Perplexity"),
            "ratio": ("perplexity", "Perplexity ÷ that of the source model"),
            "top_agreement": ("accuracy", f"Top {one} agrees with the source model"),
            "cosine": ("cosine_similarity", "Mean cosine with the source model's embeddings"),
        }
        for name, (kind, called) in metrics.items():
            value: float | None = getattr(text, name, None)
            if value is not None:
                yield EvalResult(
                    task_type=task,
                    dataset_type="image" if isinstance(text, ImageQuality) else "text",
                    dataset_name=_one_line(shown_source(text.source)),
                    metric_type=kind,
                    metric_name=called,
                    metric_value=float(f"{value:.6g}"),
                )
