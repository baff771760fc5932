"""Checkpoints without pickles: weights and optimizer moments by name, in safetensors.

    step-00000100/model.safetensors       parameters and persistent buffers
                  optimizer.safetensors   parameter name/moment
                  state.json              step, seconds, hashes of the two files

Batches and random numbers are pure functions of (seed, step), so the step is all the state they
have. A folder appears under its name only when whole; each file's hash is checked before use, and
a damaged checkpoint gives way to the one before it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.artifacts import atomic_folder, sha256
from headwise.errors import HeadwiseError
from headwise.training.optimizer import moments, restore_moments

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import AdamW

CHECKPOINT_FORMAT = "headwise-checkpoint/1"
_FILES = ("model.safetensors", "optimizer.safetensors")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: steps done and seconds spent."""

    step: int = 0
    seconds: float = 0.0


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: AdamW, progress: Progress, *, keep: int
) -> Path:
    """Write the checkpoint of `progress` into `folder`, then drop all but the newest `keep`."""
    from safetensors.torch import save_file

    path = folder / f"step-{progress.step:08d}"
    with atomic_folder(path, force=True) as temporary:
        save_file(weights(model), temporary / _FILES[0])
        save_file(moments(model, optimizer), temporary / _FILES[1])
        state = {
            "format": CHECKPOINT_FORMAT,
            "step": progress.step,
            "seconds": progress.seconds,
            "sha256": {name: sha256(temporary / name) for name in _FILES},
        }
        (temporary / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    for old in steps_on_disk(folder)[:-keep]:
        shutil.rmtree(old)
    return path


def steps_on_disk(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def newest_whole(folder: Path, note: Callable[[str], None]) -> tuple[Path, Progress] | None:
    """The newest checkpoint whose hashes hold, or None if there is no checkpoint at all."""
    found = steps_on_disk(folder)
    for path in reversed(found):
        try:
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            whole = state["format"] == CHECKPOINT_FORMAT and all(
                sha256(path / name) == state["sha256"][name] for name in _FILES
            )
            progress = Progress(step=state["step"], seconds=state["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            whole = False
        if whole:
            return path, progress
        note(f"{path} is damaged and was left aside.")
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
        odd = sorted(saved.keys() ^ current.keys()) or ["shapes"]
        raise HeadwiseError(
            f"{path} is of another model (they differ in {odd[0]}); resume with the plan and the "
            "version of headwise that made it."
        )
    with torch.no_grad():
        for name, tensor in saved.items():
            current[name].copy_(tensor)
    restore_moments(model, optimizer, load_file(path / _FILES[1]))


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones once."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    kept = model.state_dict(keep_vars=True)
    found.update({n: b for n, b in model.named_buffers() if n in kept})
    return found


def weights(model: nn.Module) -> dict[str, Tensor]:
    """What `live_tensors` names, on the CPU."""
    return {n: t.detach().cpu().contiguous() for n, t in live_tensors(model).items()}
