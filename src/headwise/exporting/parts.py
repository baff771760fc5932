"""The parts that all exports share: the request, its resumable parts, its record."""

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
    """The contents of an exported file: tensors by their final names, one layer at a time."""

    @property
    def architecture(self) -> str:
        """The engine's name of the class of model."""

    def around(self) -> Mapping[str, Any]:
        """Everything outside the layers."""

    def layer(self, i: int) -> Mapping[str, Any]:
        """One layer."""


def in_numbers(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors in other numbers; what these cannot hold would silently become infinite."""
    made = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    for name, tensor in made.items():
        if not bool(torch.isfinite(tensor).all()):
            raise too_large(name, str(dtype).removeprefix("torch."))
    return made


def too_large(name: str, numbers: str) -> HeadwiseError:
    """The error for a tensor whose numbers another format cannot hold."""
    return HeadwiseError(
        f"{name} has numbers beyond the range of {numbers}, which would become infinite; give "
        "--dtype bf16 or fp32, and leave --quantize out."
    )


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The model to export, the target and the number format."""

    source: Source
    target: str
    dtype: str = "auto"
    quantize: str | None = None
    check: bool = True
    command: str = ""

    def inputs(self) -> dict[str, Any]:
        """The inputs that determine the output."""
        return {
            "model": self.source.name,
            "weights_sha256": self.source.weights_sha256,
            "target": self.target,
            "dtype": self.dtype,
            "quantize": self.quantize,
        }

    @property
    def key(self) -> str:
        """The key that identifies a finished export."""
        return key_of("export", self.inputs())


def write_parts(run: Run, form: Form, layers: int, progress: Progress) -> Iterator[str]:
    """Write the missing parts of an export; returns the names of all parts, in order."""

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
    """The requested number format; `auto` is that of the source."""
    if request.dtype in DTYPES:
        return DTYPES[request.dtype]
    if request.dtype != "auto":
        raise HeadwiseError(
            f"--dtype must be auto, {', '.join(DTYPES)}, got {quoted(request.dtype)}."
        )
    return reader.dtype if reader.dtype in DTYPES.values() else torch.float32
