"""verify.json: what a cut model lost and saved against its source, and which targets it met.

    Verification ─┬─ texts      quality on every text, or set of images
                  │               LanguageQuality    causal models: perplexity, agreement, KL
                  │               EmbeddingQuality   encoders: cosine between embeddings
                  │               ImageQuality       image models: cosine, classes
                  ├─ size       parameters and cached bytes, counted and by the plan
                  ├─ speed      tokens per second at several points, before and after
                  ├─ fits       how many sequences fit a stated memory
                  ├─ tasks      accuracy on questions, paired question by question
                  ├─ samples    what both models write after the same prompts
                  ├─ targets    limits on the figures, and whether they were met
                  └─ warnings   caveats for the reader

Figures are finite; an infinite one (a perplexity above e^709) is None.

The settings of a verification are here too, with the defaults of the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from headwise.devices import Dtype
from headwise.errors import HeadwiseError
from headwise.plan import Limit
from headwise.records import Frozen, Record, read_record


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
    prompt: int = 512  # tokens read at once where the speed is measured
    decode_after: int = 128  # tokens before those that one sequence decodes
    repeats: int = 5  # of the timings; 0 leaves them out
    seconds: float = 60.0  # the most that one point of the timings takes
    memory: str = "24GiB"  # in which sequences are to fit: a common graphics card's
    tasks: tuple[str, ...] = ()
    task_data: str | None = None  # a folder of .jsonl files; default: lm-eval's own data
    task_limit: int | None = None
    samples: int = 3  # prompts that both models continue


VERIFY_RECORD = "verify.json"
Kind = Literal["causal", "encoder", "image"]
Role = Literal["calibration domain", "other text"]


class Drift(Frozen):
    """Mean KL of the predictions made after `first … last` tokens."""

    first: int
    last: int
    tokens: int
    kl: float


class Windows(Frozen):
    """The windows of a text: their number, how many broke, and the worst one's mean KL."""

    count: int
    broken: int
    worst_kl: float


class Measured(Frozen):
    """A text, or a set of images, that both models were measured on."""

    source: str
    sha256: str
    role: Role
    is_calibration_text: bool

    @property
    def what(self) -> str:
        """What it is: text or images."""
        return "text"


class LanguageQuality(Measured):
    """Two causal models on the same windows of a text."""

    kind: Literal["causal"] = "causal"
    tokens: int
    window: int
    stride: int
    perplexity: float | None
    dense_perplexity: float | None
    ratio: float | None  # perplexity ÷ dense
    nll: float  # nats per token
    dense_nll: float
    top_agreement: float
    kl: float
    by_position: Annotated[tuple[Drift, ...], Field(min_length=1)]
    windows: Windows


class EmbeddingQuality(Measured):
    """Two encoders on the same sentences."""

    kind: Literal["encoder"] = "encoder"
    sentences: int
    cosine: float
    least_cosine: float


class ImageQuality(Measured):
    """Two image models on the same images; the last two figures need classes."""

    kind: Literal["image"] = "image"
    images: int
    cosine: float
    least_cosine: float
    top_agreement: float | None = None
    kl: float | None = None

    @property
    def what(self) -> str:
        """What it is: text or images."""
        return "images"


Quality = LanguageQuality | EmbeddingQuality | ImageQuality
_Tagged = Annotated[Quality, Field(discriminator="kind")]


class SizeChange(Frozen):
    """A count before and after the cut, in the files (or a live cache) and by the plans."""

    dense: Annotated[int, Field(gt=0)]
    cut: int
    share: float
    dense_plan: int
    cut_plan: int


class CacheChange(SizeChange):
    """Cache bytes of one token; a plan is counted in the dtype that the model ran in."""

    bytes_per_number: int


class SizeChanges(Frozen):
    """Sizes of the model; only causal models have a cache."""

    attn_params: SizeChange
    params: SizeChange
    kv_bytes: CacheChange | None = None

    def items(self) -> Iterator[tuple[SizeName, SizeChange]]:
        """What was counted, with its name."""
        for name in SIZE_NAMES:
            found: SizeChange | None = getattr(self, name)
            if found is not None:
                yield name, found


SizeName = Literal["attn_params", "params", "kv_bytes"]
SIZE_NAMES: dict[SizeName, str] = {
    "attn_params": "attention parameters",
    "params": "parameters",
    "kv_bytes": "cached bytes per token",
}


class Rate(Frozen):
    """Tokens per second: the median, the slowest and the fastest repetition."""

    median: Annotated[float, Field(gt=0)]
    low: float
    high: float


class RateChange(Frozen):
    """A speed before and after the cut."""

    dense: Rate
    cut: Rate
    ratio: float

    @property
    def direction(self) -> Literal["faster", "slower", "within the spread"]:
        """Faster or slower, or within the spread if the repetitions of the two models overlap."""
        if self.cut.low > self.dense.high:
            return "faster"
        return "slower" if self.cut.high < self.dense.low else "within the spread"


PointName = Literal["prefill", "decode", "serving", "serving, longer"]


class Peak(Frozen):
    """Peak bytes while a token is decoded: weights, cache and working memory."""

    dense: int
    cut: int


class SpeedPoint(RateChange):
    """The speed at one point: `batch` sequences of `context` tokens.

    A prompt is read in one pass; elsewhere one more token of each sequence is decoded, with a
    growing cache. `cache_to_weights` is the size of the dense model's cache ÷ that of its weights.
    """

    point: PointName
    batch: int
    context: int
    repeats: int
    cache_to_weights: float | None = None
    # The dense model with the attention code of the cut one: what the smaller cache alone brings.
    same_code: Rate | None = None
    peak: Peak | None = None

    @property
    def title(self) -> str:
        """The point in words."""
        if self.point == "prefill":
            return f"prefill of {self.context:,} tokens"
        several = f"{self.batch} × " if self.batch > 1 else ""
        return f"decode after {several}{self.context:,} tokens"

    @property
    def same_code_ratio(self) -> float | None:
        """The cut model's speed ÷ the dense model's, both with the same attention code."""
        return None if self.same_code is None else self.cut.median / self.same_code.median


class SpeedChanges(Frozen):
    """Tokens per second at every timed point, and why the others were skipped."""

    seconds: float  # the most that one point was given
    points: Annotated[tuple[SpeedPoint, ...], Field(min_length=1)]
    left_out: tuple[str, ...] = ()

    @property
    def prefill(self) -> SpeedPoint | None:
        """Reading a prompt."""
        return self.at("prefill")

    @property
    def decode(self) -> SpeedPoint | None:
        """Writing one sequence."""
        return self.at("decode")

    @property
    def serving(self) -> SpeedPoint | None:
        """Writing many sequences, at the timed point with the largest cache."""
        return self.at("serving, longer") or self.at("serving")

    def at(self, name: PointName) -> SpeedPoint | None:
        """The point of that name, if it was timed."""
        return next((p for p in self.points if p.point == name), None)


class Fits(Frozen):
    """How many sequences of `context` tokens fit `memory` bytes in addition to the weights."""

    memory: int
    context: int
    dense: int
    cut: int


class TaskResult(Frozen):
    """A task answered by both models, the difference paired question by question."""

    name: str
    source: str  # the file of the questions, or lm-eval's own data
    metric: str
    questions: Annotated[int, Field(ge=2)]
    dense: float
    dense_stderr: float
    cut: float
    cut_stderr: float
    difference: float  # cut − dense
    difference_stderr: float  # of the paired differences
    gained: int | None  # questions that only the cut model answers right; None: a likeness
    lost: int | None  # that only the dense model does


class Sample(Frozen):
    """What both models write after a prompt, with greedy decoding."""

    prompt: str
    dense: str
    cut: str

    @property
    def same(self) -> bool:
        """Whether they wrote the same."""
        return self.dense == self.cut


class TargetResult(Frozen):
    """The limit on one figure, and what was measured; `name` is a field of Targets."""

    name: str
    limit: float
    found: float | None  # None: infinite
    met: bool

    @property
    def option(self) -> str:
        """The target as the command line spells it."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def sentence(self) -> str:
        """The limit and what was measured."""
        bound = "at least" if self.name.startswith("min_") else "at most"
        found = "infinite" if self.found is None else _plain(self.found)
        return f"{self.option} must be {bound} {_plain(self.limit)}, but is {found}."


class Verification(Record):
    """The content of verify.json."""

    format: Literal["headwise-verify/3"] = "headwise-verify/3"
    model: str
    against: str
    kind: Kind
    texts: Annotated[tuple[_Tagged, ...], Field(min_length=1)]
    size: SizeChanges
    speed: SpeedChanges | None = None  # None: it was not timed
    fits: Fits | None = None  # causal models
    tasks: tuple[TaskResult, ...] = ()
    samples: tuple[Sample, ...] = ()
    targets: tuple[TargetResult, ...] = ()
    met: bool = True  # every target
    warnings: tuple[str, ...] = ()
    device: str
    dtype: str
    versions: dict[str, str] = Field(default_factory=dict)


def read_verification(folder: Path) -> Verification | None:
    """The verification in a model's folder, if there is one."""
    path = folder / VERIFY_RECORD
    if not path.exists():
        return None
    return read_record(path, Verification, advice="run `headwise verify` again")


@dataclass(frozen=True, slots=True)
class Targets:
    """Limits that a cut model must meet; None: no limit."""

    max_ratio: float | None = None  # perplexity ÷ dense on every text of the calibration domain
    max_other_ratio: float | None = None  # the same on every other text
    min_agreement: float | None = None  # of the top token, or of the top class
    min_cosine: float | None = None  # mean over the sentences or images
    max_attn_params: Limit | None = None
    max_params: Limit | None = None
    max_kv_bytes: Limit | None = None

    def check(self, kind: Kind) -> None:
        """Refuse a target that models of this kind have no figure for."""
        for field in fields(self):
            if getattr(self, field.name) is not None and kind not in _KINDS[field.name]:
                raise _no_target(field.name, kind)

    def judge(self, texts: Sequence[Quality], size: SizeChanges) -> tuple[TargetResult, ...]:
        """Compare each limit with the measured figure."""
        found: list[TargetResult] = []
        own = [text for text in texts if text.role == "calibration domain"]
        others = [text for text in texts if text.role == "other text"]
        for name, figure, judged in (
            ("max_ratio", "ratio", own),
            ("max_other_ratio", "ratio", others),
            ("min_agreement", "top_agreement", own),
            ("min_cosine", "cosine", own),
        ):
            limit: float | None = getattr(self, name)
            if limit is None:
                continue
            for text in judged:
                value: float | None = getattr(text, figure)
                if value is None and isinstance(text, ImageQuality):  # a model without classes
                    raise _no_target(name, text.kind)
                found.append(_result(name, limit, value))
        for which, change in size.items():
            most: Limit | None = getattr(self, f"max_{which}")
            if most is not None:
                # The 1e-6 forgives the float product (0.29 · 100 = 28.999999999999996).
                amount = most.amount or int((most.share or 0) * change.dense + 1e-6)
                found.append(_result(f"max_{which}", float(amount), float(change.cut)))
        return tuple(found)


_KINDS: dict[str, tuple[Kind, ...]] = {  # the models that have a figure for each target
    "max_ratio": ("causal",),
    "max_other_ratio": ("causal",),
    "min_agreement": ("causal", "image"),
    "min_cosine": ("encoder", "image"),
    "max_attn_params": ("causal", "encoder", "image"),
    "max_params": ("causal", "encoder", "image"),
    "max_kv_bytes": ("causal",),
}


def _no_target(name: str, kind: Kind) -> HeadwiseError:
    option = f"--{name.replace('_', '-')}"
    return HeadwiseError(f"{option} is not a target for {kind} models; leave it out.")


def _result(name: str, limit: float, found: float | None) -> TargetResult:
    if found is None:
        return TargetResult(name=name, limit=limit, found=None, met=False)
    met = found >= limit if name.startswith("min_") else found <= limit
    return TargetResult(name=name, limit=limit, found=found, met=met)


def _plain(value: float) -> str:
    """Counts in full, other figures to six digits."""
    return f"{value:,.0f}" if value.is_integer() else f"{value:.6g}"
