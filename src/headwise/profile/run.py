"""A profile run from its chunks to its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import align_module_device  # type: ignore[import-untyped]
from safetensors import safe_open
from safetensors.numpy import save

from headwise.artifacts import atomic_folder, refuse_existing, sha256
from headwise.nn.attention_headwise import HeadwiseAttention
from headwise.nn.build import plan_of
from headwise.plan import PLAN_FORMAT
from headwise.profile.chunks import Job, Partial, Tick, described, measure_chunks
from headwise.profile.format import RECORD, TENSORS, Profile, ProfileRecord
from headwise.profile.reduction import Chunks, reduced_layer

_NORMS_NOTE = (
    "this family normalises its queries and keys, so the query-key side is left alone and only "
    "values are planned"
)


def profile_model(
    job: Job, output: Path, *, force: bool = False, tick: Tick | None = None
) -> Profile:
    """Measure in this process and write the profile; goes on where a killed run stopped."""
    refuse_existing(output, force=force)
    description = described(job)
    partial = Partial(output)
    partial.open(description, force=force)
    measure_chunks(job, partial, tick=tick)
    return finish(job, partial, output, description, force=force)


def finish(
    job: Job, partial: Partial, output: Path, description: dict[str, Any], *, force: bool = False
) -> Profile:
    """Reduce the chunks to the profile folder, then remove them."""
    plan, attentions = plan_of(job.model), job.model.attentions()
    chunks, losses = _chunks(job, partial)
    qk_whole = any(hasattr(a, "q_norm") for a in attentions)
    centred = all(a.o_proj.bias is not None for a in attentions)
    tensors: dict[str, np.ndarray] = dict([job.sequences.stored])
    for i, (layer, attention) in enumerate(zip(plan.layers, attentions, strict=True)):
        arrays = reduced_layer(
            chunks,
            i,
            layer,
            _output_matrices(attention),
            length=job.settings.length,
            centred=centred,
            qk_whole=qk_whole,
        )
        tensors |= {f"layers.{i}.{n}": _single(x) for n, x in arrays.items()}
    loss = float(losses.sum() / chunks.counts.sum())
    with atomic_folder(output, force=force) as folder:
        (folder / TENSORS).write_bytes(save(tensors))
        record = ProfileRecord(
            **description,
            tokens=chunks.tokens,
            loss=None if description["objective"] == "embedding" else loss,
            lengths=job.lengths,
            qk_whole=qk_whole,
            centred=centred,
            notes=(_NORMS_NOTE,) if qk_whole else (),
            plan={"format": PLAN_FORMAT, **plan.to_dict()},
            tensors={name: x.shape for name, x in tensors.items()},
            tensors_sha256=sha256(folder / TENSORS),
        )
        text = json.dumps(record.model_dump(mode="json"), indent=2, sort_keys=True)
        (folder / RECORD).write_text(text + "\n", encoding="utf-8")
    partial.remove()
    return Profile.read(output)


def _chunks(job: Job, partial: Partial) -> tuple[Chunks, np.ndarray]:
    paths = tuple(partial.path(i) for i in range(job.n_chunks))
    losses, counts = [], []
    for path in paths:
        with safe_open(path, framework="np") as file:
            losses.append(file.get_tensor("losses").astype(np.float64))
            counts.append(file.get_tensor("counts").astype(np.float64))
    found = Chunks(paths, np.concatenate(counts), len(job.sequences) * job.settings.length)
    return found, np.concatenate(losses)


def _output_matrices(attention: HeadwiseAttention) -> np.ndarray:
    """W_O of every head group, those of its query heads side by side: groups × vo × queries·d."""
    heads = attention.classes[0]
    with align_module_device(attention.o_proj):
        weight = attention.o_proj.weight.detach().to("cpu", torch.float64).numpy().T
    apart = weight.reshape(heads.n_heads, heads.queries, heads.vo_dim, -1)
    return np.ascontiguousarray(apart.swapaxes(1, 2).reshape(heads.n_heads, heads.vo_dim, -1))


def _single(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, dtype=np.float32)
