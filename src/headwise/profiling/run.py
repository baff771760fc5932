"""A profile run: map and reduce, resumable.

    map      every few sequences become one part of sums (a *chunk*); a kill loses one at most
    reduce   the chunks, added in the order of the text, become the profile's folder

A chunk depends only on its sequences: not on the process, the time, or earlier kills. Several
processes share the work by taking every n-th chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import align_module_device  # type: ignore[import-untyped]
from safetensors.numpy import save

from headwise.artifacts import sha256, versions
from headwise.devices import on_main
from headwise.errors import HeadwiseError, TheoryError
from headwise.models.attention_headwise import HeadwiseAttention
from headwise.models.backbones_headwise import family_of, stock_attentions
from headwise.models.build import inner, plan_of
from headwise.models.modeling_headwise import HeadwisePreTrainedModel
from headwise.plan import PLAN_FORMAT
from headwise.profiling.format import RECORD, TENSORS, Profile, ProfileRecord
from headwise.profiling.recorder import Chunk, recording
from headwise.profiling.reduction import Chunks, reduced_layer
from headwise.profiling.settings import ProfileSettings
from headwise.profiling.source import Sequences, input_device, probe, weights_sha256
from headwise.progress import Progress, silent
from headwise.records import write_record
from headwise.runs import Run, resume

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

Finishing = Callable[[Path], None]
_NORMS_NOTE = (
    "this model normalises queries and keys that are rotated in part, so the query-key side is "
    "not cut and only values are planned"
)


@dataclass(frozen=True, slots=True)
class ProfileJob:
    """The model and the sequences to measure."""

    model: HeadwisePreTrainedModel
    name: str  # of the model, as the user gave it
    sequences: Sequences
    settings: ProfileSettings
    weights_sha256: str | None = None  # of the files; None: a live model, whose own is taken

    def __post_init__(self) -> None:
        context = plan_of(self.model).shape.context
        if self.settings.length > context:
            raise HeadwiseError(
                f"length must be at most the model's context of {context} tokens, got "
                f"{self.settings.length}."
            )

    @property
    def n_chunks(self) -> int:
        """Parts this job makes."""
        return -(-len(self.sequences) // self.settings.chunk)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The context lengths at which attention rows are looked at."""
        lengths = self.settings.lengths
        return lengths if plan_of(self.model).shape.causal else lengths[-1:]

    def inputs(self) -> dict[str, Any]:
        """Everything that determines the result, as JSON-ready data."""
        text = self.sequences
        named: dict[str, Any] = {"source": text.source, "sha256": text.sha256}
        if text.parts_sha256:
            named["parts_sha256"] = list(text.parts_sha256)
        return {
            "model": self.name,
            "weights_sha256": self.weights_sha256 or weights_sha256(self.model),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": input_device(self.model).type,
            "objective": text.objective,
            "text": named,
            "settings": self.settings.to_dict(),
            "sequences": len(text),
            "versions": dict(versions(("headwise", "numpy", "torch", "transformers"))),
        }


def profile_model(
    job: ProfileJob,
    output: Path,
    *,
    force: bool = False,
    progress: Progress = silent,
    finishing: Finishing | None = None,
    last: tuple[str, ...] = (),
) -> Profile:
    """Measure in this process and write the profile; resumes where a killed run stopped.

    `finishing` may add files to the new folder before it takes its place; `last` are files that
    the caller adds later (see `headwise.runs.resume`).
    """
    inputs = job.inputs()
    with resume(output, "profile", inputs, record=RECORD, force=force, last=last) as run:
        if not run.finished:
            measure_chunks(job, run, progress=progress)
            write_profile(job, run, inputs, finishing)
    return Profile.read(output)


def profile_shared(
    job: ProfileJob,
    output: Path,
    processes: Accelerator,
    *,
    force: bool = False,
    progress: Progress = silent,
    finishing: Finishing | None = None,
    last: tuple[str, ...] = (),
) -> Profile:
    """The same by several processes that see one disk; all of them return it."""
    inputs = job.inputs()
    with contextlib.ExitStack() as held:
        opened: list[Run] = []
        begin = resume(output, "profile", inputs, record=RECORD, force=force, last=last)
        on_main(processes, lambda: opened.append(held.enter_context(begin)))
        run = opened[0] if opened else Run.beside(output)
        rank, world = processes.process_index, processes.num_processes
        heard = progress if processes.is_main_process else silent
        if not run.finished:
            measure_chunks(job, run, rank=rank, processes=world, progress=heard)
            processes.wait_for_everyone()
            on_main(processes, lambda: write_profile(job, run, inputs, finishing))
    processes.wait_for_everyone()
    return Profile.read(output)


def measure_chunks(
    job: ProfileJob,
    run: Run,
    *,
    rank: int = 0,
    processes: int = 1,
    progress: Progress = silent,
) -> None:
    """Compute the missing ones of chunks rank, rank + processes, …"""
    own = range(rank, job.n_chunks, processes)
    for done, index in enumerate(own):
        progress("profiling", done, len(own))
        if not run.has(chunk_name(index)):
            run.put(chunk_name(index), measure_chunk(job, index))
    progress("profiling", len(own), len(own))


def chunk_name(index: int) -> str:
    """The name of a chunk among the parts of a run."""
    return f"chunk-{index:05d}"


def measure_chunk(job: ProfileJob, index: int) -> Chunk:
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
        try:
            outputs = job.model(**{job.sequences.name: batch.inputs}, **cached)
        except TheoryError as error:  # of the recorder, which asks for probabilities
            raise HeadwiseError(
                f"the attention on sequences {numbers[0]} to {numbers[-1]} must be of finite "
                "numbers, got NaN or infinity; use --dtype fp32, or mend the model."
            ) from error
        losses, counts = batch.losses(outputs)
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


def write_profile(
    job: ProfileJob, run: Run, inputs: dict[str, Any], finishing: Finishing | None = None
) -> None:
    """Reduce the chunks to the profile's folder."""
    plan, attentions = plan_of(job.model), job.model.attentions()
    stock = inner(job.model)
    mlp = family_of(stock.config.model_type).mlp
    downs = [layer.get_submodule(mlp.down) for layer, _ in stock_attentions(stock)]
    chunks, losses = _chunks(job, run)
    # Columns without positions are cut along mixtures of them, which a norm has no weights for.
    qk_whole = any(
        hasattr(a, "q_norm") and c.rotary_dim < c.qk_dim for a in attentions for c in a.classes
    )
    centred = all(a.o_proj.bias is not None for a in attentions)
    tensors: dict[str, np.ndarray] = dict([job.sequences.stored])
    for i, (layer, attention) in enumerate(zip(plan.layers, attentions, strict=True)):
        arrays = reduced_layer(
            chunks,
            i,
            layer,
            _output_matrices(attention),
            _squared_columns(downs[i], transposed=mlp.transposed),
            length=job.settings.length,
            centred=centred,
            qk_whole=qk_whole,
        )
        tensors |= {f"layers.{i}.{n}": _single(x) for n, x in arrays.items()}
    loss = float(losses.sum() / chunks.counts.sum())
    with run.finish() as folder:
        (folder / TENSORS).write_bytes(save(tensors))
        record = ProfileRecord(
            key=run.key,
            **inputs,
            tokens=chunks.tokens,
            loss=None if inputs["objective"] == "embedding" else loss,
            lengths=job.lengths,
            qk_whole=qk_whole,
            fixed_groups=False,
            centred=centred,
            notes=(_NORMS_NOTE,) if qk_whole else (),
            plan={"format": PLAN_FORMAT, **plan.to_dict()},
            tensors={name: x.shape for name, x in tensors.items()},
            tensors_sha256=sha256(folder / TENSORS),
        )
        write_record(folder / RECORD, record)
        if finishing is not None:
            finishing(folder)


def _chunks(job: ProfileJob, run: Run) -> tuple[Chunks, np.ndarray]:
    names = tuple(chunk_name(i) for i in range(job.n_chunks))
    found = [run.get(name, "np") for name in names]
    losses, counts = (
        np.concatenate([part[key].astype(np.float64) for part in found])
        for key in ("losses", "counts")
    )
    return Chunks(run, names, counts, len(job.sequences) * job.settings.length), losses


def _output_matrices(attention: HeadwiseAttention) -> np.ndarray:
    """W_O of every head group, those of its query heads side by side: groups × vo × queries·d."""
    heads = attention.classes[0]
    with align_module_device(attention.o_proj):
        weight = attention.o_proj.weight.detach().to("cpu", torch.float64).numpy().T
    apart = weight.reshape(heads.n_heads, heads.queries, heads.vo_dim, -1)
    return np.ascontiguousarray(apart.swapaxes(1, 2).reshape(heads.n_heads, heads.vo_dim, -1))


def _squared_columns(down: Any, *, transposed: bool) -> np.ndarray:
    """What a neuron of size 1 adds to the squared output, for every neuron."""
    with align_module_device(down):
        weight = down.weight.detach().to("cpu", torch.float64)
        return np.asarray((weight.T if transposed else weight).square().sum(0))


def _single(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, dtype=np.float32)
