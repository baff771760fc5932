"""export.json: what was exported, for which engine, and how close it is to the source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from headwise.records import Frozen, Record, read_record

EXPORT_RECORD = "export.json"


class Parity(Frozen):
    """The exported model against ours, measured in the engine that reads it.

    `error` is the largest difference of a logit as a share of the largest logit, or of a
    log-probability in nats. `limit` depends on the number format, which rounds.
    """

    engine: str
    measure: Literal["logits", "log-probabilities"]
    positions: int
    error: float
    limit: float
    top_agreement: float  # share of positions with the same likeliest token
    computed: str = "float32"  # the number format that both ran in
    cached_numbers: int | None = None  # per token, counted in the engine's own cache

    @property
    def held(self) -> bool:
        """Whether the difference is within the limit."""
        return self.error <= self.limit

    def __str__(self) -> str:
        unit = "of the largest logit" if self.measure == "logits" else "nats"
        verdict = "parity held" if self.held else "PARITY MISSED"
        where = self.engine if self.computed == "float32" else f"{self.engine} in {self.computed}"
        return (
            f"{verdict} in {where}: {self.measure} differ by at most {self.error:.2g} {unit} "
            f"(limit {self.limit:.2g}) at {self.positions} positions, the top token agrees at "
            f"{self.top_agreement:.1%}"
        )


class ExportRecord(Record):
    """The content of export.json."""

    format: Literal["headwise-export/1"] = "headwise-export/1"
    key: str
    model: str
    target: str
    architecture: str
    dtype: str
    quantize: str | None = None
    command: str = ""
    parity: Parity | None = None
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)


def read_export(folder: Path) -> ExportRecord:
    """The record of an exported folder."""
    return read_record(folder / EXPORT_RECORD, ExportRecord)


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The export's path, and its record."""

    out: Path
    record: ExportRecord

    @property
    def parity(self) -> Parity | None:
        """How close the exported model is, None if it was not checked."""
        return self.record.parity

    @property
    def held(self) -> bool:
        """Whether the check passed, or was skipped."""
        return self.parity is None or self.parity.held
