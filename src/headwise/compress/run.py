"""A model cut from its profile and plan to a finished folder, resumable.

OUT.partial/layers/   finished layers, one file each; a killed run goes on after them
OUT                   the checkpoint, there only when it is whole
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headwise.artifacts import atomic_folder, refuse_existing, sole_writer, versions
from headwise.compress.assemble import RECORD, write_checkpoint
from headwise.compress.calibration import calibration
from headwise.compress.sequential import CutJob, cut_layers
from headwise.compress.settings import CutSettings
from headwise.errors import HeadwiseError
from headwise.nn.backbones_headwise import family_of
from headwise.nn.checkpoint import Checkpoint
from headwise.nn.layer_store import LayerStore
from headwise.nn.layer_stream import LayerStream
from headwise.nn.shapes import plan_errors
from headwise.nn.sources import local_folder
from headwise.nn.stock_names import config_of
from headwise.plan import Origin, Plan
from headwise.profile.format import Profile

CUT_FORMAT = "headwise-cut/1"
Tick = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be cut, along which directions, to which plan."""

    model: str  # folder, hub name, GGUF file, builtin:…
    profile: Profile
    plan: Plan
    settings: CutSettings
    command: str = ""


def compress(
    request: Request, output: Path, *, force: bool = False, tick: Tick | None = None
) -> dict[str, Any]:
    """Cut the model into `output`; returns the record that lies beside it as headwise.json."""
    refuse_existing(output, force=force)
    _check(request)
    partial = output.with_name(f"{output.name}.partial")
    with sole_writer(partial):
        record = _cut(request, partial, output, force=force, tick=tick)
        shutil.rmtree(partial)
    return record


def _cut(
    request: Request, partial: Path, output: Path, *, force: bool, tick: Tick | None
) -> dict[str, Any]:
    store = LayerStore(partial, _key(request))
    checkpoint = Checkpoint.open(local_folder(request.model))
    with plan_errors():
        causal = family_of(config_of(checkpoint).model_type).causal
    name, rows = request.profile.inputs
    text = calibration(
        torch.from_numpy(rows),
        request.settings,
        causal=causal,
        length=request.profile.record.settings["length"],
    )
    batches = [{name: some} for some in text.ids]
    stream = LayerStream(checkpoint, batches, dtype=torch.float32)
    job = CutJob(stream, text.aside, request.profile, request.plan, request.settings, store)
    cut_layers(job, tick)
    record = _record(request, [store.record(i) for i in stream])
    with atomic_folder(output, force=force) as folder:
        write_checkpoint(folder, stream, request.plan, store, record)
    return record


def is_finished(request: Request, output: Path) -> bool:
    """Whether `output` is the whole result of just this request."""
    try:
        record = json.loads((output / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("key") == _key(request)


def _check(request: Request) -> None:
    """Refuse a plan that was fitted to another profile."""
    fitted = request.plan.origin.profile_sha256
    if fitted is not None and fitted != request.profile.sha256:
        raise HeadwiseError(
            f"the plan was fitted to profile {fitted[:12]}…, but this is "
            f"{request.profile.sha256[:12]}…; give the profile it was fitted to, or fit it again."
        )


def _key(request: Request) -> str:
    """What the cut layers depend on: other inputs must not reuse them.

    Which command wrote the plan, and when, is not among them.
    """
    plan = request.plan.model_copy(update={"origin": Origin()})
    parts = [request.model, request.profile.sha256, plan.to_json()]
    parts.append(json.dumps(request.settings.to_dict(), sort_keys=True))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _record(request: Request, layers: list[dict[str, Any]]) -> dict[str, Any]:
    profiled = request.profile.record
    return {
        "format": CUT_FORMAT,
        "key": _key(request),
        "model": request.model,
        "command": request.command,
        "calibration": profiled.calibration,
        "profile_sha256": request.profile.sha256,
        "settings": request.settings.to_dict(),
        "layers": layers,
        "versions": dict(versions(("headwise", "torch", "transformers", "numpy"))),
    }
