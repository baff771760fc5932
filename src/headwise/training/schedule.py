"""The learning rate: a linear rise, then half a cosine down to a floor.

    lr ┤    ╭──╮
       │   ╱    ╲
       │  ╱      ╲
min_lr ┤ ╱        ╰──
       └─┴──┴───────┴─ step
       0  warmup   steps − 1
"""

from __future__ import annotations

import math

from headwise.training.settings import TrainSettings


def learning_rate(step: int, settings: TrainSettings) -> float:
    """The rate of the update with index `step`, counted from 0; the last one has the floor."""
    warmup, floor = settings.warmup, settings.min_lr
    assert warmup is not None
    assert floor is not None
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    falling = max(1, settings.steps - 1 - warmup)
    done = min(1.0, (step - warmup) / falling) if settings.steps - 1 > warmup else 1.0
    return floor + (settings.lr - floor) * 0.5 * (1 + math.cos(math.pi * done))
