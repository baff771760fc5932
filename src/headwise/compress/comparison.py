"""Several recipes at several budgets, each counted and measured alike.

    budgets × recipes ──► cells       rivals: projections of the dense shape, put into the model
                                      ours:   the checkpoint that `compress` writes
    every cell: counted attention parameters, perplexity ÷ dense on every text

A cell is saved when it is finished and never run twice. A budget that a recipe cannot reach is a
cell too, which says so.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from headwise.artifacts import versions
from headwise.compress.bench import Bench, Comparison, Report
from headwise.compress.comparison_folder import ComparisonFolder, write_json
from headwise.compress.recipes.catalogue import METHODS
from headwise.compress.settings import CutSettings

COMPARE_FORMAT = "headwise-compare/1"
Tick = Callable[[int, int, str], None]  # cells done, cells in all, what is being done


def compare(
    job: Comparison, folder: ComparisonFolder, *, tick: Tick | None = None
) -> dict[str, Any]:
    """Fill in the missing cells and write the document over all cells of the folder."""
    cells = folder.missing(job.budgets, job.methods)
    if cells or folder.cell("dense") is None:
        bench = Bench(job, folder, _report(tick, 0, len(cells), "dense"))
        for done, (budget, method) in enumerate(cells):
            bench.report = _report(tick, done, len(cells), f"{method} at {budget}")
            started = time.perf_counter()
            cell = bench.cell(method, budget)
            cell["seconds"] = round(time.perf_counter() - started, 1)
            folder.put(f"{method}@{budget}", cell)
            bench.tidy(budget, cells[done + 1 :])
    document = _document(job, folder)
    write_json(folder.result, document)
    shutil.rmtree(folder.work, ignore_errors=True)
    return document


def _report(tick: Tick | None, done: int, total: int, words: str) -> Report:
    def report(what: str, part: int, parts: int) -> None:
        if tick is not None:
            tick(done, total, f"{words}: {what} {part} of {parts}")

    return report


def _document(job: Comparison, folder: ComparisonFolder) -> dict[str, Any]:
    dense, record = folder.cell("dense"), job.profile.record
    assert dense is not None
    order = {name: place for place, name in enumerate(METHODS)}
    cells = sorted(folder.cells(), key=lambda c: (-c["amount"], order[c["method"]]))
    used = [name for name in METHODS if any(c["method"] == name for c in cells)]
    texts = [
        {
            "source": text.source,
            "sha256": text.sha256,
            "role": "other text" if i else "calibration domain",
            **{k: score[k] for k in ("tokens", "window", "stride")},
            "dense_nll": score["nll"],
            "dense_perplexity": math.exp(score["nll"]) if score["nll"] < 709 else None,
        }
        for i, (text, score) in enumerate(zip(job.texts, dense["texts"], strict=True))
    ]
    return {
        "format": COMPARE_FORMAT,
        "model": job.model,
        "weights_sha256": record.weights_sha256,
        "attn_params": dense["attn_params"],
        "calibration": {
            "source": record.text.source,
            "text_sha256": record.text.sha256,
            "tokens": record.tokens,
            "profile_sha256": job.profile.sha256,
        },
        "texts": texts,
        "methods": {name: asdict(METHODS[name]) for name in used},
        "cells": cells,
        "notes": list(record.notes),
        "settings": asdict(job.settings) | {"cut": CutSettings().to_dict()},
        "seeds": {"profile": record.settings.get("seed", 0)} | _recovery_seed(cells),
        "command": job.command,
        "versions": dict(versions(("headwise", "torch", "transformers", "numpy"))),
    }


def _recovery_seed(cells: list[dict[str, Any]]) -> dict[str, int]:
    seeds = [c["recovery"]["seed"] for c in cells if c.get("recovery")]
    return {"recovery": seeds[0]} if seeds else {}
