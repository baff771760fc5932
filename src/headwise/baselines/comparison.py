"""Several methods at several budgets, each counted and measured alike.

    budgets × methods ──► cells       rivals: projections of the dense shape, put into the model
                                      ours:   the checkpoint that `compress` writes
    every cell: counted attention parameters, perplexity ÷ dense on every text

A cell is saved when it is finished and never run twice. A budget that a method cannot reach is a
cell too, which says so.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict

from headwise.artifacts import versions
from headwise.baselines.bench import Bench, Comparison
from headwise.baselines.catalogue import METHODS
from headwise.baselines.comparison_folder import ComparisonFolder
from headwise.baselines.record import ComparedText, ComparisonCell, ComparisonRecord
from headwise.cutting.settings import CutSettings
from headwise.progress import Progress, silent
from headwise.records import write_record


def run_comparison(
    job: Comparison, folder: ComparisonFolder, *, progress: Progress = silent
) -> ComparisonRecord:
    """Fill in the missing cells and write the record of all cells of the folder."""
    cells = folder.missing(job.budgets, job.methods)
    if cells or folder.dense is None:
        bench = Bench(job, folder, _report(progress, 0, len(cells), "dense"))
        for done, (budget, method) in enumerate(cells):
            bench.report = _report(progress, done, len(cells), f"{method} at {budget}")
            started = time.perf_counter()
            cell = bench.cell(method, budget)
            seconds = round(time.perf_counter() - started, 1)
            folder.put(f"{method}@{budget}", cell.model_copy(update={"seconds": seconds}))
            bench.tidy(budget, cells[done + 1 :])
    record = _record(job, folder)
    write_record(folder.result, record)
    shutil.rmtree(folder.work, ignore_errors=True)
    return record


def _report(progress: Progress, done: int, total: int, cell: str) -> Progress:
    """Progress within a cell, told as progress over all cells."""

    def report(what: str, part: int, parts: int) -> None:
        progress(f"comparing ({cell}: {what} {part} of {parts})", done, total)

    return report


def _record(job: Comparison, folder: ComparisonFolder) -> ComparisonRecord:
    dense, record = folder.dense, job.profile.record
    assert dense is not None
    order = {name: place for place, name in enumerate(METHODS)}
    cells = sorted(
        folder.cells(), key=lambda cell: (-cell.amount, order.get(cell.method, len(order)))
    )
    used = {cell.method for cell in cells}
    texts = tuple(
        ComparedText(
            source=text.source,
            sha256=text.sha256,
            role="other text" if i else "calibration domain",
            tokens=score.tokens,
            window=score.window,
            stride=score.stride,
            dense_nll=score.nll,
            dense_perplexity=math.exp(score.nll) if score.nll < 709 else None,
        )
        for i, (text, score) in enumerate(zip(job.texts, dense.texts, strict=True))
    )
    seeds = {"profile": record.settings.get("seed", 0)}
    return ComparisonRecord(
        model=job.source.name,
        weights_sha256=record.weights_sha256,
        attn_params=dense.attn_params,
        calibration=record.calibration,
        profile_sha256=job.profile.sha256,
        texts=texts,
        methods={name: method for name, method in METHODS.items() if name in used},
        cells=tuple(cells),
        notes=record.notes,
        settings=asdict(job.settings) | {"cut": CutSettings().to_dict()},
        seeds=seeds | _recovery_seed(cells),
        command=job.command,
        versions=dict(versions(("headwise", "torch", "transformers", "numpy"))),
    )


def _recovery_seed(cells: Sequence[ComparisonCell]) -> dict[str, int]:
    seeds = [cell.recovery["seed"] for cell in cells if cell.recovery]
    return {"recovery": seeds[0]} if seeds and isinstance(seeds[0], int) else {}
