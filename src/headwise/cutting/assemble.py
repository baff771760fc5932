"""The cut checkpoint put together: what was cut is new, everything else copied bit for bit."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from pathlib import Path

import torch
from transformers.dynamic_module_utils import custom_object_save

from headwise.cutting.sequential import layer_part
from headwise.models.backbones_headwise import Projections
from headwise.models.build import headwise_config
from headwise.models.checkpoint import DEFAULT_SHARD_BYTES, CheckpointWriter
from headwise.models.layer_stream import LayerStream
from headwise.models.record import CUT_RECORD, CutRecord
from headwise.models.shapes import TASKS
from headwise.plan import Plan
from headwise.records import write_record
from headwise.runs import Run
from headwise.source import Source, processor_name


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
    """The source's name of a weight; a bare model goes without its own prefix there."""
    name = name.removeprefix("backbone.")
    if stream.task != "bare":
        return name
    return name.removeprefix(f"{stream.model.base_model_prefix}.")


def _place(stock: str, stream: LayerStream) -> tuple[int | None, str]:
    """(layer, name in it) of a weight; no layer for the rest."""
    start = f"{stream.prefix}."
    if not stock.startswith(start):
        return None, stock
    layer, _, inside = stock.removeprefix(start).partition(".")
    return int(layer), inside


def _layer_state(stream: LayerStream, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What was cut of a layer, by its names in the planned layer."""
    return stream.planned_state(Projections.of_tensors(stored))
