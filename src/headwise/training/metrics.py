"""The numbers of each step, one JSON row per line.

A row is written before the checkpoint of its step, so every checkpoint finds its rows; rows
beyond it, or torn by a kill, are dropped when the run goes on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise.artifacts import write_text
from headwise.errors import OutputError

TIME_FIELDS = frozenset({"seconds", "tokens_per_second"})


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step; `tokens` and `seconds` count from the start of the run."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    tokens_per_second: float
    held_out_loss: float | None = None
    scalars: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON-ready data; a step without validation has no `held_out_loss`."""
        row: dict[str, Any] = {
            "step": self.step,
            "loss": self.loss,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
        }
        if self.held_out_loss is not None:
            row["held_out_loss"] = self.held_out_loss
        return {**row, **self.scalars}


def append_row(path: Path, record: StepRecord) -> None:
    """Add the row of a step."""
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record.to_dict(), allow_nan=False) + "\n")
    except OSError as error:
        raise OutputError(
            f"{path} could not be written at step {record.step} ({error.strerror or error}); the "
            "checkpoints are untouched; free space first."
        ) from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole rows of a metrics file; a torn last row is left out."""
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        rows.append(row)
    return rows


def drop_rows_after(path: Path, step: int) -> None:
    """Keep the rows up to `step` only."""
    rows = [row for row in read_rows(path) if row["step"] <= step]
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows), force=True)
