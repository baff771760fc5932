"""The folder of a comparison: what is compared, and one file per finished cell.

DIR/inputs.json               model, texts and settings; another comparison is refused
    profile/                  the profile, unless one was named
    cells/dense.json          the dense model on every text
          svd-llm@75pct.json  one recipe at one budget, written when it is finished
    work/                     measurements and models in the making; gone at the end
    compare.json, pareto.*    the result
    report.html               the same as a page
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.artifacts import write_text
from headwise.errors import OutputError
from headwise.plan import Limit

RESULT = "compare.json"
CHARTS = ("pareto.html", "pareto.svg", "pareto.png")
REPORT = "report.html"
_OURS = frozenset(
    {"inputs.json", "profile", "profile.partial", "cells", "work", RESULT, REPORT, *CHARTS}
)
# May be filled in by a later run: cells without recovery do not depend on it.
_LATER = ("recover", "profile_sha256")


@dataclass(frozen=True, slots=True)
class ComparisonFolder:
    """Where everything of a comparison is; `cut` says how our cells are made today."""

    path: Path
    cut: Mapping[str, Any] | None = None

    @property
    def inputs(self) -> Path:
        """What is compared."""
        return self.path / "inputs.json"

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
        return self.path / RESULT

    def open(self, description: dict[str, Any], *, force: bool = False) -> None:
        """Make the folder, or go on in it if it is of the same inputs; `force` starts again."""
        self._refuse_foreign()
        if force:
            self._clear()
        found = read_json(self.inputs) or {}
        differ = sorted(
            name
            for name in description
            if found
            and found.get(name) != description[name]
            and not (name in _LATER and None in (found.get(name), description[name]))
        )
        if differ:
            raise OutputError(
                f"{self.path} is a comparison that differs in {', '.join(differ)}; give another "
                "folder, or --force to start it again."
            )
        given = {name: value for name, value in description.items() if value is not None}
        write_json(self.inputs, {**description, **found, **given})

    def cell(self, name: str) -> dict[str, Any] | None:
        """A finished cell, if it is there, whole, and made as it would be today."""
        return self._current(read_json(self._cell(name)))

    def cells(self) -> Iterator[dict[str, Any]]:
        """Every finished cell of a recipe."""
        for path in sorted((self.path / "cells").glob("*@*.json")):
            found = self._current(read_json(path))
            if found is not None:
                yield found

    def missing(self, budgets: Sequence[Limit], methods: Sequence[str]) -> list[tuple[Limit, str]]:
        """The asked cells that are not finished, budget by budget."""
        return [(b, m) for b in budgets for m in methods if self.cell(f"{m}@{b}") is None]

    def put(self, name: str, cell: dict[str, Any]) -> None:
        """Save a finished cell, whole or not at all."""
        write_json(self._cell(name), cell)

    def _current(self, cell: dict[str, Any] | None) -> dict[str, Any] | None:
        """None for a cell of ours that was cut by other rules, which the rivals have not."""
        same = cell is None or self.cut is None or cell.get("cut", self.cut) == self.cut
        return cell if same else None

    def _cell(self, name: str) -> Path:
        return self.path / "cells" / f"{name.replace('%', 'pct')}.json"

    def _refuse_foreign(self) -> None:
        if self.path.is_file():
            raise OutputError(f"{self.path} is a file, but a comparison needs a folder.")
        there = list(self.path.iterdir()) if self.path.exists() else []
        foreign = sorted(p.name for p in there if p.name not in _OURS and p.name[0] != ".")
        if foreign:
            raise OutputError(
                f"{self.path} holds files that no comparison wrote ({', '.join(foreign[:3])}); "
                "give another folder."
            )

    def _clear(self) -> None:
        for name in _OURS:
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


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
