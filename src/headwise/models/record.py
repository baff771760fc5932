"""headwise.json: how the model in this folder was made.

    OUT/headwise.json   key           of the inputs: another cut is never taken for this one
                        model         what it was cut from
                        calibration   the text or images it was fitted to
                        layers        the record of each layer's cut
                        recovery      the training after the cut, if there was any

The cut writes it, the recovery adds its part, and verification, model card and report read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue

from headwise.records import Frozen, Record, read_record

CUT_RECORD = "headwise.json"


class CalibrationRecord(Frozen):
    """The text, or the images, that a model was fitted to."""

    source: str
    sha256: str
    tokens: int  # of images: the patches of all of them
    images: int | None = None  # None: it was text
    parts_sha256: tuple[str, ...] | None = None  # of each text of a mixture

    @property
    def kind(self) -> Literal["text", "images"]:
        """What it was."""
        return "text" if self.images is None else "images"

    @property
    def amount(self) -> str:
        """The amount: `1,234 tokens`, or `166 images`."""
        return f"{self.tokens:,} tokens" if self.images is None else f"{self.images:,} images"


class RecoveryRecord(Frozen):
    """The training of the attention after the cut; `key` is of its inputs."""

    key: str = ""
    text_sha256: str
    parts_sha256: tuple[str, ...] | None = None  # of each text of a mixture
    tokens: int
    loss: float | None = None
    held_out_loss: float | None = None
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)


class CutRecord(Record):
    """The content of headwise.json."""

    format: Literal["headwise-cut/2"] = "headwise-cut/2"
    key: str
    model: str
    command: str = ""
    calibration: CalibrationRecord
    profile_sha256: str
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    layers: tuple[dict[str, JsonValue], ...] = ()
    recovery: RecoveryRecord | None = None
    versions: dict[str, str] = Field(default_factory=dict)

    @property
    def seen(self) -> frozenset[str]:
        """The SHA-256 of every text, or set of images, that the model was made with."""
        seen = {self.calibration.sha256, *(self.calibration.parts_sha256 or ())}
        if self.recovery is not None:
            seen |= {self.recovery.text_sha256, *(self.recovery.parts_sha256 or ())}
        return frozenset(seen)


def read_cut_record(folder: Path) -> CutRecord:
    """The record of a cut model."""
    return read_record(folder / CUT_RECORD, CutRecord, advice="cut the model again")
