"""A student fitted to its head's output by the one training loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.reproduce.head_student import Imitation, Lesson, Start, error


@dataclass(frozen=True, slots=True)
class Exercise:
    """How a student is fitted: steps, windows per step, rates to choose from, and the seed."""

    steps: int
    batch: int
    rates: tuple[float, ...]
    seed: int


def fitted(
    start: Start, teacher: Imitation, shown: tuple[Lesson, Lesson], exercise: Exercise
) -> tuple[Imitation, float]:
    """The student after its exercise, and the rate of several that is best on the second lesson.

    A student that gets worse there than it began is thrown away for its beginning, at rate 0.
    """
    used, aside = shown
    best = Imitation(start, teacher.attention, used.turns)
    least, chosen = error(best, teacher, aside), 0.0
    with torch.no_grad():
        targets = torch.cat([teacher(rows) for rows in torch.split(used.hidden, 4)])
    for rate in exercise.rates:
        student = Imitation(start, teacher.attention, used.turns)
        if not _trained(student, used, targets, exercise, rate):
            continue
        missed = error(student, teacher, aside)
        if math.isfinite(missed) and missed < least:
            best, least, chosen = student, missed, rate
    return best, chosen


def _trained(
    student: Imitation, used: Lesson, targets: Tensor, exercise: Exercise, rate: float
) -> bool:
    """Fit in place by the one loop; whether it stayed finite."""
    from headwise.training.engine import DivergenceError, Job
    from headwise.training.loop import run
    from headwise.training.processes import accelerator
    from headwise.training.settings import TrainSettings

    def dealt(step: int) -> dict[str, Tensor]:
        order = np.random.default_rng([exercise.seed, step]).permutation(len(targets))
        rows = torch.from_numpy(order[: exercise.batch])
        return {"hidden": used.hidden[rows], "target": targets[rows]}

    settings = TrainSettings(
        steps=exercise.steps,
        batch_size=min(exercise.batch, len(targets)),
        lr=rate,
        min_lr=rate / 50,
        lr_relative=True,
        weight_decay=0.0,
        eval_every=exercise.steps,
        save_every=exercise.steps,
        seed=exercise.seed,
    ).resolved(context=used.hidden.shape[1], device="cpu", dtype="fp32")
    try:
        outcome = run(Job(student, _loss, dealt, settings), accelerator("cpu"))
    except DivergenceError:
        return False
    if outcome.signal:
        raise KeyboardInterrupt  # half a fit is no result
    return True


def _loss(model: nn.Module, batch: Any, /) -> tuple[Tensor, Mapping[str, Tensor]]:
    target = batch["target"]
    missed = model(batch["hidden"]) - target
    return missed.square().sum() / target.square().sum().clamp_min(1e-30), {}
