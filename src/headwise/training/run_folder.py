"""The folder of a run.

RUN/run.json          settings, text, versions, command, status
    plan.json         the plan, with the vocabulary size the run uses
    tokenizer/        the tokenizer, as Hugging Face writes it
    tokens/           the token streams: train.npy, held-out.npy
    metrics.jsonl     one row per step
    checkpoints/      step-00000100/ …, the newest few
    model/            the finished model, for AutoModelForCausalLM
    report.html       what came out, for people
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.artifacts import write_text
from headwise.errors import HeadwiseError, OutputError

RUN_FORMAT = "headwise-run/1"
_OURS = frozenset(
    {
        "run.json",
        "plan.json",
        "tokenizer",
        "tokens",
        "metrics.jsonl",
        "checkpoints",
        "model",
        "report.html",
    }
)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where everything of a run is."""

    path: Path

    @property
    def record(self) -> Path:
        """Settings, text, versions, command and status."""
        return self.path / "run.json"

    @property
    def plan(self) -> Path:
        """The plan the model was built from."""
        return self.path / "plan.json"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's folder."""
        return self.path / "tokenizer"

    @property
    def tokens(self) -> Path:
        """The folder of the token streams."""
        return self.path / "tokens"

    @property
    def metrics(self) -> Path:
        """One JSON row per step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The finished model."""
        return self.path / "model"

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.path / "report.html"

    def read_record(self) -> dict[str, Any]:
        """What run.json holds."""
        try:
            record = json.loads(self.record.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise HeadwiseError(
                f"{self.record} cannot be read as the record of a run ({error}); start again with "
                "--force or another folder."
            ) from error
        if not isinstance(record, dict) or record.get("format") != RUN_FORMAT:
            raise HeadwiseError(
                f"{self.record} must have the format {RUN_FORMAT!r}; resume it with the version "
                "of headwise that wrote it, or start again with --force."
            )
        return record

    def write_record(self, record: dict[str, Any]) -> None:
        """Write run.json, whole or not at all."""
        document = {"format": RUN_FORMAT, **record}
        write_text(self.record, json.dumps(document, indent=2, allow_nan=False) + "\n", force=True)

    def update_record(self, **changes: Any) -> None:
        """Change some keys of run.json."""
        self.write_record({**self.read_record(), **changes})

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Stand aside for a new run; if making it fails, the earlier one is back.

        A folder that holds anything but a run is refused.
        """
        self._refuse_foreign()
        aside = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.old")
        earlier = self.path.exists() and any(self.path.iterdir())
        if earlier:
            self.path.rename(aside)
        try:
            yield
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            if earlier:
                aside.rename(self.path)
            raise
        if earlier:
            shutil.rmtree(aside)

    def _refuse_foreign(self) -> None:
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise OutputError(f"{self.path} is a file, but a run needs a folder; give another.")
        foreign = sorted(
            p.name for p in self.path.iterdir() if p.name not in _OURS and not _leftover(p)
        )
        if foreign:
            raise OutputError(
                f"{self.path} holds files that no run wrote ({', '.join(foreign[:3])}), so it is "
                "not overwritten; give another folder."
            )

    def sweep(self) -> None:
        """Remove what a kill in the middle of a write left behind."""
        for folder in (self.path, self.checkpoints):
            for path in folder.iterdir() if folder.is_dir() else ():
                if _leftover(path):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _leftover(path: Path) -> bool:
    """Whether `path` is a temporary name of `artifacts`."""
    return path.name.startswith(".") and path.suffix in {".tmp", ".old"}
