"""What every export shares: the request, its resumable parts, its record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headwise.artifacts import versions
from headwise.errors import HeadwiseError, quoted
from headwise.exporting.reading import Reader
from headwise.exporting.record import ExportRecord, Parity
from headwise.progress import Progress
from headwise.runs import Run, key_of
from headwise.source import Source

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_PACKAGES = ("headwise", "torch", "transformers", "gguf", "xllamacpp", "onnx", "onnxruntime")


class Form(Protocol):
    """What an exported file holds: tensors by their final names, one layer at a time."""

    @property
    def architecture(self) -> str:
        """The engine's name of the class of model."""

    def around(self) -> Mapping[str, Any]:
        """Everything outside the layers."""

    def layer(self, i: int) -> Mapping[str, Any]:
        """One layer."""


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What is exported, to which target, in which numbers."""

    source: Source
    target: str
    dtype: str = "auto"
    quantize: str | None = None
    check: bool = True
    command: str = ""

    def inputs(self) -> dict[str, Any]:
        """What the output depends on."""
        return {
            "model": self.source.name,
            "weights_sha256": self.source.weights_sha256,
            "target": self.target,
            "dtype": self.dtype,
            "quantize": self.quantize,
        }

    @property
    def key(self) -> str:
        """By which a finished export is known."""
        return key_of("export", self.inputs())


def laid_out_parts(run: Run, form: Form, layers: int, progress: Progress) -> Iterator[str]:
    """The names of the parts of an export, in order; those that are missing are made."""

    def layer(i: int) -> Callable[[], Mapping[str, Any]]:
        return lambda: form.layer(i)

    made = [("around", form.around), *((f"layer-{i:05d}", layer(i)) for i in range(layers))]
    for done, (name, make) in enumerate(made):
        progress("exporting", done, len(made))
        if not run.has(name):
            run.put(name, make())
        yield name
    progress("exporting", len(made), len(made))


def record_of(
    request: ExportRequest,
    architecture: str,
    dtype: torch.dtype,
    parity: Parity | None,
    notes: tuple[str, ...] = (),
) -> ExportRecord:
    """The record of a finished export."""
    return ExportRecord(
        key=request.key,
        model=request.source.name,
        target=request.target,
        architecture=architecture,
        dtype=str(dtype).removeprefix("torch."),
        quantize=request.quantize,
        command=request.command,
        parity=parity,
        notes=notes,
        versions=dict(versions(_PACKAGES)),
    )


def chosen_dtype(request: ExportRequest, reader: Reader) -> torch.dtype:
    """The number format asked for; `auto` is that of the source."""
    if request.dtype in DTYPES:
        return DTYPES[request.dtype]
    if request.dtype != "auto":
        raise HeadwiseError(
            f"--dtype must be auto, {', '.join(DTYPES)}, got {quoted(request.dtype)}."
        )
    return reader.dtype if reader.dtype in DTYPES.values() else torch.float32
