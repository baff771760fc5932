"""A cut model measured against its source: quality, size and speed, in one record.

Quality is measured on the same windows for both models. Size is counted in the files and in a live
cache, and compared with what the plan says. Speed is taken in turns.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from headwise import artifacts
from headwise.data.images import PIXELS, ImageReader, Images
from headwise.data.text import Text, read_source
from headwise.data.tokens import token_ids
from headwise.devices import chosen_device
from headwise.errors import HeadwiseError
from headwise.measure.answers import (
    TaskAnswers,
    TaskQuestions,
    answer_tasks,
    read_tasks,
    task_results,
)
from headwise.measure.comparison import (
    StoredLogits,
    embedding_cosines,
    image_comparison,
    text_comparison,
)
from headwise.measure.generation import continuation
from headwise.measure.likelihood import DEFAULT_WINDOW, model_context, scored_stream, window_of
from headwise.measure.record import (
    SIZE_NAMES,
    CacheChange,
    EmbeddingQuality,
    Fits,
    LanguageQuality,
    Peak,
    Quality,
    Rate,
    Sample,
    SizeChange,
    SizeChanges,
    SpeedChanges,
    SpeedPoint,
    Targets,
    TaskResult,
    Verification,
    VerifySettings,
    Windows,
)
from headwise.measure.size import (
    cache_bytes,
    counted,
    parse_bytes,
    sequence_bytes,
    sequences_that_fit,
)
from headwise.measure.speed import Timed, Workload, decoding_bytes, speed_points, timed_point
from headwise.memory import NUMBER, verify_need
from headwise.models.record import CUT_RECORD, read_cut_record
from headwise.planning.cost import cost
from headwise.progress import Progress, note, silent
from headwise.source import AnyModel, Kind, Source, open_source, refuse_other_kind

if TYPE_CHECKING:
    from headwise.source import Reader

BROKEN = 2.0  # mean KL of a window, in nats per token, above which it counts as broken
_KINDS = {"causal": "a causal model", "encoder": "an encoder", "image": "an image model"}
PROMPTS = (  # that both models continue
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):",
    "The main difference between a cat and a dog is",
)
SAMPLE_TOKENS = 40
MAX_SENTENCE = 128  # tokens of a sentence that encoders are compared on


def verify(
    cut: AnyModel,
    against: AnyModel,
    texts: str | Text | Images | Sequence[str | Text | Images],
    settings: VerifySettings | None = None,
    *,
    others: Sequence[str | Text] = (),
    targets: Targets | None = None,
    progress: Progress = silent,
) -> Verification:
    """Measure a cut model against the model it was cut from.

    `texts` (or a set of images) are of the kinds that the model was calibrated on; `others` show
    what the cut costs elsewhere. A missed target is not an error: see `met` and `targets`.
    """
    settings, targets = settings or VerifySettings(), targets or Targets()
    given = [texts] if isinstance(texts, str | Text | Images) else list(texts)
    if not given:
        raise HeadwiseError("a verification needs at least one text or set of images; give one.")
    sources = [read_source(text) if isinstance(text, str) else text for text in (*given, *others)]
    parse_bytes(settings.memory)  # a wrong amount is told before the long work
    asked = read_tasks(settings.tasks, settings.task_data, settings.task_limit)
    model, reference = (
        open_source(one, tokenizer=settings.tokenizer, trust_remote_code=settings.trust_remote_code)
        for one in (cut, against)
    )
    seen = seen_texts(model.folder)
    task = _common_task(model, reference, sources)
    targets.check(reference.kind)
    for one in asked:
        if one.kind != reference.kind:
            raise HeadwiseError(
                f"the task {one.name} is for {_KINDS[one.kind]}, but this is "
                f"{_KINDS[reference.kind]}; leave it out of --tasks."
            )
    with TemporaryDirectory(prefix="headwise-") as spare:
        together, progress = _fit_together((model, reference), settings, progress)
        if together:
            pair = _load_pair(model, reference, task, settings)
        else:
            note(progress, "Memory is short: loading one model at a time.")
            pair = _load_in_turns(
                model, reference, task, sources, settings, asked=asked, spare=Path(spare)
            )
        return _verification(
            pair,
            (model, reference),
            sources,
            settings,
            n_own=len(given),
            asked=asked,
            targets=targets,
            seen=seen,
            progress=progress,
        )


def _verification(
    pair: Pair,
    models: tuple[Source, Source],
    sources: Sequence[Text | Images],
    settings: VerifySettings,
    *,
    n_own: int,
    asked: Sequence[TaskQuestions],
    targets: Targets,
    seen: frozenset[str],
    progress: Progress,
) -> Verification:
    model, reference = models
    qualities: list[Quality] = []
    for i, source in enumerate(sources):
        facts = {
            "source": source.source,
            "sha256": source.sha256,
            "role": "calibration domain" if i < n_own else "other text",
            "is_calibration_text": source.sha256 in seen,
        }
        qualities.append(_quality(pair, source, facts, settings, progress))
    size = _size_changes(pair, (model, reference))
    judged = targets.judge(qualities, size)
    warnings = [*_text_warnings(model.name, pair.kind, qualities, known=bool(seen))]
    return Verification(
        model=model.name,
        against=reference.name,
        kind=pair.kind,
        texts=tuple(qualities),
        size=size,
        speed=_speed_changes(pair, size, settings) if settings.repeats else None,
        fits=_fits(pair, models, settings) if pair.causal else None,
        tasks=_tasks(pair, asked, progress),
        samples=_samples(pair, settings.samples),
        targets=judged,
        met=all(target.met for target in judged),
        warnings=(*warnings, *_size_warnings(size)),
        device=pair.model.device.type,
        dtype=str(pair.model.dtype).removeprefix("torch."),
        versions=dict(artifacts.versions(("headwise", "torch", "transformers"))),
    )


def _fit_together(
    sources: tuple[Source, Source], settings: VerifySettings, progress: Progress
) -> tuple[bool, Progress]:
    """Whether both models fit in memory; raises if not even one does.

    Reports the expected peak. Only causal models can be compared one at a time.
    """
    if None in {one.folder for one in sources} or chosen_device(settings.device) != "cpu":
        return True, progress
    model, reference = (one.plan for one in sources)
    window = settings.window or min(reference.shape.context, DEFAULT_WINDOW)
    number = 2 if settings.dtype == "bf16" else NUMBER
    how: dict[str, Any] = {"tokens": window, "most": settings.max_tokens, "number": number}
    how["timed"] = bool(settings.repeats) and sources[1].kind == "causal"
    need = verify_need((model, reference), **how)
    together = need.fits or sources[1].kind != "causal"
    if not together:
        need = verify_need((model, reference), in_turns=True, **how)
    return together, need.check(progress, advice="use a smaller --window, or --dtype bf16")


@dataclass(frozen=True, slots=True)
class Remembered:
    """Results of the source, kept after it was freed to make room for the model."""

    cache_bytes: int
    speed: Mapping[str, Timed | str]  # by the point's name
    logits: Mapping[str, StoredLogits]  # by the text's SHA-256
    answers: tuple[TaskAnswers, ...]
    written: tuple[str, ...]  # after each prompt


@dataclass(frozen=True, slots=True)
class Pair:
    """The model and its source, loaded alike."""

    model: Any
    reference: Any  # without weights, if what it said is remembered
    reader: Any  # the tokenizer, or the image reader
    kind: Kind
    context: int  # of an image: its tokens
    remembered: Remembered | None = None

    @property
    def causal(self) -> bool:
        """Whether the models write text."""
        return self.kind == "causal"


def _common_task(model: Source, reference: Source, texts: Sequence[Text | Images]) -> str:
    """The task that both models can be loaded for; `texts` must be of their kind."""
    if model.kind != reference.kind:
        raise HeadwiseError(
            f"{_KINDS[model.kind]} and {_KINDS[reference.kind]} cannot be compared; give the model "
            "this one was made from."
        )
    for text in texts:
        refuse_other_kind(model.reader, text)
    _refuse_other_reader(model.reader, reference.reader)
    # A head that only one of the two has cannot be compared.
    return model.task if model.task == reference.task else "bare"


def _load_pair(model: Source, reference: Source, task: str, settings: VerifySettings) -> Pair:
    own, dense = (
        one.load(task, device=settings.device, dtype=settings.dtype) for one in (model, reference)
    )
    return Pair(own, dense, reference.reader, reference.kind, reference.plan.shape.context)


def _load_in_turns(
    model: Source,
    reference: Source,
    task: str,
    texts: Sequence[Text | Images],
    settings: VerifySettings,
    *,
    asked: Sequence[TaskQuestions],
    spare: Path,
) -> Pair:
    """Run the source first, save its predictions to `spare`, then load the model alone."""
    dense = reference.load(task, device=settings.device, dtype=settings.dtype)
    logits: dict[str, StoredLogits] = {}
    window = window_of(dense, settings.window)
    for i, text in enumerate(texts):
        assert isinstance(text, Text)
        stream, _ = scored_stream(reference.tokenizer, text, settings.max_tokens)
        logits[text.sha256] = StoredLogits.of(
            dense, stream, spare / f"{i}", window=window, stride=settings.stride
        )
    per_token = cache_bytes(dense)
    context = reference.plan.shape.context
    pair = Pair(dense, dense, reference.reader, reference.kind, context)
    remembered = Remembered(
        per_token,
        {
            point.name: timed_point(
                (dense,), point, repeats=settings.repeats, seconds=settings.seconds
            )
            for point in (_workloads(pair, per_token, settings) if settings.repeats else ())
            if not point.served
        },
        logits,
        answer_tasks(dense, reference.tokenizer, asked),
        tuple(_written(dense, reference.tokenizer, p) for p in _prompts(pair, settings.samples)),
    )
    del pair
    dense = None
    gc.collect()
    own = model.load(task, device=settings.device, dtype=settings.dtype)
    empty = reference.empty(task)
    return Pair(own, empty, reference.reader, reference.kind, context, remembered)


def _refuse_other_reader(own: Reader, reference: Reader) -> None:
    """Raise unless both models can be given the same inputs."""
    if isinstance(own, ImageReader) or isinstance(reference, ImageReader):
        assert isinstance(own, ImageReader)
        assert isinstance(reference, ImageReader)
        if own.shape != reference.shape:
            raise HeadwiseError(
                f"both models must read images of one size, got {own.shape} and "
                f"{reference.shape}; give the model this one was made from."
            )
    elif own.get_vocab() != reference.get_vocab():
        raise HeadwiseError(
            "both models must have one tokenizer, but theirs differ; give the model this one was "
            "made from."
        )


def seen_texts(folder: Path | None) -> frozenset[str]:
    """The SHA-256 of all texts and images a model was made with; empty if unknown."""
    if folder is None or not (folder / CUT_RECORD).exists():
        return frozenset()
    return read_cut_record(folder).seen


def _quality(
    pair: Pair,
    source: Text | Images,
    facts: dict[str, Any],
    settings: VerifySettings,
    progress: Progress,
) -> Quality:
    def report(what: str, done: int, total: int) -> None:
        progress(source.source, done, total)

    if isinstance(source, Images):
        most = settings.max_tokens and max(1, settings.max_tokens // pair.context)
        pixels = pair.reader.pixels(source, most)
        found = image_comparison(pair.model, pair.reference, pixels, progress=report)
        return found.quality(**facts)
    window = window_of(pair.reference, settings.window)
    if pair.causal:
        return _language_quality(pair, source, facts, settings, report, window=window)
    cosines = embedding_cosines(
        pair.model,
        pair.reference,
        pair.reader,
        _sentences(source, settings.max_tokens),
        max_length=min(window, MAX_SENTENCE),
        progress=report,
    )
    return EmbeddingQuality(
        **facts,
        sentences=len(cosines),
        cosine=math.fsum(cosines) / len(cosines),
        least_cosine=min(cosines),
    )


def _language_quality(
    pair: Pair,
    source: Text,
    facts: dict[str, Any],
    settings: VerifySettings,
    progress: Progress,
    *,
    window: int,
) -> LanguageQuality:
    stream, _ = scored_stream(pair.reader, source, settings.max_tokens)
    known = pair.remembered
    found = text_comparison(
        pair.model,
        pair.reference if known is None else known.logits[source.sha256],
        stream,
        window=window,
        stride=settings.stride,
        progress=progress,
    )

    def perplexity(nll: float) -> float | None:
        return math.exp(nll) if nll < 709 else None

    return LanguageQuality(
        **facts,
        tokens=found.tokens,
        window=found.window,
        stride=found.stride,
        perplexity=perplexity(found.nll),
        dense_perplexity=perplexity(found.reference_nll),
        ratio=found.ratio if math.isfinite(found.ratio) else None,
        nll=found.nll,
        dense_nll=found.reference_nll,
        top_agreement=found.top_agreement,
        kl=found.kl,
        by_position=found.drift,
        windows=Windows(
            count=len(found.window_kl),
            broken=sum(kl > BROKEN for kl in found.window_kl),
            worst_kl=max(found.window_kl),
        ),
    )


def _sentences(source: Text, most: int | None) -> list[str]:
    """Lines of at least three words, until they have `most` words in all."""
    lines = (line.strip() for document in source.documents for line in document.splitlines())
    found, words = [], 0
    for line in lines:
        if len(line.split()) < 3:
            continue
        found.append(line)
        words += len(line.split())
        if most is not None and words >= most:
            break
    if not found:
        raise HeadwiseError(
            f"{source.source} has no line of three words or more, which sentence embeddings are "
            "compared on; give another text."
        )
    return found


def _size_changes(pair: Pair, sources: tuple[Source, Source]) -> SizeChanges:
    plans = [source.plan for source in sources]
    counts = [counted(source) for source in sources]
    own, dense = (cost(plan) for plan in plans)

    def change(name: str) -> SizeChange:
        cut, whole = (getattr(one, name) for one in counts)
        return SizeChange(
            dense=whole,
            cut=cut,
            share=cut / whole,
            dense_plan=getattr(dense, name),
            cut_plan=getattr(own, name),
        )

    cache = None
    if pair.causal:
        # A plan counts in the checkpoint's number format, the cache in the one it runs with.
        bytes_per_number = int(pair.model.dtype.itemsize)
        planned = [
            one.kv_bytes // plan.shape.kv_dtype_bytes * bytes_per_number
            for one, plan in zip((own, dense), plans, strict=True)
        ]
        known = pair.remembered
        whole = cache_bytes(pair.reference) if known is None else known.cache_bytes
        cut = cache_bytes(pair.model)
        cache = CacheChange(
            dense=whole,
            cut=cut,
            share=cut / whole,
            dense_plan=planned[1],
            cut_plan=planned[0],
            bytes_per_number=bytes_per_number,
        )
    return SizeChanges(attn_params=change("attn_params"), params=change("params"), kv_bytes=cache)


def _workloads(pair: Pair, per_token: int, settings: VerifySettings) -> tuple[Workload, ...]:
    """The timed points; `per_token` are the dense model's cache bytes per token."""
    if pair.causal:
        return speed_points(
            prompt=settings.prompt,
            decode_after=settings.decode_after,
            context=model_context(pair.reference),
            weight_bytes=_weight_bytes(pair, pair.reference),
            token_bytes=per_token,
        )
    length = settings.prompt
    if pair.kind == "image":
        length = pair.context
    elif (context := model_context(pair.reference)) is not None:
        length = min(length, context)
    return (Workload("prefill", 1, length, 0),)


def _speed_changes(pair: Pair, size: SizeChanges, settings: VerifySettings) -> SpeedChanges | None:
    """The speeds at every point that memory and time allow; None if there is none."""
    per_token = size.kv_bytes.dense if size.kv_bytes else 0
    found: list[SpeedPoint] = []
    left_out: list[str] = []
    for point in _workloads(pair, per_token, settings):
        rates = _rates(pair, point, settings)
        if isinstance(rates, str):
            left_out.append(rates)
            continue
        cut, dense, *same_code = rates.rates
        weights = _weight_bytes(pair, pair.reference)
        cached = point.batch * point.context * per_token / weights if point.new_tokens else None
        found.append(
            SpeedPoint(
                dense=dense,
                cut=cut,
                ratio=cut.median / dense.median,
                point=point.name,
                batch=point.batch,
                context=point.context,
                repeats=rates.repeats,
                cache_to_weights=cached,
                same_code=same_code[0] if same_code else None,
                peak=_peak(pair, point) if point.served else None,
            )
        )
    if not found:
        return None
    return SpeedChanges(seconds=settings.seconds, points=tuple(found), left_out=tuple(left_out))


def _rates(pair: Pair, point: Workload, settings: VerifySettings) -> Timed | str:
    """The rates of the cut model, the dense one and, with many sequences, the same-code one."""
    inputs = {PIXELS: _noise(pair)} if pair.kind == "image" else None
    how: dict[str, Any] = {
        "repeats": settings.repeats,
        "seconds": settings.seconds,
        "inputs": inputs,
    }
    known = pair.remembered
    if known is None:
        same_code = [_same_code(pair.reference)] if point.served else []
        return timed_point((pair.model, pair.reference, *same_code), point, **how)
    if point.served:
        return f"{point.name} was skipped: only one of the two models fits in memory."
    cut, dense = timed_point((pair.model,), point, **how), known.speed[point.name]
    if isinstance(cut, str) or isinstance(dense, str):
        return cut if isinstance(cut, str) else str(dense)
    rates: tuple[Rate, ...] = (*cut.rates, *dense.rates)
    return Timed(rates, min(cut.repeats, dense.repeats))


def _same_code(reference: Any) -> Any:
    """The dense model with headwise's attention; its weights are shared, not copied."""
    from headwise.models.build import convert
    from headwise.models.modeling_headwise import HeadwisePreTrainedModel

    if isinstance(reference, HeadwisePreTrainedModel):
        return reference
    model: Any = convert(reference, weights="share")
    return model.eval()


def _peak(pair: Pair, point: Workload) -> Peak:
    dense, cut = (
        _weight_bytes(pair, one) + decoding_bytes(one, point)
        for one in (pair.reference, pair.model)
    )
    return Peak(dense=dense, cut=cut)


def _weight_bytes(pair: Pair, model: Any) -> int:
    """Bytes of a model's weights in the dtype it runs in; a freed model has none of its own."""
    count: int = sum(p.numel() for p in model.parameters())
    return int(pair.model.dtype.itemsize) * count


def _fits(pair: Pair, sources: tuple[Source, Source], settings: VerifySettings) -> Fits:
    memory = parse_bytes(settings.memory)
    cut, dense = (
        sequences_that_fit(
            memory,
            _weight_bytes(pair, one),
            sequence_bytes(source.plan, pair.context, int(pair.model.dtype.itemsize)),
        )
        for one, source in zip((pair.model, pair.reference), sources, strict=True)
    )
    return Fits(memory=memory, context=pair.context, dense=dense, cut=cut)


def _tasks(
    pair: Pair, asked: Sequence[TaskQuestions], progress: Progress
) -> tuple[TaskResult, ...]:
    known = pair.remembered
    dense = (
        answer_tasks(pair.reference, pair.reader, asked, progress)
        if known is None
        else known.answers
    )
    return task_results(asked, answer_tasks(pair.model, pair.reader, asked, progress), dense)


def _prompts(pair: Pair, most: int) -> tuple[str, ...]:
    """The first prompts that fit the context."""
    if not pair.causal:
        return ()
    context = model_context(pair.reference) or math.inf
    return tuple(p for p in PROMPTS[:most] if _length(pair.reader, p) < context)


def _length(tokenizer: Any, prompt: str) -> int:
    return len(token_ids(tokenizer, prompt)) + 1


def _written(model: Any, tokenizer: Any, prompt: str) -> str:
    room = (model_context(model) or math.inf) - _length(tokenizer, prompt)
    most = int(min(room, SAMPLE_TOKENS))
    return continuation(model, tokenizer, prompt, max_new_tokens=most, temperature=0).text


def _samples(pair: Pair, most: int) -> tuple[Sample, ...]:
    prompts, known = _prompts(pair, most), pair.remembered
    dense = (
        [_written(pair.reference, pair.reader, p) for p in prompts]
        if known is None
        else known.written
    )
    return tuple(
        Sample(prompt=p, dense=before, cut=_written(pair.model, pair.reader, p))
        for p, before in zip(prompts, dense, strict=True)
    )


def _noise(pair: Pair) -> Any:
    """A random image; its content does not affect the time."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn((1, *pair.reader.shape), generator=generator).to(pair.model.dtype)


def _text_warnings(
    model: str, kind: str, texts: Sequence[Quality], *, known: bool
) -> Iterator[str]:
    for text in texts:
        if text.is_calibration_text:
            yield (
                f"{text.source} is the {text.what} the model was calibrated on, so its figures "
                f"flatter the cut; measure on {text.what} it has not seen."
            )
        if isinstance(text, LanguageQuality) and text.windows.broken:
            yield (
                f"{text.windows.broken} of {text.windows.count} windows of {text.source} break: "
                f"the predictions there have little to do with the dense model's (divergence up "
                f"to {text.windows.worst_kl:.1f} nats per token). Keep more, or recover."
            )
    if not known:
        what = "images" if kind == "image" else "text"
        yield (
            f"{model} does not say which {what} it was calibrated on; make sure that it was not "
            "one of these."
        )


def _size_warnings(size: SizeChanges) -> Iterator[str]:
    for name, change in size.items():
        for which, count, planned in (
            ("dense", change.dense, change.dense_plan),
            ("cut", change.cut, change.cut_plan),
        ):
            if count != planned:
                yield (
                    f"The {which} model has {count:,} {SIZE_NAMES[name]}, but its plan says "
                    f"{planned:,}."
                )
