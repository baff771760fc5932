"""How to train: the one source of defaults, from which the command line takes its own.

Free of torch, so that `headwise train --help` stays quick.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, get_args

from headwise.devices import Device, Dtype
from headwise.errors import HeadwiseError, did_you_mean

# Fields that change how often a run is saved, but never what it computes.
FREE_ON_RESUME = frozenset({"save_every", "keep"})


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Everything that decides a run besides the model, the loss and the batches.

    `batch_size` counts the windows of one optimizer step over all processes together. `None`
    stands for a value that depends on others; `resolved` fills it in.
    """

    steps: int = 1000
    batch_size: int = 32
    accumulate: int = 1  # parts of a process's share of the batch, one forward pass each
    context: int | None = None  # None: the plan's
    lr: float = 6e-4
    lr_relative: bool = False  # lr is a share of each trained tensor's root mean square
    min_lr: float | None = None  # None: a tenth of lr
    weight_decay: float = 0.1
    warmup: int | None = None  # steps; None: a twentieth of the run
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    seed: int = 0
    held_out: float = 0.05  # share of the text that is never trained on
    eval_every: int = 100
    eval_windows: int = 64
    save_every: int = 100
    keep: int = 2
    dtype: Dtype = "auto"
    device: Device = "auto"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "eval_every", "eval_windows"):
            _at_least(name, getattr(self, name), 1)
        for name in ("save_every", "keep"):
            _at_least(name, getattr(self, name), 1)
        for name in ("context", "warmup"):
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, 1 if name == "context" else 0)
        _positive("lr", self.lr)
        _positive("clip", self.clip)
        _at_least("seed", self.seed, 0)
        if self.min_lr is not None and not 0 <= self.min_lr <= self.lr:
            raise HeadwiseError(f"min-lr must be from 0 to lr {self.lr:g}, got {self.min_lr:g}.")
        if not 0 <= self.weight_decay < math.inf:
            raise HeadwiseError(f"weight-decay must be 0 or more, got {self.weight_decay:g}.")
        if not 0 <= self.held_out < 1:
            raise HeadwiseError(
                f"held-out must be a share from 0 up to, not including, 1, got {self.held_out:g}."
            )
        for name, choices in (("dtype", get_args(Dtype)), ("device", get_args(Device))):
            if getattr(self, name) not in choices:
                raise HeadwiseError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}."
                )

    def resolved(self, *, context: int, device: Device, dtype: Dtype) -> TrainSettings:
        """The settings with every open value filled in; what a run records and compares."""
        return replace(
            self,
            context=self.context if self.context is not None else context,
            min_lr=self.min_lr if self.min_lr is not None else self.lr / 10,
            warmup=self.warmup if self.warmup is not None else max(1, self.steps // 20),
            device=device,
            dtype=dtype,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens predicted in one optimizer step."""
        assert self.context is not None
        return self.batch_size * self.context

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-ready data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any], source: str) -> TrainSettings:
        """The settings in JSON-ready data; `source` names it in errors."""
        if not isinstance(data, dict):
            raise HeadwiseError(f"{source} must hold settings by name, got {data!r}; restore it.")
        known = [f.name for f in fields(cls)]
        for name in data:
            if name not in known:
                raise HeadwiseError(
                    f"{source} has an unknown setting {name!r}. {did_you_mean(name, known)}"
                )
        try:
            return cls(**data)
        except TypeError as error:
            raise HeadwiseError(f"{source} holds a setting of the wrong kind ({error}).") from error


def steps_for(tokens: int, *, batch_size: int, context: int) -> int:
    """Optimizer steps that see at least `tokens` tokens."""
    _at_least("tokens", tokens, 1)
    return -(-tokens // (batch_size * context))


def differences(old: TrainSettings, new: TrainSettings) -> tuple[str, ...]:
    """The settings that would change the result, as `name: old → new`."""
    return tuple(
        f"{f.name} {getattr(old, f.name)} → {getattr(new, f.name)}"
        for f in fields(TrainSettings)
        if f.name not in FREE_ON_RESUME and getattr(old, f.name) != getattr(new, f.name)
    )


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise HeadwiseError(
            f"{name.replace('_', '-')} must be a whole number of at least {least}, got {value}."
        )


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise HeadwiseError(f"{name} must be a number above 0, got {value:g}.")
