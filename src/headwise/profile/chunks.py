"""Map: every few sequences become one file of sums, so a killed run loses a few sequences at most.

    PROFILE.partial/
      run.json                    what is being measured; another run's chunks are refused
      chunks/00000.safetensors    sums over sequences 0 … 3
      chunks/00001.safetensors    sums over sequences 4 … 7        (each whole or not there)

A chunk depends on its sequences only: not on who computes it, when, or after how many kills. Many
processes share the work by taking every n-th chunk.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from headwise.artifacts import atomic_file, versions, write_text
from headwise.errors import HeadwiseError, OutputError
from headwise.nn.build import plan_of
from headwise.nn.modeling_headwise import HeadwisePreTrainedModel
from headwise.profile.objectives import probe
from headwise.profile.recorder import Chunk, recording
from headwise.profile.settings import ProfileSettings
from headwise.profile.source import Sequences, input_device, weights_sha256

Tick = Callable[[int, int], None]  # chunks done, chunks in all


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be measured."""

    model: HeadwisePreTrainedModel
    name: str  # of the model, as the user gave it
    sequences: Sequences
    settings: ProfileSettings

    def __post_init__(self) -> None:
        context = plan_of(self.model).shape.context
        if self.settings.length > context:
            raise HeadwiseError(
                f"length must be at most the model's context of {context} tokens, got "
                f"{self.settings.length}."
            )

    @property
    def n_chunks(self) -> int:
        """Files this job makes."""
        return -(-len(self.sequences) // self.settings.chunk)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The context lengths of the attention rows looked at."""
        lengths = self.settings.lengths
        return lengths if plan_of(self.model).shape.causal else lengths[-1:]


def described(job: Job) -> dict[str, Any]:
    """All that a chunk depends on, as JSON-ready data."""
    text = job.sequences
    return {
        "model": job.name,
        "weights_sha256": weights_sha256(job.model),
        "dtype": str(job.model.dtype).removeprefix("torch."),
        "device": input_device(job.model).type,
        "objective": text.objective,
        "text": {"source": text.source, "sha256": text.sha256},
        "settings": job.settings.to_dict(),
        "sequences": len(text),
        "versions": dict(versions(("headwise", "numpy", "torch", "transformers"))),
    }


class Partial:
    """The folder of an unfinished profile."""

    def __init__(self, output: Path) -> None:
        self.folder = output.with_name(f"{output.name}.partial")

    def open(self, description: dict[str, Any], *, force: bool = False) -> None:
        """Make the folder, or go on in it if it holds chunks of the same run."""
        marker = self.folder / "run.json"
        if self.folder.exists():
            found = _json(marker)
            if found == description:
                return
            differ = sorted(k for k in description if found.get(k) != description[k])
            if marker.exists() and not force:
                raise OutputError(
                    f"{self.folder} holds an unfinished profile that differs in "
                    f"{', '.join(differ)}; finish it with its own settings, remove it, or give "
                    "--force."
                )
            shutil.rmtree(self.folder)
        write_text(marker, json.dumps(description, indent=2) + "\n")

    def path(self, index: int) -> Path:
        """The file of one chunk."""
        return self.folder / "chunks" / f"{index:05d}.safetensors"

    def has(self, index: int) -> bool:
        """Whether a chunk is there and whole; a broken file is removed."""
        path = self.path(index)
        if not path.exists():
            return False
        try:
            with safe_open(path, framework="np"):
                return True
        except (SafetensorError, OSError):
            path.unlink()
            return False

    def remove(self) -> None:
        """Remove the folder when the profile is whole."""
        shutil.rmtree(self.folder, ignore_errors=True)


def measure_chunks(
    job: Job, partial: Partial, *, rank: int = 0, processes: int = 1, tick: Tick | None = None
) -> None:
    """Compute the missing ones of chunks rank, rank + processes, …"""
    own = range(rank, job.n_chunks, processes)
    for done, index in enumerate(own):
        if tick is not None:
            tick(done, len(own))
        if not partial.has(index):
            tensors = {k: v.contiguous().cpu() for k, v in measured(job, index).items()}
            with atomic_file(partial.path(index)) as temporary:
                save_file(tensors, temporary)
    if tick is not None:
        tick(len(own), len(own))


def measured(job: Job, index: int) -> Chunk:
    """The sums of one chunk: a forward and a backward over its sequences."""
    first = index * job.settings.chunk
    rows = job.sequences.inputs[first : first + job.settings.chunk]
    numbers = tuple(range(first, first + len(rows)))
    inputs = torch.from_numpy(rows).to(input_device(job.model))
    if inputs.is_floating_point():
        inputs = inputs.to(job.model.dtype)
    objective = job.sequences.objective
    batch = probe(objective, inputs, numbers, job.settings.seed, job.sequences.mask_token)
    cached = {"use_cache": False} if objective == "next-token" else {}
    with torch.enable_grad(), recording(job.model, job.settings.lengths) as chunk:
        losses, counts = batch.losses(job.model(**{job.sequences.name: batch.inputs}, **cached))
        if not bool(torch.isfinite(losses).all()):
            raise HeadwiseError(
                f"the model's loss on sequences {numbers[0]} to {numbers[-1]} must be finite, got "
                "NaN or infinity; use --dtype fp32 or another text."
            )
        losses.sum().backward()  # type: ignore[no-untyped-call]
    chunk["losses"], chunk["counts"] = losses.detach(), counts
    for name, tensor in chunk.items():
        if not bool(torch.isfinite(tensor).all()):
            layer, _, what = name.partition(".")
            raise HeadwiseError(
                f"{what} of layer {layer} must be finite, got NaN or infinite numbers on sequences "
                f"{numbers[0]} to {numbers[-1]}; use --dtype fp32 or another text."
            )
    return chunk


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
