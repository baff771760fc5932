"""The comparison of recipes at equal counted budgets, as a section and as a page of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwise.report import pieces
from headwise.report.charts import pareto_chart
from headwise.report.figure import Figure


def comparison_section(document: dict[str, Any]) -> str:
    """Every recipe at every budget: chart, table, and what the recipes are."""
    texts = [Path(str(text["source"])).name for text in document["texts"]]
    rows = [_row(cell, len(texts)) for cell in document["cells"]]
    reached = [c for c in document["cells"] if c.get("texts")]
    parts = [
        pieces.paragraph(
            "Perplexity ÷ dense; every recipe is held to the same number of attention parameters, "
            "counted."
        )
    ]
    if reached:
        columns = ("recipe and budget", "counted", *(f"× on {text}" for text in texts))
        charts = [
            Figure(
                title=f"On {text}",
                words=f" {_winners(reached, i)}",
                chart=pareto_chart(_one_text(document, i)),
                columns=columns,
                rows=rows,
            )
            for i, text in enumerate(texts)
            if any(cell["texts"][i]["ratio"] is not None for cell in reached)
        ]
        parts.append(pieces.figures(charts, "recipes"))
        parts.append(pieces.table(columns, rows, "Recipes at each budget"))
    parts.append(_recipes(document))
    return pieces.section("Compared with other recipes", *parts)


def comparison_page(document: dict[str, Any]) -> str:
    """The comparison alone."""
    used = document["calibration"]
    lead = f"Calibrated on {used['tokens']:,} tokens of {Path(str(used['source'])).name}."
    rows = [
        ("model", document["model"]),
        ("attention parameters, dense", f"{document['attn_params']:,}"),
        ("made with", ", ".join(f"{n} {v}" for n, v in document["versions"].items())),
    ]
    made = pieces.section(
        "Where it came from", pieces.facts(rows), pieces.code(document.get("command", ""))
    )
    title = f"Recipes compared on {Path(str(document['model'])).name}"
    return pieces.page(title, lead, comparison_section(document), made)


def _row(cell: dict[str, Any], n_texts: int) -> tuple[Any, ...]:
    name = f"{cell['method']} at {cell['budget']}"
    if not cell.get("texts"):
        return (name, "not reached", *("–" for _ in range(n_texts)))
    ratios = (score["ratio"] for score in cell["texts"])
    return (name, f"{cell['share']:.2%}", *("∞" if r is None else f"{r:.3f}" for r in ratios))


def _one_text(document: dict[str, Any], i: int) -> dict[str, Any]:
    """The comparison on one of its texts."""
    cells = [
        {**cell, "texts": [cell["texts"][i]]} if cell.get("texts") else cell
        for cell in document["cells"]
    ]
    return {**document, "texts": [document["texts"][i]], "cells": cells}


def _winners(cells: list[dict[str, Any]], i: int) -> str:
    """Who loses least at each budget on one text."""
    found = []
    for budget in dict.fromkeys(c["budget"] for c in cells):
        own = [c for c in cells if c["budget"] == budget and c["texts"][i]["ratio"] is not None]
        if own:
            best = min(own, key=lambda c: float(c["texts"][i]["ratio"]))
            ratio = best["texts"][i]["ratio"]
            found.append(f"{best['method']} loses least at {budget} (×{ratio:.3f})")
    return f"{'; '.join(found)}."


def _recipes(document: dict[str, Any]) -> str:
    """What each recipe is, in the comparison's own words."""
    rows = []
    for name, facts in document["methods"].items():
        words = [str(v) for k, v in facts.items() if k != "name" and isinstance(v, str) and v]
        rows.append((name, ". ".join(words)))
    return pieces.facts(rows)
