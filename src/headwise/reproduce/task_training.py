"""A short training of a small network on a synthetic task.

Thousands of steps of a few milliseconds: no checkpoints, no text, no processes, hence not the loop
of `headwise.training`. All numbers come from the seed: the same seed gives every head count the
same task and the same batches, so that differences over seeds are paired.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from headwise.data.tasks import Task
    from headwise.nn.one_layer import TaskNetwork

HELD_OUT = 1 << 30  # seed of the sequences that are scored; training seeds stay below


@dataclass(frozen=True, slots=True)
class Training:
    """Adam with a short warm-up and a linear fall to zero."""

    steps: int
    batch: int = 64
    lr: float = 1e-2
    scored: int = 1024  # sequences to score on


@dataclass(frozen=True, slots=True)
class Layout:
    """Heads of one network: so many, each so wide, around streams of d_model numbers."""

    heads: int
    width: int
    d_model: int
    n_layers: int = 1


@dataclass(frozen=True, slots=True)
class Score:
    """The task's metric (squared error or accuracy) and loss."""

    metric: float
    loss: float


def network(
    layout: Layout, task: Task, *, seed: int, mlp: bool = False, skip: bool = False
) -> TaskNetwork:
    """A task network of equal heads."""
    from headwise.nn.one_layer import TaskNetwork, task_plan
    from headwise.plan import HeadSpec

    heads = [HeadSpec(qk_dim=layout.width, vo_dim=layout.width)] * layout.heads
    plan = task_plan(heads, layout.d_model, task.length, n_layers=layout.n_layers)
    return TaskNetwork(plan, task, mlp=mlp, skip=skip, seed=seed)


def train(model: nn.Module, task: Task, training: Training, *, seed: int) -> Score:
    """Train in place; the score on new sequences afterwards."""
    import torch

    torch.set_num_threads(1)
    optimizer = torch.optim.Adam(model.parameters(), training.lr)
    generator = torch.Generator().manual_seed(seed)
    warm_up = max(1, training.steps // 20)
    for step in range(training.steps):
        share = min((step + 1) / warm_up, 1 - step / training.steps)
        optimizer.param_groups[0]["lr"] = training.lr * share
        batch = task.sample(training.batch, generator)
        loss = task.loss(model(batch.inputs), batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return scored(model, task, training.scored)


def scored(model: nn.Module, task: Task, sequences: int) -> Score:
    """The score on sequences that no training saw, some at a time."""
    import torch

    generator = torch.Generator().manual_seed(HELD_OUT)
    parts: list[Score] = []
    with torch.no_grad():
        for _ in range(max(1, sequences // 128)):
            batch = task.sample(min(sequences, 128), generator)
            outputs = model(batch.inputs)
            parts.append(Score(task.metric(outputs, batch), float(task.loss(outputs, batch))))
    return Score(
        sum(part.metric for part in parts) / len(parts),
        sum(part.loss for part in parts) / len(parts),
    )
