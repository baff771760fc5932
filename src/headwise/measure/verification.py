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
from headwise.data.images import PIXELS, Images
from headwise.data.pixels import ImageReader
from headwise.data.text import Text, read_source
from headwise.devices import Dtype, chosen_device
from headwise.errors import HeadwiseError
from headwise.measure.comparison import embedding_cosines, image_comparison, text_comparison
from headwise.measure.likelihood import DEFAULT_WINDOW, model_context, scored_stream, window_of
from headwise.measure.record import (
    SIZE_NAMES,
    CacheChange,
    EmbeddingQuality,
    LanguageQuality,
    Quality,
    Rate,
    RateChange,
    SizeChange,
    SizeChanges,
    SpeedChanges,
    Targets,
    Verification,
    Windows,
)
from headwise.measure.size import cache_bytes, counted
from headwise.measure.speed import Speed, speeds
from headwise.measure.stored_logits import StoredLogits
from headwise.memory import NUMBER, verify_need
from headwise.models.record import CUT_RECORD, read_cut_record
from headwise.planning.cost import cost
from headwise.progress import Progress, note, silent
from headwise.source import AnyModel, Kind, Source, open_source, refuse_other_kind

if TYPE_CHECKING:
    from headwise.source import Reader

BROKEN = 2.0  # mean KL of a window, in nats per token, above which it counts as broken
_KINDS = {"causal": "a causal model", "encoder": "an encoder", "image": "an image model"}
MAX_SENTENCE = 128  # tokens of a sentence that encoders are compared on


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """How to measure; the defaults take seconds for a small model."""

    window: int | None = None  # default: the context, at most 1024
    stride: int | None = None  # default: the window
    max_tokens: int | None = None
    tokenizer: str | None = None
    device: str = "auto"
    dtype: Dtype = "auto"
    trust_remote_code: bool = False
    prompt: int = 128
    new_tokens: int = 16
    repeats: int = 5  # of the timings; 0 leaves them out


def verify(
    cut: AnyModel,
    against: AnyModel,
    texts: str | Text | Images | Sequence[str | Text | Images],
    settings: VerifySettings | None = None,
    *,
    targets: Targets | None = None,
    progress: Progress = silent,
) -> Verification:
    """Measure a cut model against the model it was cut from.

    The first text (or set of images) is of the kind the model was calibrated on; the others show
    what the cut costs elsewhere. A missed target is not an error: see `met` and `targets`.
    """
    settings, targets = settings or VerifySettings(), targets or Targets()
    given = [texts] if isinstance(texts, str | Text | Images) else list(texts)
    if not given:
        raise HeadwiseError("a verification needs at least one text or set of images; give one.")
    sources = [read_source(text) if isinstance(text, str) else text for text in given]
    model, reference = (
        open_source(one, tokenizer=settings.tokenizer, trust_remote_code=settings.trust_remote_code)
        for one in (cut, against)
    )
    seen = seen_texts(model.folder)
    task = _common_task(model, reference, sources)
    targets.check(reference.kind)
    with TemporaryDirectory(prefix="headwise-") as spare:
        if _fit_together((model, reference), settings, progress):
            pair = _load_pair(model, reference, task, settings)
        else:
            note(progress, "Memory is short: one model at a time.")
            pair = _load_in_turns(model, reference, task, sources, settings, spare=Path(spare))
        return _verification(
            pair,
            (model, reference),
            sources,
            settings,
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
            "role": "other text" if i else "calibration domain",
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
        speed=_speed_changes(pair, settings) if settings.repeats else None,
        targets=judged,
        met=all(target.met for target in judged),
        warnings=(*warnings, *_size_warnings(size)),
        device=pair.model.device.type,
        dtype=str(pair.model.dtype).removeprefix("torch."),
        versions=dict(artifacts.versions(("headwise", "torch", "transformers"))),
    )


def _fit_together(
    sources: tuple[Source, Source], settings: VerifySettings, progress: Progress
) -> bool:
    """Whether there is memory for both models; raises if there is not even for one.

    Reports the peak to come. Only causal models can be compared one at a time.
    """
    if None in {one.folder for one in sources} or chosen_device(settings.device) != "cpu":
        return True
    model, reference = (one.plan for one in sources)
    window = settings.window or min(reference.shape.context, DEFAULT_WINDOW)
    number = 2 if settings.dtype == "bf16" else NUMBER
    how: dict[str, Any] = {"tokens": window, "most": settings.max_tokens, "number": number}
    need = verify_need((model, reference), **how)
    together = need.fits or sources[1].kind != "causal"
    if not together:
        need = verify_need((model, reference), in_turns=True, **how)
    need.check(progress, advice="use a smaller --window, or --dtype bf16")
    return together


@dataclass(frozen=True, slots=True)
class Remembered:
    """What the source said before it made room for the model."""

    cache_bytes: int
    speed: Speed | None
    logits: Mapping[str, StoredLogits]  # by the text's SHA-256


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
    """What both models can be loaded for; `texts` must be what they read."""
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
    spare: Path,
) -> Pair:
    """First the source, whose predictions go to the folder `spare`, then the model alone."""
    dense = reference.load(task, device=settings.device, dtype=settings.dtype)
    logits: dict[str, StoredLogits] = {}
    window = window_of(dense, settings.window)
    for i, text in enumerate(texts):
        assert isinstance(text, Text)
        stream, _ = scored_stream(reference.tokenizer, text, settings.max_tokens)
        logits[text.sha256] = StoredLogits.of(
            dense, stream, spare / f"{i}", window=window, stride=settings.stride
        )
    speed = None
    if settings.repeats:
        prompt, new = _prompt(dense, settings), settings.new_tokens
        (speed,) = speeds((dense,), prompt=prompt, new_tokens=new, repeats=settings.repeats)
    remembered = Remembered(cache_bytes(dense), speed, logits)
    dense = None
    gc.collect()
    own = model.load(task, device=settings.device, dtype=settings.dtype)
    empty, context = reference.empty(task), reference.plan.shape.context
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
    """The SHA-256 of all texts and images a model was made with; empty if it does not say."""
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


def _speed_changes(pair: Pair, settings: VerifySettings) -> SpeedChanges:
    new, inputs = settings.new_tokens if pair.causal else 0, None
    if pair.kind == "image":
        inputs = {PIXELS: _noise(pair)}
        prompt = pair.context
    else:
        prompt = _prompt(pair.reference, settings, new)
    known = pair.remembered
    timed = (pair.model, pair.reference) if known is None else (pair.model,)
    cut, *others = speeds(
        timed, prompt=prompt, new_tokens=new, repeats=settings.repeats, inputs=inputs
    )
    if known is not None and known.speed is not None:
        others = [known.speed]
    (dense,) = others

    def change(cut: Rate, dense: Rate) -> RateChange:
        return RateChange(dense=dense, cut=cut, ratio=cut.median / dense.median)

    return SpeedChanges(
        prompt=prompt,
        new_tokens=new,
        repeats=settings.repeats,
        prefill=change(cut.prefill, dense.prefill),
        decode=change(cut.decode, dense.decode) if cut.decode and dense.decode else None,
    )


def _prompt(model: Any, settings: VerifySettings, new: int | None = None) -> int:
    """Tokens of the prompt that is timed: with the new ones they must fit the context."""
    context = model_context(model)
    more = settings.new_tokens if new is None else new
    return settings.prompt if context is None else min(settings.prompt, context - more)


def _noise(pair: Pair) -> Any:
    """A random image: what it shows does not change how long it takes."""
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
                    f"The {which} model has {count:,} {SIZE_NAMES[name]} by count, but {planned:,} "
                    "by its plan."
                )
