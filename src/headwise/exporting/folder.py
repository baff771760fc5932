"""Exports to folders of transformers: `stock` and `padded`."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headwise.artifacts import Kind
from headwise.exporting.card import write_export_card
from headwise.exporting.padded import PaddedForm
from headwise.exporting.parity import stock_parity
from headwise.exporting.parts import ExportRequest, chosen_dtype, laid_out_parts, record_of
from headwise.exporting.reading import Reader
from headwise.exporting.record import EXPORT_RECORD, ExportRecord, read_export
from headwise.exporting.stock import StockForm
from headwise.models.checkpoint import CheckpointWriter
from headwise.planning.targets import LLAMA_LIKE, target_of
from headwise.progress import Progress
from headwise.records import write_record
from headwise.runs import Run


class FolderExport:
    """An export to a folder of transformers."""

    writes: Kind = "folder"
    finished = staticmethod(read_export)

    def __init__(self, request: ExportRequest) -> None:
        self.request, reader = request, Reader(request.source)
        self.layers, self.dtype = len(reader), chosen_dtype(request, reader)
        # A family that has no other class than its own is exported whole, or not at all.
        own = reader.config.model_type not in LLAMA_LIKE
        whole = own and target_of("stock").runs(request.source.plan).yes
        padded = request.target == "padded" or whole
        self.form = PaddedForm(reader, self.dtype) if padded else StockForm(reader, self.dtype)
        self.config = self.form.config

    def write(
        self, run: Run, progress: Progress, finishing: Callable[[Path], None] | None
    ) -> ExportRecord:
        """Lay out, write, measure."""
        request = self.request
        parts = list(laid_out_parts(run, self.form, self.layers, progress))
        with run.finish() as folder:
            with CheckpointWriter(folder) as writer:
                for part in parts:
                    for name, tensor in run.get(part).items():
                        writer.put(name, tensor)
            self.config.save_pretrained(folder)
            request.source.copy_companions(folder)
            parity = None
            if request.check:
                progress("checking", 0, 1)
                parity = stock_parity(request.source, folder, self.dtype)
            record = record_of(request, self.form.architecture, self.dtype, parity)
            write_record(folder / EXPORT_RECORD, record)
            write_export_card(folder, record, request.source, name=run.output.name)
            if finishing is not None:
                finishing(folder)
        return record
