"""The files of a training run: a row of metrics per step, and checkpoints.

    metrics.jsonl                         one JSON object per step
    checkpoints/step-00000100/model.safetensors       parameters and persistent buffers
                              optimizer.safetensors   parameter name/moment
                              state.json              step, seconds, hashes of the two files

Batches and random numbers are pure functions of (seed, step), so the step is their only
state, and there are no pickles. A checkpoint gets its name only when complete; its hashes are
checked before use, and a damaged one is replaced by the one before it. A row is written before the
checkpoint of its step, so every checkpoint has its rows; later rows, and rows cut short by a kill,
are dropped when the run is resumed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from headwise.artifacts import atomic_folder, sha256, write_text
from headwise.errors import HeadwiseError, OutputError
from headwise.models.checkpoint import header
from headwise.records import (
    Frozen,
    Record,
    parse_json,
    parse_value,
    read_file,
    read_record,
    write_record,
)
from headwise.training.optimizer import moments, restore_moments
from headwise.training.sharding import like, whole_tensor

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import AdamW

TIME_FIELDS = frozenset({"seconds", "tokens_per_second"})
_FILES = ("model.safetensors", "optimizer.safetensors")
_STATE = "state.json"
_ADVICE = "restore it, or start the run again with --force"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where everything of a run lies."""

    path: Path

    @property
    def metrics(self) -> Path:
        """One JSON row per step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def plan(self) -> Path:
        """The plan the model was built from, with the vocabulary size the run uses."""
        return self.path / "plan.json"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's folder, as Hugging Face writes it."""
        return self.path / "tokenizer"

    @property
    def tokens(self) -> Path:
        """The folder of the token streams, train.npy and held-out.npy."""
        return self.path / "tokens"

    @property
    def model(self) -> Path:
        """The finished model, for AutoModelForCausalLM."""
        return self.path / "model"


class StepRecord(Frozen):
    """One optimizer step; `tokens` and `seconds` count from the start of the run."""

    step: int = Field(ge=1)
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    tokens_per_second: float
    held_out_loss: float | None = None
    scalars: dict[str, float] = Field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """The step as one flat JSON object; without validation it has no `held_out_loss`."""
        times = {
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens_per_second, 1),
        }
        return {**self.model_dump(exclude={"scalars"}, exclude_none=True), **times, **self.scalars}


@dataclass(frozen=True, slots=True)
class Position:
    """The progress of a run: steps done and seconds spent."""

    step: int = 0
    seconds: float = 0.0


def append_row(path: Path, record: StepRecord) -> None:
    """Add the row of a step."""
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record.row(), allow_nan=False) + "\n")
    except OSError as error:
        raise OutputError(
            f"{path} could not be written at step {record.step} ({error.strerror or error}); the "
            "checkpoints are untouched; free space first."
        ) from error


def read_rows(path: Path) -> list[StepRecord]:
    """The steps in a metrics file; a last row torn by a kill is left out."""
    return [record for _, record in _lines(path)]


def drop_rows_after(path: Path, step: int) -> None:
    """Keep the rows up to `step` only."""
    kept = [line for line, record in _lines(path) if record.step <= step]
    write_text(path, "".join(kept), force=True)


def _lines(path: Path) -> list[tuple[str, StepRecord]]:
    if not path.exists():
        return []
    whole = read_file(path, advice=_ADVICE).splitlines(keepends=True)
    if whole and not whole[-1].endswith("\n"):
        whole.pop()
    return [(line, _parsed_row(line, f"{path} line {n}")) for n, line in enumerate(whole, 1)]


def _parsed_row(line: str, source: str) -> StepRecord:
    row = parse_json(line, source, advice=_ADVICE)
    if isinstance(row, dict):
        known = {n: v for n, v in row.items() if n in StepRecord.model_fields and n != "scalars"}
        row = {**known, "scalars": {n: v for n, v in row.items() if n not in known}}
    return parse_value(row, StepRecord, source, advice=_ADVICE)


class CheckpointState(Record):
    """The content of a checkpoint's state.json."""

    format: Literal["headwise-checkpoint/1"] = "headwise-checkpoint/1"
    step: int = Field(ge=1)
    seconds: float
    sha256: dict[str, str]


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """What a checkpoint holds, whole and on the CPU."""

    position: Position
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


def checkpoint_content(
    model: nn.Module, optimizer: AdamW, position: Position, *, keep: bool = True
) -> CheckpointContent:
    """The content of a checkpoint; of a split model every process must ask, and some `keep` it."""
    found = weights(model, keep=keep), moments(model, optimizer, keep=keep)
    return CheckpointContent(position, *found)


def save_checkpoint(folder: Path, content: CheckpointContent, *, keep: int) -> Path:
    """Write a checkpoint into `folder`, then drop all but the newest `keep`."""
    from safetensors.torch import save_file

    position = content.position
    path = folder / f"step-{position.step:08d}"
    with atomic_folder(path, force=True, inside=True) as temporary:
        save_file(content.weights, temporary / _FILES[0])
        save_file(content.moments, temporary / _FILES[1])
        hashes = {name: sha256(temporary / name) for name in _FILES}
        state = CheckpointState(step=position.step, seconds=position.seconds, sha256=hashes)
        write_record(temporary / _STATE, state)
    drop_older(path, keep=keep)
    return path


def drop_older(newest: Path, *, keep: int) -> None:
    """Remove the checkpoints before `newest`, so that `keep` are left with it."""
    older = [path for path in checkpoints_in(newest.parent) if path <= newest]
    for path in older[:-keep]:
        shutil.rmtree(path)


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    return sorted(p for p in folder.glob("step-*") if p.is_dir())


def newest_whole(folder: Path, note: Callable[[str], None]) -> tuple[Path, Position] | None:
    """The newest checkpoint whose hashes hold, or None if there is no checkpoint at all."""
    found = checkpoints_in(folder)
    for path in reversed(found):
        try:
            state = read_record(path / _STATE, CheckpointState)
            for name in _FILES:
                header(path / name)  # as long as it says, before it is read
            if all(sha256(path / name) == state.sha256.get(name) for name in _FILES):
                return path, Position(step=state.step, seconds=state.seconds)
        except (OSError, HeadwiseError):
            pass
        note(f"{path} is damaged and was ignored.")
    if found:
        raise HeadwiseError(
            f"every checkpoint in {folder} is damaged; restore one, or start again with --force."
        )
    return None


def restore_checkpoint(path: Path, model: nn.Module, optimizer: AdamW) -> None:
    """Put a checkpoint's weights and moments into `model` and `optimizer`."""
    import torch
    from safetensors.torch import load_file

    saved, current = load_file(path / _FILES[0]), live_tensors(model)
    if saved.keys() != current.keys() or any(saved[n].shape != current[n].shape for n in current):
        differing = sorted(saved.keys() ^ current.keys()) or ["shapes"]
        raise HeadwiseError(
            f"{path} belongs to another model (they differ in {differing[0]}); resume with the "
            "plan and the version of headwise that made it."
        )
    with torch.no_grad():
        for name, tensor in saved.items():
            current[name].copy_(like(current[name], tensor))
    restore_moments(model, optimizer, load_file(path / _FILES[1]))


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones once."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    kept = model.state_dict(keep_vars=True)
    found.update({n: b for n, b in model.named_buffers() if n in kept})
    return found


def weights(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """What `live_tensors` names, on the CPU; nothing unless it is to be kept."""
    whole = ((name, whole_tensor(t.detach())) for name, t in live_tensors(model).items())
    return {name: t.cpu().contiguous() for name, t in whole if keep}
