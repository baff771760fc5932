"""Small models trained from scratch by the one training loop, on the built-in text or on a task.

What is compared at one seed gets the same batches in the same order, so that differences pair up.
A run returns its curve of held-out losses; one that stops being finite returns the curve so far.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt32

from headwise.reproduce.claim import ReproduceError
from headwise.training.loop import Observer, run
from headwise.training.metrics import StepRecord
from headwise.training.settings import TrainSettings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headwise.data.tasks import Task
    from headwise.plan import ModelShape, Plan
    from headwise.training.batches import Batch

HELD_OUT_SHARE = 0.05
HELD_OUT_SEED = 1 << 30  # of a task's scored sequences; training seeds stay below
PAIR_PRIOR = 100.0  # token pairs seen beforehand, as frequent as their second tokens
SEED_STRIDE = 100_000  # steps that a seed may have before it meets the next one's


@dataclass(frozen=True, slots=True)
class Course:
    """How long and how fast to train; the rest is as the loop's settings have it."""

    steps: int
    batch: int
    lr: float
    weight_decay: float = 0.1
    falling: bool = True  # the rate falls to a tenth; otherwise it stays, and a run is every
    evaluations: int = 16  # shorter run as well
    scored: int = 64  # held-out windows or sequences


@dataclass(frozen=True, slots=True)
class Source:
    """How much of the built-in text, in windows how long, in tokens of how large a vocabulary."""

    characters: int
    vocab_size: int
    context: int


@dataclass(frozen=True, slots=True)
class Learned:
    """The held-out losses of a run by step, and whether it stopped for want of a finite number."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    diverged: bool

    def values(self) -> dict[str, Any]:
        """JSON-ready numbers."""
        return {"steps": list(self.steps), "losses": list(self.losses), "diverged": self.diverged}

    def finished(self) -> Learned:
        """Itself; a run that did not finish is an error where only whole runs compare."""
        if self.diverged:
            done = self.steps[-1] if self.steps else 0
            raise ReproduceError(f"the loss stopped being finite after step {done}.")
        return self


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token numbers to train on and to score on."""

    train: UInt32[np.ndarray, " n"]
    held_out: UInt32[np.ndarray, " m"]

    def frequency_loss(self, vocab_size: int) -> float:
        """The held-out loss of one who knows how often each token comes, and nothing else."""
        counts = np.bincount(self.train, minlength=vocab_size) + 1.0
        return float(-np.log(counts / counts.sum())[self.held_out].mean())

    def pair_loss(self, vocab_size: int) -> float:
        """That of one who also knows which token follows which: all there is without attention."""
        first, second = (x.astype(np.int64) for x in (self.train[:-1], self.train[1:]))
        pairs = np.bincount(first * vocab_size + second, minlength=vocab_size**2)
        frequency = np.bincount(self.train, minlength=vocab_size) + 1.0
        prior = PAIR_PRIOR * frequency / frequency.sum()
        counts = pairs.reshape(vocab_size, vocab_size) + prior
        chance = counts / counts.sum(1, keepdims=True)
        return float(-np.log(chance[self.held_out[:-1], self.held_out[1:]]).mean())


@functools.lru_cache(maxsize=2)
def corpus(characters: int, vocab_size: int) -> Corpus:
    """The built-in text in tokens learned from its training part."""
    from headwise.data.split import held_out_split
    from headwise.data.text import read_source
    from headwise.data.tokens import token_stream, trained_tokenizer

    text = read_source("builtin:python", characters)
    split = held_out_split(text.documents, HELD_OUT_SHARE)
    tokenizer = trained_tokenizer(split.train, vocab_size)
    train, held_out = (token_stream(tokenizer, part) for part in (split.train, split.held_out))
    return Corpus(train, held_out)


def text_shape(p: Mapping[str, Any], heads: int) -> ModelShape:
    """The small Llama of a trial's sizes, its embeddings tied."""
    from headwise.planning.families import new_shape

    return new_shape(
        n_layers=p["layers"],
        d_model=p["d_model"],
        n_heads=heads,
        context=p["context"],
        vocab_size=p["vocab"],
        tied_embeddings=True,
    )


def text_model(plan: Plan, seed: int, **overrides: Any) -> nn.Module:
    """The plan's language model; without MLPs, which stock models cannot be, an attention stack."""
    if plan.shape.ffn_dim:
        from headwise.nn.build import build_model

        return build_model(plan, seed=seed, overrides=overrides)
    from headwise.nn.one_layer import TaskNetwork

    return TaskNetwork(
        plan, _Sizes(plan.shape.context, plan.shape.vocab_size), norm=True, seed=seed
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Next-token prediction as a task."""

    length: int
    n_inputs: int
    continuous: bool = False

    @property
    def n_outputs(self) -> int:
        return self.n_inputs


def learned_text(model: nn.Module, source: Source, course: Course, seed: int) -> Learned:
    """Train on the built-in text in place; the held-out losses."""
    from headwise.nn.one_layer import TaskNetwork
    from headwise.training.batches import WindowBatches, held_out_batches
    from headwise.training.losses import next_token_loss

    text = corpus(source.characters, source.vocab_size)
    batches = WindowBatches(text.train, context=source.context, batch_size=course.batch, seed=seed)
    scored = held_out_batches(
        text.held_out, context=source.context, batch_size=course.batch, most=course.scored
    )
    loss = _stack_loss if isinstance(model, TaskNetwork) else next_token_loss
    return _learned(model, _Lesson(loss, batches, scored), course, seed)


def learned_task(model: nn.Module, task: Task, course: Course, seed: int) -> Learned:
    """Train on fresh sequences of a task; the losses on sequences that no training saw."""
    from headwise.data.tasks import Batch as Sequences

    def batches(step: int) -> Batch:
        return _named(task.sample(course.batch, seed * SEED_STRIDE + step))

    def loss(model: nn.Module, batch: Batch, /) -> tuple[Tensor, Mapping[str, Tensor]]:
        sequences = Sequences(**batch)
        return task.loss(model(sequences.inputs), sequences), {}

    assert course.steps <= SEED_STRIDE
    scored = _named(task.sample(course.scored, HELD_OUT_SEED))
    return _learned(model, _Lesson(loss, batches, (scored,)), course, seed)


def _stack_loss(model: nn.Module, batch: Batch, /) -> tuple[Tensor, Mapping[str, Tensor]]:
    from torch.nn.functional import cross_entropy

    logits = model(batch["input_ids"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), {}


def _named(sequences: Any) -> Batch:
    names = ("inputs", "targets", "scored")
    return {name: getattr(sequences, name) for name in names}


@dataclass(frozen=True, slots=True)
class _Lesson:
    """What to learn: a loss, the batch of every step, and what is scored."""

    loss: Callable[..., Any]
    batches: Callable[[int], Batch]
    scored: tuple[Batch, ...]


def _learned(model: nn.Module, lesson: _Lesson, course: Course, seed: int) -> Learned:
    import torch

    from headwise.training.engine import DivergenceError, Job
    from headwise.training.processes import accelerator

    torch.set_num_threads(1)
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
    seen = _Seen()
    job = Job(model, lesson.loss, lesson.batches, settings, lesson.scored)
    try:
        outcome = run(job, accelerator("cpu"), observer=seen)
    except DivergenceError:
        return Learned(tuple(seen.steps), tuple(seen.losses), diverged=True)
    if outcome.signal:
        raise KeyboardInterrupt  # half a run is no result
    return Learned(tuple(seen.steps), tuple(seen.losses), diverged=False)


class _Seen(Observer):
    """Keeps the held-out losses."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []

    def stepped(self, record: StepRecord) -> None:
        if record.held_out_loss is not None:
            self.steps.append(record.step)
            self.losses.append(record.held_out_loss)
