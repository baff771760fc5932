"""The cut checkpoint put together: new attention, everything else copied bit for bit."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers.dynamic_module_utils import custom_object_save

from headwise.errors import HeadwiseError
from headwise.nn.attention_headwise import PROJECTIONS
from headwise.nn.build import headwise_config
from headwise.nn.checkpoint_writer import DEFAULT_SHARD_BYTES, CheckpointWriter
from headwise.nn.companions import copy_companions
from headwise.nn.layer_store import LayerStore
from headwise.nn.layer_stream import LayerStream
from headwise.nn.reading import processor_name
from headwise.nn.shapes import TASKS
from headwise.plan import Plan

RECORD = "headwise.json"


def write_checkpoint(
    folder: Path,
    stream: LayerStream,
    plan: Plan,
    store: LayerStore,
    record: dict[str, Any],
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write the cut model into an empty folder, tensor by tensor."""
    config = headwise_config(plan, stream.config, stream.task)
    with torch.device("meta"):
        model = TASKS[stream.task](config)
    config.architectures = [type(model).__name__]
    processor = processor_name(stream.config)
    if processor is not None:  # a preprocessor_config.json may leave it to the family's name
        config.image_processor_type = processor
    sides = {
        f"{name}.{kind}": f"{side}.{kind}"
        for side, name in PROJECTIONS.items()
        for kind in ("weight", "bias")
    }
    made: tuple[int, dict[str, torch.Tensor]] = (-1, {})
    with CheckpointWriter(folder, max_shard_bytes) as writer:
        for name in model.state_dict():
            stock = _stock_name(name, stream)
            place = _place(stock, stream, sides)
            if place is not None:
                layer, tensor = place
                if made[0] != layer:
                    made = (layer, store.get(layer))
                writer.put(name, made[1][tensor])
            elif stock in stream.names:
                writer.put(name, stream.checkpoint.tensor(stream.names[stock]))
            elif not _may_be_missing(stock, stream):
                raise HeadwiseError(
                    f"{stream.checkpoint.folder} lacks {stock}, which the model needs; download "
                    "it again."
                )
    custom_object_save(model, folder, config=config)  # type: ignore[arg-type]
    config.save_pretrained(folder)
    copy_companions(stream.checkpoint.folder, folder)
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _stock_name(name: str, stream: LayerStream) -> str:
    """The source's name of a weight; a bare model goes without its own prefix there."""
    name = name.removeprefix("backbone.")
    if stream.task != "bare":
        return name
    return name.removeprefix(f"{stream.model.base_model_prefix}.")


def _place(stock: str, stream: LayerStream, sides: dict[str, str]) -> tuple[int, str] | None:
    """(layer, name in the store) of a projection of the planned attention; None for the rest."""
    start, end = f"{stream.prefix}.", f".{stream.family.attention}."
    if not stock.startswith(start) or end not in stock:
        return None
    layer, _, inside = stock.removeprefix(start).partition(end)
    return (int(layer), sides[inside]) if inside in sides else None


def _may_be_missing(stock: str, stream: LayerStream) -> bool:
    """Tied embeddings are stored once; a pooler that was never trained need not be there."""
    tied = getattr(stream.config, "tie_word_embeddings", False)
    output = stream.model.get_output_embeddings()
    head = {
        n
        for n, p in stream.model.named_parameters(remove_duplicate=False)
        if output is not None and any(p is q for q in output.parameters())
    }
    return (tied and stock in head) or "pooler" in stock
