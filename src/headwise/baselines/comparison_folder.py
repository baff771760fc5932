"""The folder of a comparison: what is compared, and one file per finished cell.

DIR/run.json                  model, texts and settings; another comparison is refused
    profile/                  the profile, unless one was named
    cells/dense.json          the dense model on every text
          svd-llm@75pct.json  one method at one budget, written when it is finished
    work/                     measurements and models in the making; gone at the end
    compare.json, pareto.*    the result
    report.html               the same as a page
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from headwise.artifacts import write_text
from headwise.baselines.record import COMPARE_RECORD, ComparisonCell, DenseCell
from headwise.plan import Limit

Cell = TypeVar("Cell", ComparisonCell, DenseCell)
CHARTS = ("pareto.html", "pareto.svg", "pareto.png")


@dataclass(frozen=True, slots=True)
class ComparisonFolder:
    """Where everything of a comparison is; `cut` says how our cells are made today."""

    path: Path
    cut: Mapping[str, Any] | None = None

    @property
    def profile(self) -> Path:
        """The profile, unless the user named one."""
        return self.path / "profile"

    @property
    def work(self) -> Path:
        """What can be removed when all cells are finished."""
        return self.path / "work"

    @property
    def result(self) -> Path:
        """The finished document."""
        return self.path / COMPARE_RECORD

    @property
    def dense(self) -> DenseCell | None:
        """The dense model's figures, if they are there."""
        return _read_cell(self._cell("dense"), DenseCell)

    def cell(self, name: str) -> ComparisonCell | None:
        """A finished cell, if it is there, whole, and made as it would be today."""
        return self._current(_read_cell(self._cell(name), ComparisonCell))

    def cells(self) -> Iterator[ComparisonCell]:
        """Every finished cell of a method."""
        for path in sorted((self.path / "cells").glob("*@*.json")):
            found = self._current(_read_cell(path, ComparisonCell))
            if found is not None:
                yield found

    def missing(self, budgets: Sequence[Limit], methods: Sequence[str]) -> list[tuple[Limit, str]]:
        """The asked cells that are not finished, budget by budget."""
        return [(b, m) for b in budgets for m in methods if self.cell(f"{m}@{b}") is None]

    def put(self, name: str, cell: ComparisonCell | DenseCell) -> None:
        """Save a finished cell, whole or not at all."""
        write_json(self._cell(name), cell.to_dict())

    def _current(self, cell: ComparisonCell | None) -> ComparisonCell | None:
        """None for a cell of ours that was cut with other settings; the others have none."""
        if cell is None or None in (self.cut, cell.cut) or cell.cut == self.cut:
            return cell
        return None

    def _cell(self, name: str) -> Path:
        return self.path / "cells" / f"{name.replace('%', 'pct')}.json"


def _read_cell(path: Path, kind: type[Cell]) -> Cell | None:
    """A cell, or None if it is not there or damaged: then it is made again."""
    found = read_json(path)
    try:
        return None if found is None else kind.model_validate(found)
    except ValidationError:
        return None


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None if it is not there or broken."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON object, whole or not at all."""
    write_text(path, json.dumps(document, indent=2, allow_nan=False) + "\n", force=True)
