"""Small models trained here: task networks by a short loop of their own, the rest by `training`.

    train_network    a network on a synthetic task, thousands of steps of a few milliseconds
    train_on_task    the library's training loop, on sequences of a task
    train_on_text    the same, on the built-in text

The seed decides all numbers: what is compared at one seed gets the same task and the same batches
in the same order, so that differences over seeds are paired. The last two return the curve of
held-out losses; a run whose loss stops being finite returns the curve so far.

Import this inside a trial: it loads torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt32
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from headwise.data.text import Split, held_out_split, read_source
from headwise.data.tokens import token_stream, train_tokenizer
from headwise.devices import accelerator
from headwise.models.build import build_model
from headwise.papers.harness.claim import ReproduceError
from headwise.papers.tasks.network import FixedSizes, TaskNetwork, task_plan
from headwise.papers.tasks.pretrained import TEXT
from headwise.papers.tasks.task import SyntheticTask, TaskBatch
from headwise.plan import HeadSpec, ModelShape, Plan
from headwise.planning.design import new_shape
from headwise.training.batches import Batch, WindowBatches, held_out_batches, next_token_loss
from headwise.training.checkpoint import StepRecord
from headwise.training.loop import DivergenceError, Observer, TrainingJob, train_model
from headwise.training.settings import TrainSettings

HELD_OUT_SEED = 1 << 30  # of a task's scored sequences; training seeds stay below
SEED_STRIDE = 100_000  # steps that a seed may have before it meets the next one's
HELD_OUT_SHARE = 0.05  # of the text
PAIR_PRIOR = 100.0  # token pairs seen beforehand, as frequent as their second tokens
Loss = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]


# --- task networks -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """The equal heads of a network: their number and width, and the width of the model."""

    heads: int
    width: int
    d_model: int
    n_layers: int = 1


@dataclass(frozen=True, slots=True)
class ShortTraining:
    """Adam with a short warmup and a linear decay to zero."""

    steps: int
    batch: int = 64
    lr: float = 1e-2
    scored: int = 1024  # sequences to score on


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The task's metric (squared error or accuracy) and loss."""

    metric: float
    loss: float


def equal_heads(
    layout: Layout, task: SyntheticTask, *, seed: int, mlp: bool = False, skip: bool = False
) -> TaskNetwork:
    """A task network of equal heads."""
    heads = [HeadSpec(qk_dim=layout.width, vo_dim=layout.width)] * layout.heads
    plan = task_plan(heads, layout.d_model, task.length, n_layers=layout.n_layers)
    return TaskNetwork(plan, task, mlp=mlp, skip=skip, seed=seed)


def train_network(
    model: nn.Module, task: SyntheticTask, training: ShortTraining, *, seed: int
) -> TaskScore:
    """Train in place; the score on new sequences afterwards."""
    torch.set_num_threads(1)
    optimizer = torch.optim.Adam(model.parameters(), training.lr)
    generator = torch.Generator().manual_seed(seed)
    warmup = max(1, training.steps // 20)
    for step in range(training.steps):
        share = min((step + 1) / warmup, 1 - step / training.steps)
        optimizer.param_groups[0]["lr"] = training.lr * share
        batch = task.sample(training.batch, generator)
        loss = task.loss(model(batch.inputs), batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return _held_out_score(model, task, training.scored)


def _held_out_score(model: nn.Module, task: SyntheticTask, sequences: int) -> TaskScore:
    """The score on sequences that no training saw, some at a time."""
    generator = torch.Generator().manual_seed(HELD_OUT_SEED)
    parts: list[TaskScore] = []
    with torch.no_grad():
        for _ in range(max(1, sequences // 128)):
            batch = task.scored_sample(min(sequences, 128), generator)
            outputs = model(batch.inputs)
            loss = float(task.expected_loss(outputs, batch))
            parts.append(TaskScore(task.expected_metric(outputs, batch), loss))
    return TaskScore(
        sum(part.metric for part in parts) / len(parts),
        sum(part.loss for part in parts) / len(parts),
    )


# --- text --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextSizes:
    """How much of the built-in text to read, the size of the vocabulary, the length of a window."""

    characters: int
    vocab_size: int
    context: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids to train on and to score on."""

    train: UInt32[np.ndarray, " n"]
    held_out: UInt32[np.ndarray, " m"]

    def frequency_loss(self, vocab_size: int) -> float:
        """The held-out loss of a predictor that knows only how often each token occurs."""
        counts = np.bincount(self.train, minlength=vocab_size) + 1.0
        return float(-np.log(counts / counts.sum())[self.held_out].mean())

    def pair_loss(self, vocab_size: int) -> float:
        """The same for one that also knows which token follows which: no attention needed."""
        first, second = (x.astype(np.int64) for x in (self.train[:-1], self.train[1:]))
        pairs = np.bincount(first * vocab_size + second, minlength=vocab_size**2)
        frequency = np.bincount(self.train, minlength=vocab_size) + 1.0
        prior = PAIR_PRIOR * frequency / frequency.sum()
        counts = pairs.reshape(vocab_size, vocab_size) + prior
        chance = counts / counts.sum(1, keepdims=True)
        return float(-np.log(chance[self.held_out[:-1], self.held_out[1:]]).mean())


@functools.lru_cache(maxsize=2)
def corpus(characters: int, vocab_size: int) -> Corpus:
    """The beginning of the built-in text, in tokens learned from its training part."""
    split, tokenizer = _split(characters), corpus_tokenizer(characters, vocab_size)
    train, held_out = (token_stream(tokenizer, part) for part in (split.train, split.held_out))
    return Corpus(train, held_out)


@functools.lru_cache(maxsize=2)
def corpus_tokenizer(characters: int, vocab_size: int) -> Any:
    """The tokenizer of `corpus`."""
    return train_tokenizer(_split(characters).train, vocab_size)


def training_documents(characters: int) -> tuple[str, ...]:
    """The documents that `corpus` trains on."""
    return _split(characters).train


@functools.lru_cache(maxsize=1)
def _split(characters: int) -> Split:
    return held_out_split(read_source(TEXT, characters).documents, HELD_OUT_SHARE)


def random_windows(
    stream: np.ndarray, length: int, count: int, seed: int
) -> Int64[np.ndarray, "count length"]:
    """Random windows of a stream, none twice; a stream with fewer of them is an error."""
    there = len(stream) // length
    if there < count:
        raise ReproduceError(
            f"{count} windows of {length} tokens were asked for, but the text has {there}; ask for "
            "fewer, or for more text."
        )
    places = np.random.default_rng(seed).permutation(there)[:count]
    return np.stack([stream[i * length : (i + 1) * length] for i in places]).astype(np.int64)


def llama_shape(p: Mapping[str, Any], heads: int) -> ModelShape:
    """The small Llama of a trial's sizes, with tied embeddings."""
    return new_shape(
        n_layers=p["layers"],
        d_model=p["d_model"],
        n_heads=heads,
        context=p["context"],
        vocab_size=p["vocab"],
        tied_embeddings=True,
    )


def text_model(plan: Plan, seed: int, **overrides: Any) -> nn.Module:
    """The plan's language model; without MLPs, which stock models must have, a task network."""
    if plan.shape.ffn_dim:
        return build_model(plan, seed=seed, overrides=overrides)
    vocab_size = plan.shape.vocab_size
    sizes = FixedSizes(plan.shape.context, vocab_size, vocab_size)
    return TaskNetwork(plan, sizes, norm=True, seed=seed)


# --- the library's training loop ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Course:
    """How long and how fast to train; the rest is the default of the loop's settings."""

    steps: int
    batch: int
    lr: float
    weight_decay: float = 0.1
    falling: bool = True  # to a tenth; a constant rate makes every evaluation a shorter run's end
    evaluations: int = 16
    scored: int = 64  # held-out windows or sequences


@dataclass(frozen=True, slots=True)
class HeldOutCurve:
    """The held-out losses of a run by step, and whether the loss stopped being finite."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    diverged: bool

    def values(self) -> dict[str, Any]:
        """JSON-ready numbers."""
        return {"steps": list(self.steps), "losses": list(self.losses), "diverged": self.diverged}

    def finished(self) -> HeldOutCurve:
        """The curve itself; a run that diverged is an error where only whole runs compare."""
        if self.diverged:
            done = self.steps[-1] if self.steps else 0
            raise ReproduceError(f"the loss stopped being finite after step {done}.")
        return self


def train_on_text(model: nn.Module, text: TextSizes, course: Course, seed: int) -> HeldOutCurve:
    """Train on the built-in text in place; the held-out losses."""
    tokens = corpus(text.characters, text.vocab_size)
    batches = WindowBatches(tokens.train, context=text.context, batch_size=course.batch, seed=seed)
    scored = held_out_batches(
        tokens.held_out, context=text.context, batch_size=course.batch, most=course.scored
    )
    loss = _network_loss if isinstance(model, TaskNetwork) else next_token_loss
    return _train(model, (loss, batches, scored), course, seed)


def train_llama(model: Any, p: Mapping[str, Any], lr: float, seed: int) -> HeldOutCurve:
    """Train a model of `llama_shape` and make it ready to be measured."""
    text = TextSizes(p["characters"], p["vocab"], p["context"])
    course = Course(p["steps"], p["batch"], lr, evaluations=1)
    curve = train_on_text(model, text, course, seed)
    model.eval().requires_grad_(False)
    return curve


def train_on_task(model: nn.Module, task: SyntheticTask, course: Course, seed: int) -> HeldOutCurve:
    """Train on fresh sequences of a task; the losses on sequences that no training saw."""

    def batches(step: int) -> Batch:
        return _as_dict(task.sample(course.batch, seed * SEED_STRIDE + step))

    def loss(model: nn.Module, batch: Batch, /) -> tuple[Tensor, Mapping[str, Tensor]]:
        sequences = TaskBatch(**batch)
        # What is not trained on comes without the noise of its labels.
        score = task.loss if model.training else task.expected_loss
        return score(model(sequences.inputs), sequences), {}

    assert course.steps <= SEED_STRIDE
    scored = _as_dict(task.scored_sample(course.scored, HELD_OUT_SEED))
    return _train(model, (loss, batches, (scored,)), course, seed)


def stays_finite(job: TrainingJob, observer: Observer | None = None) -> bool:
    """Run the library's loop in place on one CPU thread; whether the loss stayed finite."""
    torch.set_num_threads(1)
    try:
        outcome = train_model(job, accelerator("cpu"), observer=observer)
    except DivergenceError:
        return False
    if outcome.signal:
        raise KeyboardInterrupt  # half a run is no result
    return True


def _train(
    model: nn.Module,
    lesson: tuple[Loss, Callable[[int], Batch], tuple[Batch, ...]],
    course: Course,
    seed: int,
) -> HeldOutCurve:
    """Train with a loss, the batch of every step, and the batches that are scored."""
    loss, batches, scored = lesson
    settings = TrainSettings(
        steps=course.steps,
        batch_size=course.batch,
        context=1,  # only counts tokens, which nobody reads here
        lr=course.lr,
        min_lr=course.lr / 10 if course.falling else course.lr,
        weight_decay=course.weight_decay,
        eval_every=max(1, course.steps // course.evaluations),
        seed=seed,
    ).resolved(context=1, device="cpu", dtype="fp32")
    seen = _HeldOutLosses()
    finite = stays_finite(TrainingJob(model, loss, batches, settings, scored), seen)
    return HeldOutCurve(tuple(seen.steps), tuple(seen.losses), diverged=not finite)


class _HeldOutLosses(Observer):
    """Keeps the held-out losses of a run."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []

    def stepped(self, record: StepRecord) -> None:
        if record.held_out_loss is not None:
            self.steps.append(record.step)
            self.losses.append(record.held_out_loss)


def _network_loss(model: nn.Module, batch: Batch, /) -> tuple[Tensor, Mapping[str, Tensor]]:
    logits = model(batch["input_ids"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), {}


def _as_dict(batch: TaskBatch) -> Batch:
    return {"inputs": batch.inputs, "targets": batch.targets, "scored": batch.scored}
