"""An export from an opened source to a whole output, resumable layer by layer.

    Reader ─► form ─► parts in OUT.partial, one per layer ─► files ─► parity in the engine ─► OUT

The slow work (layout, quantisation) is saved in parts, so that the same call resumes after a
kill. The output is renamed when it is complete and its parity is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise.artifacts import gguf_key
from headwise.errors import HeadwiseError, quoted
from headwise.exporting.folder import FolderExport
from headwise.exporting.gguf_file import GGUFExport
from headwise.exporting.onnx_graph import ONNXExport
from headwise.exporting.parts import ExportRequest
from headwise.exporting.record import EXPORT_RECORD, ExportResult
from headwise.progress import Progress, silent
from headwise.runs import resume

EXPORTS: dict[str, Any] = {
    "stock": FolderExport,
    "gguf": GGUFExport,
    "onnx": ONNXExport,
    "padded": FolderExport,
    "vllm": FolderExport,
}


def export_model(
    request: ExportRequest,
    out: Path,
    *,
    force: bool = False,
    progress: Progress = silent,
    finishing: Callable[[Path], None] | None = None,
) -> ExportResult:
    """Write the model for its target, and measure parity there.

    `finishing` may add files to an exported folder before it takes its place.
    """
    if request.target not in EXPORTS:
        raise HeadwiseError(
            f"--to must be one of {', '.join(EXPORTS)}, got {quoted(request.target)}."
        )
    if request.quantize is not None and request.target != "gguf":
        raise HeadwiseError("--quantize is for --to gguf; leave it out.")
    export = EXPORTS[request.target](request)  # refuses before anything is written
    with resume(
        out,
        "export",
        request.inputs(),
        record=EXPORT_RECORD,
        force=force,
        reads=[request.source.name],
        command=request.command,
        writes=export.writes,
        made=gguf_key(out),
    ) as run:
        if run.finished:  # of a run that was killed at its very end
            return ExportResult(out, export.finished(out))
        return ExportResult(out, export.write(run, progress, finishing))
