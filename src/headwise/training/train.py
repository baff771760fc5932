"""Training from scratch: a plan and a text become a model.

RUN/run.json          settings, text, versions, command, status
    recipe.yaml       the options of the run (`headwise run` starts it again)
    plan.json         the plan, with the vocabulary size the run uses
    tokenizer/        the tokenizer, as Hugging Face writes it
    tokens/           the token streams: train.npy and held-out.npy, with a number for each text
                      where there are several
    metrics.jsonl     one row per step
    checkpoints/      step-00000100/ …, the newest few
    model/            the finished model, for AutoModelForCausalLM or, of an encoder,
                      AutoModelForMaskedLM

A causal plan learns to predict the next token. An encoder is bidirectional and would read the
answer, so it learns to predict masked tokens (`headwise.data.masking`).

The text is read, split, tokenised and stored as tokens once; resuming needs neither the text nor
the plan. A run that was killed, even in its first writes, ends with the same files.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, JsonValue

from headwise.artifacts import atomic_folder, sha256, write_text
from headwise.data.masking import Masking, masking_of
from headwise.data.mixture import Mixture, as_mixture, read_mixture
from headwise.data.text import Split, Text, held_out_split, text_name
from headwise.data.tokens import DEFAULT_VOCAB, load_tokenizer, token_stream, train_tokenizer
from headwise.devices import accelerator, on_main
from headwise.errors import HeadwiseError, OutputError, quoted
from headwise.plan import Origin, Plan
from headwise.progress import Progress, silent
from headwise.records import Frozen, parse_value, read_file
from headwise.runs import RUN, Status, complete, read_run, resume_in_place, update_run
from headwise.training.batches import (
    Batch,
    MaskedBatches,
    held_out_batches,
    masked_held_out,
    masked_token_loss,
    mixed_batches,
    next_token_loss,
)
from headwise.training.checkpoint import RunFolder, StepRecord, read_rows
from headwise.training.loop import (
    DivergenceError,
    Observer,
    TrainingJob,
    check_division,
    train_model,
)
from headwise.training.settings import FREE_ON_RESUME, TrainSettings

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerBase

KIND = "train"
IMAGE_FAMILIES = ("vit",)
_ADVICE = "start again with --force, or give another folder"


class TextInput(Frozen):
    """The texts with their weights, and how much of each is used."""

    sources: tuple[str, ...]
    max_chars: int | None
    sha256: str

    @property
    def source(self) -> str:
        """The texts in one line."""
        return " + ".join(self.sources)


class TokenizerInput(Frozen):
    """Which tokenizer (None: one is trained on the text), and how many tokens it should have."""

    source: str | None
    vocab_size: int | None  # None: the plan's, or the default when the plan has none


class TrainInputs(Frozen):
    """The inputs that determine a run; in run.json under `inputs`."""

    settings: dict[str, JsonValue]
    plan_sha256: str
    text: TextInput
    tokenizer: TokenizerInput


class TextDetails(Frozen):
    """Facts about the texts."""

    documents: int
    characters: int
    skipped_files: int
    split: str
    train_tokens: int = Field(ge=1)
    held_out_tokens: int


class TrainDetails(Frozen):
    """Facts about a run, known once its text is tokenised; in run.json under `details`."""

    text: TextDetails
    special_tokens: dict[str, int | None]
    tokens_sha256: dict[str, str]
    weights: tuple[float, ...] = (1.0,)  # of the texts
    masking: Masking | None = None  # of a model that sees ahead
    last: StepRecord | None = None  # the newest step, when the run has ended
    reason: str | None = None  # why it diverged

    @property
    def objective(self) -> str:
        """What the model predicts."""
        return "the next token" if self.masking is None else "masked tokens"


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended: finished, with a model, or interrupted by a signal and ready to resume."""

    folder: Path
    status: Status
    last: StepRecord | None
    text: TextDetails
    signal: int = 0

    @property
    def model(self) -> Path | None:
        """The folder of the finished model."""
        return RunFolder(self.folder).model if self.status == "finished" else None


def train(
    plan: Plan | Path | str,
    text: Mixture | Text | str | Sequence[str],
    out: Path | str,
    *,
    settings: TrainSettings | None = None,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    max_chars: int | None = None,
    force: bool = False,
    shard: bool = False,
    observer: Observer | None = None,
    progress: Progress = silent,
    beginning: Callable[[Path], None] | None = None,
    command: str = "",
) -> TrainResult:
    """Train the plan's model from scratch on text, or resume the run of the same inputs in `out`.

    `text` is one or several of file, folder, hub:owner/name or builtin:python, each with an
    optional weight (0.5:code.txt); `tokenizer` is a Hugging Face
    folder or a tokenizer.json (default: one is trained on the text, with `vocab_size` tokens). A
    finished run of the same inputs is not changed; one of other inputs is replaced with `force`.
    `beginning` may add files to a new run's folder. Under torchrun all processes call this, and
    all get the result; `shard` then splits the model over them.
    """
    plan = plan if isinstance(plan, Plan) else read_plan(plan)
    if plan.shape.family in IMAGE_FAMILIES:
        raise HeadwiseError(
            f"a {plan.shape.family} model reads images and cannot be trained on a text; give the "
            "plan of a text model."
        )
    text = as_mixture(text, max_chars)
    resolved = (settings or TrainSettings()).on_this_machine(plan.shape.context)
    inputs = TrainInputs(
        settings=resolved.to_dict(),
        plan_sha256=plan_hash(plan),
        text=TextInput(sources=text.names, max_chars=max_chars, sha256=text.sha256),
        tokenizer=TokenizerInput(source=tokenizer, vocab_size=vocab_size),
    )
    request = _Request(Path(out), inputs, plan, text, force, command, beginning, shard)
    return _run(request, observer, progress)


def resume_training(
    out: Path | str,
    settings: Mapping[str, Any] | None = None,
    *,
    plan: Plan | Path | str | None = None,
    text: Sequence[str] = (),
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    max_chars: int | None = None,
    shard: bool = False,
    observer: Observer | None = None,
    progress: Progress = silent,
) -> TrainResult:
    """Resume the run in `out` with the inputs it was started with.

    No other argument is needed. Arguments that are given must agree with the run, except for the
    settings that only change how often it is saved (`save_every`, `keep`).
    """
    out = Path(out)
    if not (out / RUN).is_file():
        raise HeadwiseError(
            f"{out} holds no run to resume; start one with "
            f"`headwise train PLAN --text TEXT -o {out}`."
        )
    found = read_training(out).inputs
    old = TrainSettings.from_dict(found.settings, str(out / RUN))
    new = replace(old, **(settings or {}))
    assert old.context is not None
    given = None if plan is None else plan if isinstance(plan, Plan) else read_plan(plan)
    text_changes = {"sources": tuple(text) or None, "max_chars": max_chars}
    tokenizer_changes = {"source": tokenizer, "vocab_size": vocab_size}
    inputs = TrainInputs(
        settings=new.on_this_machine(old.context).to_dict(),
        plan_sha256=found.plan_sha256 if given is None else plan_hash(given),
        text=found.text.model_copy(update=_given(text_changes)),
        tokenizer=found.tokenizer.model_copy(update=_given(tokenizer_changes)),
    )
    return _run(_Request(out, inputs, given, shard=shard), observer, progress)


def _given(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if value is not None}


def read_plan(path: Path | str) -> Plan:
    """The plan in a file."""
    return Plan.from_json(read_file(Path(path), advice="give the path of a plan"), str(path))


def plan_hash(plan: Plan) -> str:
    """A hash of a plan without its origin."""
    bare = plan.model_copy(update={"origin": Origin()})
    return hashlib.sha256(bare.to_json().encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """The run.json of a training run."""

    status: Status
    command: str
    inputs: TrainInputs
    details: TrainDetails | None  # None before the text is tokenised
    versions: Mapping[str, str]


def read_training(folder: Path) -> TrainingRecord:
    """The record of the run in `folder`."""
    record = read_run(folder)
    if record.kind != KIND:
        raise HeadwiseError(
            f"{folder / RUN} must be of a training run, got {quoted(record.kind)}; give another "
            "folder."
        )
    where = folder / RUN
    inputs = parse_value(record.inputs, TrainInputs, f"`inputs` in {where}", advice=_ADVICE)
    details = None
    if record.details:
        source = f"`details` in {where}"
        details = parse_value(record.details, TrainDetails, source, advice=_ADVICE)
    return TrainingRecord(record.status, record.command, inputs, details, record.versions)


@dataclass(frozen=True, slots=True)
class _Request:
    """A run to start or to resume; without a plan or a text, only to resume."""

    out: Path
    inputs: TrainInputs
    plan: Plan | None = None
    text: Mixture | None = None
    force: bool = False
    command: str = ""
    beginning: Callable[[Path], None] | None = None
    shard: bool = False

    @property
    def settings(self) -> TrainSettings:
        return TrainSettings.from_dict(self.inputs.settings, str(self.out / RUN))


def _run(request: _Request, observer: Observer | None, progress: Progress) -> TrainResult:
    settings = request.settings
    processes = accelerator(settings.device)
    check_division(settings, processes.num_processes)
    built: list[Any] = []  # the model, if the first process had to build it to begin
    with contextlib.ExitStack() as held:
        status, details = on_main(processes, lambda: _begin(request, held, built, progress))
        if not (request.out / RUN).is_file():
            raise HeadwiseError(
                f"{request.out} is not visible to every process; put the run on shared storage."
            )
        if built and observer is not None:
            observer.noted(_describe_text(request.inputs.text, details.text))
        if status == "finished":
            result = TrainResult(request.out, status, details.last, details.text)
        else:
            job = replace(
                _job(RunFolder(request.out), details, settings, built), shard=request.shard
            )
            result = _train(RunFolder(request.out), details, job, processes, observer)
    processes.end_training()
    return result


def _begin(
    request: _Request, held: contextlib.ExitStack, built: list[Any], progress: Progress
) -> tuple[Status, TrainDetails]:
    """Lock the folder and make sure that everything the loop reads exists."""
    opened = resume_in_place(
        request.out,
        KIND,
        request.inputs.model_dump(mode="json"),
        force=request.force,
        reads=[
            *(text_name(given) for given in request.inputs.text.sources),
            request.inputs.tokenizer.source or "",
        ],
        free=FREE_ON_RESUME,
        command=request.command,
    )
    held.enter_context(opened)
    record = read_training(request.out)
    details = record.details
    if details is None:
        details = _prepare(request, built, progress)
    elif record.status != "finished":
        _check_tokens(RunFolder(request.out), details)
    if record.status != "finished":
        update_run(request.out, status="running", details=details.to_dict())
    else:
        complete(request.out)
    return record.status, details


def _prepare(request: _Request, built: list[Any], progress: Progress) -> TrainDetails:
    """Write plan, tokenizer and tokens, after checking them and the model."""
    if request.plan is None:
        raise HeadwiseError(
            f"{request.out} was stopped before its plan and its tokens were stored; run the full "
            "command again."
        )
    settings, folder = request.settings, RunFolder(request.out)
    text = request.text or _read_again(request.inputs.text)
    splits = [held_out_split(one.documents, settings.split) for one in text.texts]
    documents = tuple(document for split in splits for document in split.train)
    tokenizer, plan = prepare_tokenizer(request.plan, request.inputs.tokenizer, documents)
    check_context(plan, settings)

    train_streams, held_out = (
        [token_stream(tokenizer, part, progress) for part in parts]
        for parts in ([s.train for s in splits], [s.held_out for s in splits])
    )
    masking = None if plan.shape.causal else masking_of(tokenizer, plan.shape.vocab_size)
    _batches(train_streams, text.weights, settings, masking)  # long enough?
    tokens = special_tokens(tokenizer)
    built.append(_build(plan, tokens, settings))
    with atomic_folder(folder.tokenizer, force=True, inside=True) as path:
        tokenizer.save_pretrained(path)
    streams = dict(zip(stream_names(len(splits)), (*train_streams, *held_out), strict=True))
    with atomic_folder(folder.tokens, force=True, inside=True) as path:
        for name, stream in streams.items():
            np.save(path / name, stream)
    write_text(folder.plan, plan.to_json(), force=True)
    if request.beginning is not None:
        request.beginning(folder.path)
    return TrainDetails(
        text=_text_details(text, splits, sum(map(len, train_streams)), sum(map(len, held_out))),
        special_tokens=tokens,
        tokens_sha256={name: sha256(folder.tokens / name) for name in streams},
        weights=text.weights,
        masking=masking,
    )


def stream_names(n_texts: int) -> tuple[str, ...]:
    """The files of the token streams: those to train on, then those held out."""
    numbers = [""] if n_texts == 1 else [f"-{i}" for i in range(n_texts)]
    return tuple(f"{part}{number}.npy" for part in ("train", "held-out") for number in numbers)


def _text_details(
    text: Mixture, splits: Sequence[Split], train_tokens: int, held_out_tokens: int
) -> TextDetails:
    return TextDetails(
        documents=sum(len(one.documents) for one in text.texts),
        characters=sum(one.characters for one in text.texts),
        skipped_files=sum(one.skipped for one in text.texts),
        split=", ".join(dict.fromkeys(split.rule for split in splits)),
        train_tokens=train_tokens,
        held_out_tokens=held_out_tokens,
    )


def _describe_text(text: TextInput, found: TextDetails) -> str:
    return (
        f"{text.source}: {found.train_tokens} tokens to train on, {found.held_out_tokens} held "
        f"out ({found.split})."
    )


def _read_again(wanted: TextInput) -> Mixture:
    text = read_mixture(wanted.sources, wanted.max_chars)
    if text.sha256 != wanted.sha256:
        raise HeadwiseError(
            f"{wanted.source} has changed since the run was started; restore it, or start again "
            "with --force."
        )
    return text


def _check_tokens(folder: RunFolder, details: TrainDetails) -> None:
    for name, expected in details.tokens_sha256.items():
        path = folder.tokens / name
        if not _is_array(path) or sha256(path) != expected:
            raise HeadwiseError(
                f"{path} is missing or damaged, so the run cannot be resumed to the same result; "
                "restore it, or start again with --force."
            )


def _is_array(path: Path) -> bool:
    """Whether a file is as long as its own header says; an absurdly long one is not read."""
    try:
        stream = np.load(path, mmap_mode="r") if path.is_file() else None
    except (OSError, EOFError, ValueError, SyntaxError):
        return False
    return stream is not None and path.stat().st_size == stream.nbytes + stream.offset


def _job(
    folder: RunFolder, details: TrainDetails, settings: TrainSettings, built: list[Any]
) -> TrainingJob:
    assert settings.context is not None
    model = built.pop() if built else None
    if model is None:
        model = _build(read_plan(folder.plan), details.special_tokens, settings)
    n_texts, masking = len(details.weights), details.masking
    streams = [np.load(folder.tokens / name, mmap_mode="r") for name in stream_names(n_texts)]
    sizes = {
        "context": settings.context,
        "batch_size": max(1, settings.batch_size // settings.accumulate),
        "most": max(1, settings.eval_windows // n_texts),
    }
    held_out = [
        held_out_batches(stream, **sizes)
        if masking is None
        else masked_held_out(stream, masking, **sizes)
        for stream in streams[n_texts:]
    ]
    return TrainingJob(
        model=model,
        loss=next_token_loss if masking is None else masked_token_loss,
        batches=_batches(streams[:n_texts], details.weights, settings, masking),
        settings=settings,
        held_out=tuple(batch for batches in held_out for batch in batches),
    )


def _train(
    folder: RunFolder,
    details: TrainDetails,
    job: TrainingJob,
    processes: Accelerator,
    observer: Observer | None,
) -> TrainResult:
    """The loop, the finished model, and how it ended written into run.json."""

    def end(status: Status, **changes: Any) -> TrainDetails:
        ended = details.model_copy(update={"last": None, "reason": None, **changes})
        update_run(folder.path, status=status, details=ended.to_dict())
        return ended

    def conclude() -> TrainResult:
        if not outcome.signal:
            _save_model(job.model, folder)
        # The row on disk: a run killed after its last step has none in memory.
        rows = read_rows(folder.metrics)
        status: Status = "interrupted" if outcome.signal else "finished"
        ended = end(status, last=rows[-1] if rows else None)
        if status == "finished":
            complete(folder.path)
        return TrainResult(folder.path, status, ended.last, ended.text, outcome.signal)

    try:
        outcome = train_model(job, processes, folder=folder, observer=observer)
    except DivergenceError as error:
        reason = str(error)
        on_main(processes, lambda: end("diverged", reason=reason))
        raise
    except OutputError as error:
        raise OutputError(f"{error} Then run the same command again to resume.") from error
    return on_main(processes, conclude)


def _save_model(model: Any, folder: RunFolder) -> None:
    """Write a Hugging Face folder: model and tokenizer."""
    with atomic_folder(folder.model, force=True, inside=True) as temporary:
        model.save_pretrained(temporary)
        for file in folder.tokenizer.iterdir():
            shutil.copyfile(file, temporary / file.name)


def _batches(
    streams: Sequence[np.ndarray],
    weights: Sequence[float],
    settings: TrainSettings,
    masking: Masking | None,
) -> Callable[[int], Batch]:
    assert settings.context is not None
    context = settings.context if masking is None else masking.inside(settings.context)
    sizes = {"context": context, "batch_size": settings.batch_size, "seed": settings.seed}
    windows = mixed_batches(streams, weights, **sizes)
    return windows if masking is None else MaskedBatches(windows, masking, seed=settings.seed)


def _build(plan: Plan, tokens: dict[str, int | None], settings: TrainSettings) -> Any:
    """The plan's model with these special tokens, randomly initialised from the seed."""
    from headwise.models.build import build_model

    task = "causal-lm" if plan.shape.causal else "masked-lm"
    return build_model(plan, task=task, overrides=tokens, seed=settings.seed)


def prepare_tokenizer(
    plan: Plan, request: TokenizerInput, documents: tuple[str, ...]
) -> tuple[PreTrainedTokenizerBase, Plan]:
    """The tokenizer, loaded or trained, and the plan with the vocabulary size they agree on."""
    planned, wanted = plan.shape.vocab_size, request.vocab_size
    if planned and wanted and planned != wanted:
        raise HeadwiseError(
            f"the plan has a vocab_size of {planned}, but --vocab-size asks for {wanted}; leave "
            "it out, or change the plan."
        )
    if request.source is None:
        size = planned or wanted or DEFAULT_VOCAB
        tokenizer = train_tokenizer(documents, size, encoder=not plan.shape.causal)
    else:
        tokenizer = load_tokenizer(request.source)
        size = planned or wanted or len(tokenizer)
    if len(tokenizer) > size:
        raise HeadwiseError(
            f"the tokenizer has {len(tokenizer)} tokens, more than the vocab_size {size}; use a "
            "smaller tokenizer or a plan with a larger vocab_size."
        )
    shape = plan.shape.model_copy(update={"vocab_size": size})
    return tokenizer, plan.model_copy(update={"shape": shape})


def check_context(plan: Plan, settings: TrainSettings) -> None:
    """Refuse windows longer than the model's own context."""
    assert settings.context is not None
    if settings.context > plan.shape.context:
        raise HeadwiseError(
            f"context must be at most the plan's {plan.shape.context}, got {settings.context}."
        )


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """The token numbers a model's config must agree on with its tokenizer.

    A stock config's own numbers would end a generation at some letter, and a padding number keeps
    the row of that token from ever learning.
    """
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names}
