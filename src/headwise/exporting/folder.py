"""Exports to folders of transformers: `stock`, `padded` and `vllm`."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from headwise.artifacts import Kind
from headwise.exporting.card import write_export_card
from headwise.exporting.padded import PaddedForm
from headwise.exporting.parity import stock_parity
from headwise.exporting.parts import ExportRequest, chosen_dtype, record_of, write_parts
from headwise.exporting.reading import Reader
from headwise.exporting.record import EXPORT_RECORD, ExportRecord, read_export
from headwise.exporting.served import ServedForm
from headwise.exporting.stock import StockForm
from headwise.models.checkpoint import CheckpointWriter
from headwise.plan import Plan
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
        self.form = _form(request.target, reader, self.dtype)
        self.config = self.form.config

    def write(
        self, run: Run, progress: Progress, finishing: Callable[[Path], None] | None
    ) -> ExportRecord:
        """Lay out, write, measure."""
        request = self.request
        parts = list(write_parts(run, self.form, self.layers, progress))
        with run.finish() as folder:
            with CheckpointWriter(folder) as writer:
                for part in parts:
                    for name, tensor in run.get(part).items():
                        writer.put(name, tensor)
            if isinstance(self.form, ServedForm):
                self.form.write_code(folder)
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


def _form(target: str, reader: Reader, dtype: torch.dtype) -> StockForm | PaddedForm | ServedForm:
    """What a target's folder holds."""
    plan = reader.source.plan
    if target == "vllm" and not _native(plan):
        return ServedForm(reader, dtype)
    # A family that has no other class than its own is exported whole, or not at all.
    own = reader.config.model_type not in LLAMA_LIKE
    if target == "padded" or (own and target_of("stock").runs(plan).yes):
        return PaddedForm(reader, dtype)
    return StockForm(reader, dtype)


def _native(plan: Plan) -> bool:
    """Whether a class that vLLM has of its own runs the plan."""
    stock, served = (target_of(name).runs(plan) for name in ("stock", "vllm"))
    return stock.yes and stock.how == served.how
