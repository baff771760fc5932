"""A model cut to a plan and written to a folder, resumable layer by layer.

Only the cut parts are new; everything else is copied bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.dynamic_module_utils import custom_object_save

from headwise.artifacts import versions
from headwise.cutting.sequential import CutJob, calibration_batches, cut_layers, layer_part
from headwise.cutting.settings import CutSettings
from headwise.data.tokens import refuse_unknown_tokens
from headwise.errors import HeadwiseError
from headwise.memory import cut_need
from headwise.models.backbones_headwise import Projections
from headwise.models.build import headwise_config
from headwise.models.checkpoint import DEFAULT_SHARD_BYTES, CheckpointWriter
from headwise.models.layer_stream import LayerStream
from headwise.models.record import CUT_RECORD, CutRecord, read_cut_record
from headwise.models.shapes import TASKS
from headwise.plan import Origin, Plan
from headwise.profiling.format import Profile
from headwise.profiling.worth import kept_neurons
from headwise.progress import Progress, silent
from headwise.records import write_record
from headwise.runs import Run, key_of, made_from, resume
from headwise.source import Source, processor_name

# mypy: disable-error-code="no-untyped-call"


def write_checkpoint(
    folder: Path,
    source: Source,
    stream: LayerStream,
    *,
    plan: Plan,
    run: Run,
    record: CutRecord,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write the cut model into an empty folder, tensor by tensor."""
    config = headwise_config(plan, stream.config, stream.task, planes=stream.planes)
    with torch.device("meta"):
        model = TASKS[stream.task](config)
    config.architectures = [type(model).__name__]
    processor = processor_name(stream.config)
    if processor is not None:  # a preprocessor_config.json may leave it to the family's name
        config.image_processor_type = processor
    made: tuple[int, dict[str, torch.Tensor]] = (-1, {})
    with CheckpointWriter(folder, max_shard_bytes) as writer:
        for name in model.state_dict():
            stock = _stock_name(name, stream)
            layer, inside = _place(stock, stream)
            if layer not in (None, made[0]):
                made = (layer, _layer_state(stream, run.get(layer_part(layer))))
            if layer is not None and inside in made[1]:
                writer.put(name, made[1][inside])
            elif stock in stream.names:
                writer.put(name, stream.checkpoint.tensor(stream.names[stock]))
            # What else the source lacks it may lack: a tied weight, a pooler.
    custom_object_save(model, folder, config=config)  # type: ignore[arg-type]
    config.save_pretrained(folder)
    source.copy_companions(folder)
    write_record(folder / CUT_RECORD, record)


def _stock_name(name: str, stream: LayerStream) -> str:
    """The source's name of a weight; a bare model has no prefix there."""
    name = name.removeprefix("backbone.")
    if stream.task != "bare":
        return name
    return name.removeprefix(f"{stream.model.base_model_prefix}.")


def _place(stock: str, stream: LayerStream) -> tuple[int | None, str]:
    """The layer of a weight and its name in it; no layer for other weights."""
    start = f"{stream.prefix}."
    if not stock.startswith(start):
        return None, stock
    layer, _, inside = stock.removeprefix(start).partition(".")
    return int(layer), inside


def _layer_state(stream: LayerStream, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What was cut of a layer, by its names in the planned layer."""
    return stream.planned_state(Projections.of_tensors(stored))


@dataclass(frozen=True, slots=True)
class CutRequest:
    """The model to cut, its profile, and the plan."""

    source: Source
    profile: Profile
    plan: Plan
    settings: CutSettings
    command: str = ""

    def inputs(self) -> dict[str, Any]:
        """The inputs of the cut layers, without the command and date that made the plan."""
        plan = self.plan.model_copy(update={"origin": Origin()})
        return {
            "model": self.source.name,
            "profile_sha256": self.profile.sha256,
            "plan": plan.to_dict(),
            "settings": self.settings.to_dict(),
        }

    @property
    def key(self) -> str:
        """The key that identifies a finished cut."""
        return key_of("cut", self.inputs())


def cut_model(
    request: CutRequest,
    output: Path,
    *,
    force: bool = False,
    progress: Progress = silent,
    last: tuple[str, ...] = (),
    finishing: Callable[[Path], None] | None = None,
) -> CutRecord:
    """Cut the model into `output`, a Hugging Face folder; returns its record headwise.json.

    `finishing` may add files to the new folder before it takes its place; `last` are files that
    the caller adds later (see `headwise.runs.resume`).
    """
    _check(request)
    reads = [request.source.name]
    inputs = request.inputs()
    with resume(
        output, "cut", inputs, record=CUT_RECORD, force=force, reads=reads, last=last
    ) as run:
        if not run.finished:
            with contextlib.ExitStack() as ending:
                folder = _cut(request, run, progress, ending)
                if finishing is not None:
                    finishing(folder)
    return read_cut_record(output)


def is_cut(request: CutRequest, output: Path) -> bool:
    """Whether `output` is the complete result of this request."""
    return made_from(output / CUT_RECORD) == request.key


def _cut(
    request: CutRequest,
    run: Run,
    progress: Progress,
    ending: contextlib.ExitStack,
) -> Path:
    """The new folder, complete; it is renamed at the end of `ending`."""
    source = request.source
    if source.folder is not None:
        need = cut_need(source.plan, request.plan, tokens=request.profile.record.tokens)
        progress = need.check(progress, advice="use a profile of fewer tokens")
    name, rows = request.profile.inputs
    if name == "input_ids":
        refuse_unknown_tokens(rows, source.config.vocab_size)
    # Without norms no text is run then; one sequence shows the layers' calls.
    if request.settings.folds_only and not source.family.norm:
        rows = rows[:1]
    text = calibration_batches(
        torch.from_numpy(rows),
        request.settings,
        causal=source.family.causal,
        length=request.profile.record.settings["length"],
    )
    batches = [{name: some} for some in text.ids]
    stream = source.layers(batches, dtype=torch.float32)
    job = CutJob(stream, text.held_aside, request.profile, request.plan, request.settings, run)
    cut_layers(job, progress)
    record = _record(request, [run.note(layer_part(i)) for i in stream])
    folder = ending.enter_context(run.finish())
    write_checkpoint(folder, source, stream, plan=request.plan, run=run, record=record)
    return folder


def _check(request: CutRequest) -> None:
    """Refuse a plan that was fitted to another profile, and a profile of other weights."""
    fitted = request.plan.origin.profile_sha256
    if fitted is not None and fitted != request.profile.sha256:
        raise HeadwiseError(
            f"the plan was fitted to profile {fitted[:12]}…, but this is "
            f"{request.profile.sha256[:12]}…; give the profile it was fitted to, or fit it again."
        )
    planned, profiled = len(request.plan.layers), len(request.profile.plan.layers)
    if planned != profiled:
        raise HeadwiseError(
            f"the plan has {planned} layers, but the profiled model has {profiled}; fit a plan to "
            "this profile."
        )
    for i in range(profiled):
        kept_neurons(request.profile, request.plan, i)
    refuse_other_weights(request.profile, request.source)


def refuse_other_weights(profile: Profile, source: Source) -> None:
    """Raise if a profile was made from other weights than the source has."""
    if source.weights_sha256 != profile.record.weights_sha256:
        raise HeadwiseError(
            f"the profile was made from other weights than {source.name} has now; make the "
            "profile again, or give another with --profile."
        )


def _record(request: CutRequest, layers: list[dict[str, Any]]) -> CutRecord:
    return CutRecord(
        key=request.key,
        model=request.source.name,
        command=request.command,
        calibration=request.profile.record.calibration,
        profile_sha256=request.profile.sha256,
        settings=request.settings.to_dict(),
        layers=tuple(layers),
        versions=dict(versions(("headwise", "torch", "transformers", "numpy"))),
    )
