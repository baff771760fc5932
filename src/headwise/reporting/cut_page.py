"""The report of a cut model: what was gained and lost, and where."""

from __future__ import annotations

import json
from collections.abc import Iterator

from headwise.measure.record import (
    SIZE_NAMES,
    ImageQuality,
    LanguageQuality,
    Quality,
    Verification,
)
from headwise.planning.cost import cost, dense_cost
from headwise.planning.fit import predicted_loss
from headwise.planning.rules import WidthRules
from headwise.planning.targets import runs_in
from headwise.profiling.worth import fit_problem
from headwise.reporting.figures import comparison_section, drift_figure, prediction_figure
from headwise.reporting.names import gib, kind_of, shown_source, text_name
from headwise.reporting.page import (
    Card,
    Cards,
    Code,
    Figures,
    Page,
    Paragraph,
    Part,
    Section,
    Table,
    named_versions,
    provenance_section,
    sentence,
    warnings_section,
)
from headwise.reporting.profile_figures import profile_section, width_figures
from headwise.reporting.sources import CutModel

NOTICEABLE = 1.10  # perplexity ÷ dense above which people notice
FEW_TOKENS = 8192
FAR_OFF = 2.0  # measured ÷ predicted, either way


def cut_page(cut: CutModel) -> Page:
    """The whole page."""
    predicted = _predicted(cut)
    used = cut.record.calibration
    lead = (
        f"{shown_source(cut.record.model)} with narrower attention heads"
        f"{' and MLPs' if cut.plan.changes_ffn else ''}, calibrated on "
        f"{used.amount} of {shown_source(used.source)}."
    )
    sections = [
        Section("Gains and losses", [Cards(list(_headline(cut)))]),
        *warnings_section(cut_warnings(cut, predicted)),
        Section(
            "The plan",
            [
                Paragraph(
                    "Every cell is a key-value head with the query heads it serves; a darker cell "
                    "is a wider head."
                ),
                Figures(width_figures(cut.plan), "map"),
            ],
        ),
    ]
    if cut.verification is not None:
        sections.append(_measured(cut.verification, predicted))
    if cut.profile is not None:
        sections.append(profile_section(cut.profile, cut.plan))
    if cut.compared is not None:
        sections.append(comparison_section(cut.compared))
    sections += [_loading(cut), _engines(cut), _provenance(cut)]
    return Page(cut.folder.resolve().name, lead, sections)


def _headline(cut: CutModel) -> Iterator[Card]:
    """Before and after, counted or measured."""
    found = cut.verification
    if found is None:
        spent, dense = cost(cut.plan), dense_cost(cut.plan.shape)
        for name, title in SIZE_NAMES.items():
            own, whole = getattr(spent, name), getattr(dense, name)
            if whole:
                beside = f"{whole:,} → {own:,}, by the plan"
                yield Card(title.capitalize(), f"{own / whole:.1%}", beside)
        return
    for name, size in found.size.items():
        beside = f"{size.dense:,} → {size.cut:,}, counted"
        yield Card(SIZE_NAMES[name].capitalize(), f"{size.share:.1%}", beside)
    for text in found.texts:
        yield from _quality(text)
    if found.fits is not None and found.fits.dense:
        fits = found.fits
        yield Card(
            "Sequences that fit",
            f"×{fits.cut / fits.dense:.2f}",
            f"{fits.dense:,} → {fits.cut:,} of {fits.context:,} tokens in {gib(fits.memory)}",
            "good" if fits.cut > fits.dense else "",
        )
    speed = found.speed
    for point in (speed.serving, speed.decode, speed.prefill) if speed else ():
        if point is not None:
            rates = f"{point.dense.median:,.0f} → {point.cut.median:,.0f} tokens/s"
            yield Card(
                f"Speed: {point.title}",
                f"×{point.ratio:.2f}",
                f"{rates}, {point.direction}",
                {"faster": "good", "slower": "bad"}.get(point.direction, ""),
            )


def _quality(text: Quality) -> Iterator[Card]:
    if isinstance(text, LanguageQuality):
        value = "unusable" if text.ratio is None else f"×{text.ratio:.3f}"
        mood = "bad" if text.ratio is None or text.ratio > NOTICEABLE else "good"
        before, after = _number(text.dense_perplexity), _number(text.perplexity)
        yield Card("Perplexity", value, f"{before} → {after} on {text_name(text)}", mood)
        return
    beside = f"{text_name(text)}; lowest {text.least_cosine:.4f}"
    yield Card("Cosine with the dense model", f"{text.cosine:.4f}", beside)
    if isinstance(text, ImageQuality) and text.top_agreement is not None:
        of = f"of {text.images:,} images, {text_name(text)}"
        yield Card("Same top class", f"{text.top_agreement:.1%}", of)


def cut_warnings(cut: CutModel, predicted: float | None) -> list[str]:
    """The warnings of the report."""
    found = cut.verification
    return [*_record_warnings(cut), *_measured_warnings(found), *_far_off(found, predicted)]


def _record_warnings(cut: CutModel) -> Iterator[str]:
    used = cut.record.calibration
    if used.tokens < FEW_TOKENS:
        yield (
            f"It was calibrated on only {used.amount}; a cut usually loses less with more "
            f"{used.kind}."
        )
    if cut.profile is not None:
        yield from (sentence(note) for note in cut.profile.record.notes)


def _measured_warnings(found: Verification | None) -> Iterator[str]:
    if found is None:
        yield "This model has not been measured yet. Run `headwise verify` before you use it."
        return
    yield from found.warnings
    for target in found.targets:
        if not target.met:
            yield f"A target was missed: {target.sentence}"
    for text in found.texts:
        if isinstance(text, LanguageQuality) and (text.ratio is None or text.ratio > NOTICEABLE):
            much = "infinite" if text.ratio is None else f"{text.ratio - 1:.0%} higher than before"
            yield (
                f"On {text_name(text)} the perplexity is {much}: the model is noticeably worse "
                "on this text."
            )
    slow = [
        f"{point.title} runs at {point.ratio:.0%}"
        for point in (found.speed.points if found.speed else ())
        if point.direction == "slower"
    ]
    if slow:
        yield (
            f"It is smaller but not always faster: {' and '.join(slow)} of the dense model's speed "
            "here. A layer with several head widths runs as several calls; --granularity layer "
            "makes it one."
        )
    yield from found.speed.left_out if found.speed else ()
    for task in found.tasks:
        if task.difference < -2 * task.difference_stderr:
            yield (
                f"It scores worse on {task.name}: {task.difference:+.1%} ± "
                f"{task.difference_stderr:.1%} of {task.questions:,} questions."
            )


def _far_off(found: Verification | None, predicted: float | None) -> Iterator[str]:
    text = None if found is None else found.texts[0]
    if predicted is None or not isinstance(text, LanguageQuality):
        return
    measured = text.nll - text.dense_nll
    if predicted > 0 and measured > 0 and not 1 / FAR_OFF < measured / predicted < FAR_OFF:
        yield (
            f"The profile predicted that the loss rises by {predicted:.3f}, but it rose by "
            f"{measured:.3f}: trust the measurement."
        )


def _predicted(cut: CutModel) -> float | None:
    """The predicted loss increase: from the profile if available, otherwise from the plan."""
    if cut.profile is not None:
        return predicted_loss(fit_problem(cut.profile, "sensitivity", WidthRules()), cut.plan)
    return cut.plan.origin.predicted_loss


def _measured(found: Verification, predicted: float | None) -> Section:
    figures = [] if predicted is None else [prediction_figure(predicted, found)]
    drift = drift_figure(found)
    figures += [drift] if drift else []
    agreement = " ".join(
        f"On {text_name(text)} the top token agrees with the dense model's at "
        f"{text.top_agreement:.1%} of {text.tokens:,} positions."
        for text in found.texts
        if isinstance(text, LanguageQuality)
    )
    blocks: list[Part] = [Paragraph(agreement), Figures(figures, "measured")]
    return Section(
        "Measured", [*blocks, *_speed_table(found), *_task_table(found), *_samples(found)]
    )


def _speed_table(found: Verification) -> Iterator[Part]:
    """Every timed point, with the effect of the smaller cache alone."""
    if found.speed is None:
        return
    rows = [
        (
            point.title,
            f"{point.dense.median:,.0f}",
            f"{point.cut.median:,.0f}",
            f"×{point.ratio:.2f}, {point.direction}",
            "" if point.same_code_ratio is None else f"×{point.same_code_ratio:.2f}",
            "" if point.peak is None else f"{gib(point.peak.dense)} → {gib(point.peak.cut)}",
        )
        for point in found.speed.points
    ]
    columns = ("tokens per second", "dense", "cut", "cut ÷ dense", "same code", "peak memory")
    yield Table(columns, rows)
    if any(point.same_code for point in found.speed.points):
        yield Paragraph(
            "“Same code” compares with the dense model in the cut model's attention code: the "
            "effect of the smaller cache alone."
        )


def _task_table(found: Verification) -> Iterator[Part]:
    if not found.tasks:
        return
    rows = [
        (
            f"{task.name} ({task.metric})",
            f"{task.questions:,}",
            f"{task.dense:.1%} ± {task.dense_stderr:.1%}",
            f"{task.cut:.1%} ± {task.cut_stderr:.1%}",
            f"{task.difference:+.1%} ± {task.difference_stderr:.1%}",
            "" if task.gained is None else f"{task.gained} / {task.lost}",
        )
        for task in found.tasks
    ]
    yield Table(("task", "questions", "dense", "cut", "difference", "gained / lost"), rows)
    yield Paragraph(
        "± is one standard error; that of the difference is paired, question by question."
    )


def _samples(found: Verification) -> Iterator[Part]:
    if found.samples:
        rows = [(s.prompt, s.dense, "the same" if s.same else s.cut) for s in found.samples]
        yield Paragraph("What both models write after the same prompts, with greedy decoding:")
        yield Table(("prompt", "dense", "cut"), rows)


def _loading(cut: CutModel) -> Section:
    kind = kind_of(cut.folder, cut.record, causal=cut.plan.shape.causal)
    advice = (
        "Without headwise installed, leave out its import and pass trust_remote_code=True to "
        "from_pretrained: then the model code in the folder is run."
    )
    program = kind.program(cut.folder.resolve().name)
    return Section("How to load it", [Code(program), Paragraph(advice)])


def _engines(cut: CutModel) -> Section:
    rows = [
        (f"{one.target}, {one.engine}", "yes" if one.yes else "no", one.how or one.why_not)
        for one in runs_in(cut.plan)
    ]
    said = "The engines that run this plan; `headwise export` writes what they load."
    table = Table(("target", "runs", "details"), rows, "Engines that run the plan")
    return Section("Other engines", [Paragraph(said), table])


def _provenance(cut: CutModel) -> Section:
    record, used = cut.record, cut.record.calibration
    trained = "no" if record.recovery is None else f"{record.recovery.tokens:,} tokens"
    rows = [
        ("source model", record.model),
        (f"calibration {used.kind}", f"{used.source}, {used.amount}"),
        (f"SHA-256 of the {used.kind}", used.sha256),
        ("profile's SHA-256", record.profile_sha256),
        ("settings of the cut", json.dumps(record.settings)),
        ("trained after the cut", trained),
        ("made with", named_versions(record.versions)),
    ]
    if cut.verification is not None:
        place = f"{cut.verification.device} in {cut.verification.dtype}"
        rows.append(("measured on", f"{place}, against {cut.verification.against}"))
    return provenance_section(rows, record.command or cut.plan.origin.command)


def _number(value: float | None) -> str:
    return "∞" if value is None else f"{value:.2f}"
