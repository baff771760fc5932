"""Report pages of a profile, a cut model, a training run or a comparison."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from headwise.artifacts import write_text
from headwise.baselines.record import CHARTS, ComparisonRecord
from headwise.planning.cost import cost, dense_cost
from headwise.reporting.charts import pareto_chart, save_chart
from headwise.reporting.cut_page import cut_page
from headwise.reporting.figures import (
    budgets_figure,
    comparison_section,
    loss_figure,
    rate_figure,
)
from headwise.reporting.names import shown_source
from headwise.reporting.page import (
    Card,
    Cards,
    Code,
    Figures,
    Page,
    Paragraph,
    Quotation,
    Section,
    named_versions,
    page_html,
    provenance_section,
    sentence,
    warnings_section,
)
from headwise.reporting.profile_figures import profile_section, width_figures
from headwise.reporting.sources import (
    CutModel,
    ProfiledModel,
    ReportSource,
    TrainingRun,
    read_report_source,
    with_samples,
)

MANY_TIMES = 4  # that a run sees every token before it is warned about


def report(
    path: str | Path,
    out: str | Path = "report.html",
    *,
    force: bool = False,
    profile: str | Path | None = None,
    compare: str | Path | None = None,
    samples: bool = True,
) -> Path:
    """Write one self-contained HTML page about a folder that headwise wrote; returns its path.

    `path` is a cut model, a profile, a training run or a comparison. `profile` and `compare` add
    figures to the page of a cut model; `samples` adds a few samples of a trained model.

    >>> import headwise as hw
    >>> page = hw.report("smaller", out="page.html")
    """
    source = read_report_source(
        Path(path),
        profile=None if profile is None else Path(profile),
        compare=None if compare is None else Path(compare),
    )
    if samples and isinstance(source, TrainingRun):
        source = with_samples(source)
    reads = [place for place in (path, profile, compare) if place is not None]
    write_text(Path(out), report_html(source), force=force, inputs=reads, kind="page")
    return Path(out)


def draw_comparison(record: ComparisonRecord, folder: Path) -> None:
    """The chart of a comparison in three forms, beside its record."""
    chart = pareto_chart(record)
    for name in CHARTS:
        save_chart(chart, folder / name, force=True)


def report_html(source: ReportSource) -> str:
    """The page of a source, as text."""
    match source:
        case CutModel():
            return page_html(cut_page(source))
        case ProfiledModel():
            return page_html(profile_page(source))
        case TrainingRun():
            return page_html(training_page(source))
        case ComparisonRecord():
            return page_html(comparison_page(source))


def profile_page(source: ProfiledModel) -> Page:
    """Where a model is sensitive, and what budgets would lose."""
    profile, record = source.profile, source.profile.record
    shape, dense = profile.plan.shape, cost(profile.plan)
    groups = f"{shape.n_heads} query heads, {shape.n_kv_heads} key-value heads"
    cards = [
        Card("Layers", f"{shape.n_layers}", f"{groups} in each"),
        Card("Attention parameters", f"{dense.attn_params:,}", f"of {dense.params:,} in total"),
    ]
    if shape.causal:
        beside = f"{shape.kv_dtype_bytes} bytes per number"
        cards.append(Card("Cached bytes per token", f"{dense.kv_bytes:,}", beside))
    used = record.calibration
    if record.loss is not None:
        beside = f"{record.unit}, {record.objective}"
        cards.append(Card(f"Loss on the {used.kind}", f"{record.loss:.3f}", beside))
    budgets = budgets_figure(profile)
    where = shlex.quote(str(source.folder))
    commands = f"headwise explore {where}\nheadwise plan fit {where} --attn-params 75% -o plan.json"
    rows = [
        ("model", record.model),
        ("weights' SHA-256", record.weights_sha256),
        (used.kind, used.source),
        (f"SHA-256 of the {used.kind}", used.sha256),
        ("read", f"{record.sequences} sequences, {record.settings}"),
        ("computed", f"on {record.device} in {record.dtype}"),
        ("made with", named_versions(record.versions)),
    ]
    sections = [
        Section("The model", [Cards(cards)]),
        *warnings_section([sentence(note) for note in record.notes]),
        *(
            [Section("What a budget would cost", [Figures([budgets], "budgets")])]
            if budgets
            else []
        ),
        profile_section(profile, None),
        Section(
            "Next steps",
            [Paragraph("Try budgets with sliders, or fit a plan to one:"), Code(commands)],
        ),
        provenance_section(rows),
    ]
    lead = (
        f"Measured on {used.amount} of {shown_source(used.source)}: which directions of every head "
        "the loss needs."
    )
    return Page(f"Profile of {shown_source(record.model)}", lead, sections)


def training_page(run: TrainingRun) -> Page:
    """How a training run went, its plan, and what the model writes."""
    record, text = run.record, run.record.inputs.text
    source = shown_source(text.source)
    lead = (
        f"Trained on {run.details.text.train_tokens:,} tokens of {source} to predict "
        f"{run.details.objective}; {record.status}."
    )
    sections = [
        Section("Results", [Cards(list(_training_headline(run)))]),
        *warnings_section(list(_training_warnings(run))),
    ]
    if run.rows:
        sections.append(
            Section("Curves", [Figures([loss_figure(run.rows), rate_figure(run.rows)], "run")])
        )
    sections.append(Section("The plan", [Figures(width_figures(run.plan), "map")]))
    if run.samples:
        note = Paragraph(
            "Sampled at temperature 0.8, not cherry-picked. Each sample begins with its prompt."
        )
        drawn = [Quotation(f"{prompt}{written}") for prompt, written in run.samples]
        sections.append(Section("Samples", [note, *drawn]))
    rows = [
        ("text", text.source),
        ("text's SHA-256", text.sha256),
        ("held out", run.details.text.split),
        (
            "settings",
            ", ".join(f"{name} {value}" for name, value in record.inputs.settings.items()),
        ),
        ("made with", named_versions(record.versions)),
    ]
    sections.append(provenance_section(rows, record.command))
    return Page(f"Training run: {run.folder.resolve().name}", lead, sections)


def _training_headline(run: TrainingRun) -> Iterator[Card]:
    spent, dense = cost(run.plan), dense_cost(run.plan.shape)
    share = spent.attn_params / dense.attn_params
    yield Card("Parameters", f"{spent.params:,}", f"{dense.params:,} if uniform")
    yield Card("Attention parameters", f"{spent.attn_params:,}", f"{share:.1%} of uniform heads")
    if not run.rows:
        return
    held = [row for row in run.rows if row.held_out_loss is not None]
    unit = "nats per token" if run.details.masking is None else "nats per masked token"
    if held:
        beside = f"{unit}, at step {held[-1].step}"
        yield Card("Held-out loss", f"{held[-1].held_out_loss:.3f}", beside)
    last = run.rows[-1]
    yield Card("Training loss", f"{last.loss:.3f}", f"{unit}, at step {last.step}")
    yield Card("Tokens seen", f"{last.tokens:,}", f"{last.tokens_per_second:,.0f} tokens/s")


def _training_warnings(run: TrainingRun) -> Iterator[str]:
    record = run.record
    if record.status != "finished":
        reason = f": {run.details.reason}" if run.details.reason else ""
        yield f"The run is {record.status}{reason}."
    if not run.rows:
        yield "No step has been taken yet."
    elif run.rows[-1].tokens > MANY_TIMES * run.details.text.train_tokens:
        times = run.rows[-1].tokens / run.details.text.train_tokens
        yield f"It saw every token about {times:.0f} times; watch the held-out loss."


def comparison_page(record: ComparisonRecord) -> Page:
    """Methods at equal counted budgets."""
    used = record.calibration
    lead = f"Calibrated on {used.amount} of {shown_source(used.source)}."
    rows = [
        ("model", record.model),
        ("attention parameters, dense", f"{record.attn_params:,}"),
        *([] if record.params is None else [("all parameters, dense", f"{record.params:,}")]),
        ("made with", named_versions(record.versions)),
    ]
    return Page(
        f"Methods compared on {shown_source(record.model)}",
        lead,
        [comparison_section(record), provenance_section(rows, record.command)],
    )
