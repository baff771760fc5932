"""Settings of training and recovery: the source of defaults, and the learning rate schedule.

    lr ┤    ╭──╮            linear warmup, then half a cosine down to a floor
       │   ╱    ╲
       │  ╱      ╲
min_lr ┤ ╱        ╰──
       └─┴──┴───────┴─ step
       0  warmup   steps − 1

Does not import torch, so that `headwise train --help` stays quick.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from headwise.devices import (
    Device,
    Dtype,
    chosen_device,
    has_bf16_products,
    training_dtype,
)
from headwise.errors import HeadwiseError, did_you_mean

MOST_WINDOWS = 1_000_000  # of one step, dealt one by one; far more than any machine holds
# Fields that change how often a run is saved, but never what it computes.
FREE_ON_RESUME = frozenset({"save_every", "keep"})


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Everything that determines a run besides the model, the loss and the batches.

    `batch_size` counts the windows of one optimizer step over all processes together. A value of
    `None` depends on other settings; `resolved` fills it in.
    """

    steps: int = 1000
    tokens: int | None = None  # to train on, instead of `steps`
    batch_size: int = 32
    accumulate: int = 1  # gradient accumulation steps
    context: int | None = None  # tokens per window; None: the plan's
    lr: float = 6e-4  # the peak
    lr_relative: bool = False  # lr is relative to each trained tensor's root mean square
    min_lr: float | None = None  # None: a tenth of lr
    weight_decay: float = 0.1
    warmup: int | None = None  # steps; None: a twentieth of the run
    clip: float = 1.0  # gradients are clipped to this norm
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    seed: int = 0
    split: float = 0.05  # share of the text that is held out for validation
    eval_every: int = 100
    eval_windows: int = 64
    save_every: int = 100
    keep: int = 2  # checkpoints
    dtype: Dtype = "auto"
    device: Device = "auto"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "eval_every", "eval_windows"):
            _at_least(name, getattr(self, name), 1)
        for name in ("save_every", "keep"):
            _at_least(name, getattr(self, name), 1)
        for name, least in (("tokens", 1), ("context", 1), ("warmup", 0)):
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, least)
        if self.batch_size > MOST_WINDOWS:
            raise HeadwiseError(
                f"batch-size must be at most {MOST_WINDOWS:,} windows, got {self.batch_size}."
            )
        _positive("lr", self.lr)
        _positive("clip", self.clip)
        _positive("eps", self.eps)
        _below_one("beta1", self.beta1)
        _below_one("beta2", self.beta2)
        if not 0 <= self.seed < 2**63:
            raise HeadwiseError(f"seed must be from 0 to 2^63 − 1, got {self.seed}.")
        if self.min_lr is not None and not 0 <= self.min_lr <= self.lr:
            raise HeadwiseError(f"min-lr must be from 0 to lr {self.lr:g}, got {self.min_lr:g}.")
        if not 0 <= self.weight_decay < math.inf:
            raise HeadwiseError(f"weight-decay must be 0 or more, got {self.weight_decay:g}.")
        if not 0 <= self.split < 1:
            raise HeadwiseError(
                f"split must be a share of at least 0 and below 1, got {self.split:g}."
            )
        for name, choices in (("dtype", get_args(Dtype)), ("device", get_args(Device))):
            if getattr(self, name) not in choices:
                raise HeadwiseError(
                    f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}."
                )

    def resolved(self, *, context: int, device: Device, dtype: Dtype) -> TrainSettings:
        """The settings with every `None` filled in, as a run records and compares them."""
        context = self.context if self.context is not None else context
        steps = self.steps
        if self.tokens is not None:
            steps = steps_for(self.tokens, batch_size=self.batch_size, context=context)
        return replace(
            self,
            steps=steps,
            tokens=None,
            context=context,
            min_lr=self.min_lr if self.min_lr is not None else self.lr / 10,
            warmup=self.warmup if self.warmup is not None else max(1, steps // 20),
            device=device,
            dtype=dtype,
        )

    def on_this_machine(self, context: int) -> TrainSettings:
        """`resolved` for the device that is there; `context` is the plan's."""
        device = chosen_device(self.device)
        return self.resolved(
            context=context, device=device, dtype=training_dtype(self.dtype, device)
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens read in one optimizer step."""
        assert self.context is not None
        return self.batch_size * self.context

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-ready data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str) -> TrainSettings:
        """The settings in JSON-ready data; `source` names it in errors."""
        known = [f.name for f in fields(cls)]
        for name in data:
            if name not in known:
                raise HeadwiseError(
                    f"{source} has an unknown setting {name!r}. {did_you_mean(name, known)}"
                )
        from pydantic import TypeAdapter, ValidationError

        from headwise.records import Frozen, first_problem

        try:
            return TypeAdapter(cls).validate_python(data)
        except ValidationError as error:
            problem = first_problem(error, Frozen, {})
            raise HeadwiseError(f"{source} holds a wrong setting: {problem}") from error


def steps_for(tokens: int, *, batch_size: int, context: int) -> int:
    """Optimizer steps that see at least `tokens` tokens."""
    _at_least("tokens", tokens, 1)
    return -(-tokens // (batch_size * context))


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


# Adam's first steps go as far as any later one, in directions that one batch chose. A cut model is
# near a minimum, so they would undo it: the rate rises slowly.
RECOVERY_WARMUP = 0.125  # of the steps


Trained = Literal["attention", "norms", "all", "lora"]


@dataclass(frozen=True, slots=True)
class RecoverSettings:
    """Settings of the training after a cut."""

    tokens: int = 100_000  # to train on
    length: int = 256  # tokens per window
    batch_size: int = 1  # windows per step, over all processes
    lr: float = 2e-3  # the peak, relative to each matrix's root mean square
    seed: int = 0  # of the batches
    split: float = 0.1  # share of the text that is held out for validation
    save_every: int = 50  # steps
    device: Device = "auto"
    dtype: Dtype = "auto"  # of matrix products; auto: bf16 where the device has its own
    train: Trained = "attention"  # which parameters

    def __post_init__(self) -> None:
        if self.train not in get_args(Trained):
            raise HeadwiseError(
                f"train must be one of {', '.join(get_args(Trained))}, got {self.train!r}."
            )

    def within(self, length: int) -> RecoverSettings:
        """The same with windows no longer than the calibration's sequences."""
        return replace(self, length=min(self.length, length))

    def on_this_machine(self) -> TrainSettings:
        """The settings of the training loop, for the device that is there."""
        steps = steps_for(self.tokens, batch_size=self.batch_size, context=self.length)
        device, dtype = chosen_device(self.device), self.dtype
        if dtype == "auto":
            dtype = "bf16" if has_bf16_products(device) else "fp32"
        return TrainSettings(
            steps=steps,
            batch_size=self.batch_size,
            lr=self.lr,
            lr_relative=True,
            weight_decay=0.0,
            warmup=max(1, round(RECOVERY_WARMUP * steps)),
            seed=self.seed,
            split=self.split,
            eval_every=100,
            eval_windows=16,
            save_every=self.save_every,
        ).resolved(context=self.length, device=device, dtype=dtype)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise HeadwiseError(
            f"{name.replace('_', '-')} must be a whole number of at least {least}, got {value}."
        )


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise HeadwiseError(f"{name} must be a number above 0, got {value:g}.")


def _below_one(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise HeadwiseError(f"{name} must be at least 0 and below 1, got {value:g}.")
