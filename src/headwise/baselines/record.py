"""compare.json: the methods at every budget, counted and measured alike.

ComparisonRecord ─┬─ texts     what was measured on, and the dense model's figures there
                  ├─ methods   what every method does, and where it is from
                  └─ cells     one method at one budget: counted parameters and scores,
                               or the problem why it could not be reached
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, model_validator

from headwise.baselines.catalogue import Counts, Method
from headwise.measure.record import Role
from headwise.models.record import CalibrationRecord
from headwise.records import Frozen, Record, read_record

COMPARE_RECORD = "compare.json"
CHARTS = ("pareto.html", "pareto.svg", "pareto.png")  # of the result, beside it


class ComparedText(Frozen):
    """A text that every method was measured on; figures that are infinite are None."""

    source: str
    sha256: str
    role: Role
    tokens: int
    window: int
    stride: int
    dense_nll: float
    dense_perplexity: float | None


class Score(Frozen):
    """A method on one text; figures that are infinite are None."""

    nll: float
    perplexity: float | None
    ratio: float | None  # perplexity ÷ dense


class ComparisonCell(Frozen):
    """One method at one budget; a budget it cannot reach has a problem and no figures."""

    method: str
    budget: str
    amount: int  # parameters allowed, of attention or of the model
    attn_params: int | None = None  # and counted
    params: int | None = None
    share: float | None = None  # counted, of what the budget counts
    texts: tuple[Score, ...] = ()
    problem: str | None = None
    cut: dict[str, JsonValue] | None = None  # settings of our own cut
    recovery: dict[str, JsonValue] | None = None
    seconds: float | None = None


class DenseText(Frozen):
    """The dense model on one text."""

    tokens: int
    window: int
    stride: int
    nll: float


class DenseCell(Frozen):
    """The dense model, which every method is compared with."""

    attn_params: int
    params: int | None = None
    texts: tuple[DenseText, ...]
    weights_sha256: str


class ComparisonRecord(Record):
    """The content of compare.json."""

    format: Literal["headwise-compare/2"] = "headwise-compare/2"
    model: str
    weights_sha256: str
    attn_params: int  # of the dense model
    params: int | None = None
    counts: Counts = "attn_params"  # what the budgets count
    calibration: CalibrationRecord
    profile_sha256: str
    texts: tuple[ComparedText, ...]
    methods: dict[str, Method]
    cells: tuple[ComparisonCell, ...]
    notes: tuple[str, ...] = ()
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    seeds: dict[str, int] = Field(default_factory=dict)
    command: str = ""
    versions: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _scored_on_every_text(self) -> ComparisonRecord:
        for i, cell in enumerate(self.cells):
            if cell.texts and (len(cell.texts) != len(self.texts) or cell.share is None):
                raise ValueError(
                    f"cells[{i}] must have a share and one score for each of the "
                    f"{len(self.texts)} texts, got {len(cell.texts)} scores"
                )
        return self

    @property
    def counted(self) -> str:
        """What the budgets count, in words."""
        return "attention parameters" if self.counts == "attn_params" else "parameters"

    @property
    def measured(self) -> tuple[ComparisonCell, ...]:
        """The cells that have figures."""
        return tuple(cell for cell in self.cells if cell.texts)


def read_comparison(path: Path) -> ComparisonRecord:
    """The record of a comparison, by its folder or its file."""
    file = path / COMPARE_RECORD if path.is_dir() else path
    return read_record(file, ComparisonRecord, advice="run `headwise compare` again")
