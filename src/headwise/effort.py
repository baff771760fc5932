"""How much work a compression does: calibration, layer fit and recovery in three sizes.

            calibrate on    then, on a model that predicts the next token      on others
    quick      8k tokens    recover with 2 tokens for each of those            refit
    standard  32k           recover with 8                                     refit, fit each layer
    best      98k           recover with 40                                    refit, fit each layer

The amounts are based on the trials of recovery in docs/compress.md. Refit and layer fit are for
models that are not recovered: encoders, image models, and `recover=0`. A refitted cut is better
without training, but a worse starting point for training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EffortName = Literal["quick", "standard", "best"]


@dataclass(frozen=True, slots=True)
class Effort:
    """The amounts of one effort; options given explicitly override them."""

    tokens: int  # to calibrate on
    recover: int  # tokens to train on for each token of calibration
    fit: int | None  # steps of the layer fit where nothing is recovered; None: one pass

    def recovery_tokens(self, stated: int | None, calibration: int, *, recoverable: bool) -> int:
        """Tokens to train on after the cut; 0: none."""
        if stated is not None:
            return stated
        return self.recover * calibration if recoverable else 0

    def refits(self, stated: bool | None, *, recovers: bool) -> bool:
        """Whether each layer's output projection is refitted; training makes up for it."""
        return stated if stated is not None else not recovers

    def fit_steps(self, stated: int | None, *, recovers: bool) -> int | None:
        """Steps of the layer fit; 0: none, None: one pass over the text."""
        if stated is not None:
            return stated
        return 0 if recovers else self.fit


EFFORTS: dict[EffortName, Effort] = {
    "quick": Effort(tokens=8192, recover=2, fit=0),
    "standard": Effort(tokens=32768, recover=8, fit=None),
    "best": Effort(tokens=98304, recover=40, fit=None),
}
DEFAULT_EFFORT: EffortName = "standard"
