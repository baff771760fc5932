"""The proof beside a cut model: quality, size and speed against its source, in one document.

Quality is measured on the same windows for both models, size is counted in the files and in a live
cache and set beside what the plan says, speed is taken in turns. Nothing is printed here; the
document is JSON-ready.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise import artifacts
from headwise.data.images import PIXELS, Images
from headwise.data.text import Text, read_source
from headwise.devices import Dtype
from headwise.errors import HeadwiseError
from headwise.measure.comparison import Comparison, comparison, embedding_cosines
from headwise.measure.images import image_comparison
from headwise.measure.likelihood import DEFAULT_WINDOW, scored_stream
from headwise.measure.loading import model_context
from headwise.measure.pairs import Pair, loaded_pair
from headwise.measure.size import Counted, cache_bytes, counted, plan_in
from headwise.measure.speed import speeds
from headwise.nn.checkpoint import Checkpoint
from headwise.nn.sources import local_folder
from headwise.plan import Cost
from headwise.planning.cost import cost

VERIFY_FORMAT = "headwise-verify/1"
Progress = Callable[[str, int, int], None]  # what, done, in all


BROKEN = 2.0  # nats per token between a window's predictions: as good as another model's


@dataclass(frozen=True, slots=True)
class Settings:
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


def verification(
    out: str,
    against: str,
    texts: Sequence[str | Text | Images],
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure `out` against `against`; the first text is of the domain it was calibrated on."""
    settings = settings or Settings()
    sources = [read_source(text) if isinstance(text, str) else text for text in texts]
    folders = local_folder(out), local_folder(against)
    files = Checkpoint.open(folders[0]), Checkpoint.open(folders[1])
    pair = loaded_pair(folders, files, sources, settings)
    used = calibration_hashes(folders[0])
    measured = [_quality(pair, source, settings, progress) for source in sources]
    document: dict[str, Any] = {"format": VERIFY_FORMAT, "model": out, "against": against}
    document["kind"] = pair.kind
    document["texts"] = [
        {
            "source": source.source,
            "sha256": source.sha256,
            "role": "other text" if i else "calibration domain",
            "is_calibration_text": source.sha256 in used,
            **found,
        }
        for i, (source, found) in enumerate(zip(sources, measured, strict=True))
    ]
    document["size"] = _sizes(pair, files)
    document["speed"] = _speeds(pair, settings)
    document["warnings"] = list(_warnings(document, known=bool(used)))
    document["device"] = pair.model.device.type
    document["dtype"] = str(pair.model.dtype).removeprefix("torch.")
    document["versions"] = dict(artifacts.versions(("headwise", "torch", "transformers")))
    return document


def calibration_hashes(folder: Path) -> frozenset[str]:
    """The SHA-256 of all texts and images that a headwise.json says its model was made with."""
    try:
        record = json.loads((folder / "headwise.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(_hashes(record))


def _hashes(record: Any) -> Iterator[str]:
    if isinstance(record, dict):
        for key, value in record.items():
            if key in {"text_sha256", "images_sha256"} and isinstance(value, str):
                yield value
            else:
                yield from _hashes(value)
    elif isinstance(record, list):
        for value in record:
            yield from _hashes(value)


def _quality(
    pair: Pair, source: Text | Images, settings: Settings, progress: Progress | None
) -> dict[str, Any]:
    def tick(done: int, total: int) -> None:
        if progress is not None:
            progress(source.source, done, total)

    if isinstance(source, Images):
        most = settings.max_tokens and max(1, settings.max_tokens // pair.context)
        pixels = pair.reader.pixels(source, most)
        return image_comparison(pair.model, pair.reference, pixels, tick=tick).to_dict()
    return _text(pair, source, settings, tick)


def _text(
    pair: Pair, source: Text, settings: Settings, tick: Callable[[int, int], None]
) -> dict[str, Any]:
    context = model_context(pair.reference)
    window = settings.window or min(context or DEFAULT_WINDOW, DEFAULT_WINDOW)
    if context is not None and window > context:
        raise HeadwiseError(
            f"window must be at most the model's context of {context} tokens, got {window}."
        )
    if pair.causal:
        stream, _ = scored_stream(pair.reader, source, settings.max_tokens)
        found = comparison(
            pair.model,
            pair.reference,
            stream,
            window=window,
            stride=settings.stride,
            tick=tick,
        )
        return _language(found)
    sentences = _sentences(source, settings.max_tokens)
    cosines = embedding_cosines(
        pair.model,
        pair.reference,
        pair.reader,
        sentences,
        max_length=min(window, 128),
        tick=tick,
    )
    return {
        "sentences": len(cosines),
        "cosine": math.fsum(cosines) / len(cosines),
        "least_cosine": min(cosines),
    }


def _language(found: Comparison) -> dict[str, Any]:
    def perplexity(nll: float) -> float | None:
        return math.exp(nll) if nll < 709 else None

    return {
        "tokens": found.tokens,
        "window": found.window,
        "stride": found.stride,
        "perplexity": perplexity(found.nll),
        "dense_perplexity": perplexity(found.reference_nll),
        "ratio": found.ratio if math.isfinite(found.ratio) else None,
        "nll": found.nll,
        "dense_nll": found.reference_nll,
        "top_agreement": found.top_agreement,
        "kl": found.kl,
        "by_position": [asdict(one) for one in found.drift],
        "windows": {
            "count": len(found.window_kl),
            "broken": sum(kl > BROKEN for kl in found.window_kl),
            "worst_kl": max(found.window_kl),
        },
    }


def _sentences(source: Text, most: int | None) -> list[str]:
    """Lines with at least a few words; `most` words in all."""
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


def _sizes(pair: Pair, files: tuple[Checkpoint, Checkpoint]) -> dict[str, Any]:
    plans = [plan_in(one) for one in files]
    counts: list[Counted] = [counted(one) for one in files]
    costs: list[Cost] = [cost(plan) for plan in plans]
    found: dict[str, Any] = {}
    for name in ("attn_params", "total_params"):
        own, dense = (getattr(one, name) for one in counts)
        found[name] = {
            "dense": dense,
            "cut": own,
            "share": own / dense,
            "dense_plan": getattr(costs[1], name),
            "cut_plan": getattr(costs[0], name),
        }
    if pair.causal:
        own, dense = cache_bytes(pair.model), cache_bytes(pair.reference)
        found["kv_bytes"] = {
            "dense": dense,
            "cut": own,
            "share": own / dense,
            # The plan counts in the checkpoint's numbers, the cache in those it runs with.
            "dense_plan": _running(costs[1], plans[1].shape.kv_dtype_bytes, pair),
            "cut_plan": _running(costs[0], plans[0].shape.kv_dtype_bytes, pair),
            "bytes_per_number": pair.model.dtype.itemsize,
        }
    return found


def _running(planned: Cost, kv_dtype_bytes: int, pair: Pair) -> int:
    return planned.kv_bytes // kv_dtype_bytes * int(pair.model.dtype.itemsize)


def _speeds(pair: Pair, settings: Settings) -> dict[str, Any] | None:
    if not settings.repeats:
        return None
    new, inputs = settings.new_tokens if pair.causal else 0, None
    if pair.kind == "image":
        inputs = {PIXELS: _noise(pair)}
        prompt = pair.context
    else:
        context = model_context(pair.reference)
        prompt = settings.prompt if context is None else min(settings.prompt, context - new)
    own, dense = speeds(
        (pair.model, pair.reference),
        prompt=prompt,
        new_tokens=new,
        repeats=settings.repeats,
        inputs=inputs,
    )
    found: dict[str, Any] = {"prompt": prompt, "new_tokens": new, "repeats": settings.repeats}
    for name in ("prefill", "decode") if new else ("prefill",):
        cut, whole = getattr(own, name), getattr(dense, name)
        found[name] = {
            "dense": asdict(whole),
            "cut": asdict(cut),
            "ratio": cut.median / whole.median,
        }
    return found


def _noise(pair: Pair) -> Any:
    """One image that nobody took: its content does not change the time it takes."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn((1, *pair.reader.shape), generator=generator).to(pair.model.dtype)


def _warnings(document: dict[str, Any], *, known: bool) -> Iterator[str]:
    for text in document["texts"]:
        if text["is_calibration_text"]:
            what = "images" if "images" in text else "text"
            yield (
                f"{text['source']} is the {what} the model was calibrated on, so its figures "
                f"flatter the cut; measure on {what} it has not seen."
            )
        windows = text.get("windows") or {"broken": 0}
        if windows["broken"]:
            yield (
                f"{windows['broken']} of {windows['count']} windows of {text['source']} break: "
                f"the predictions there have little to do with the dense model's (divergence up "
                f"to {windows['worst_kl']:.1f} nats per token). Keep more, or recover."
            )
    if not known:
        what = "images" if document["kind"] == "image" else "text"
        yield (
            f"{document['model']} does not say which {what} it was calibrated on; make sure that "
            "it was not one of these."
        )
    for name, size in document["size"].items():
        for which in ("dense", "cut"):
            if size[which] != size[f"{which}_plan"]:
                yield (
                    f"the {which} model has {size[which]} {name} by count and "
                    f"{size[f'{which}_plan']} by its plan."
                )
