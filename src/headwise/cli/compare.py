"""`headwise compare`: the field's methods and ours at the same counted budgets, in one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headwise.baselines.record import COMPARE_RECORD
from headwise.cli.console import say, show, table
from headwise.cli.options import Common, options_command
from headwise.recipe import CompareRecipe

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headwise.baselines.record import ComparisonRecord


@options_command(CompareRecipe, out="The comparison's folder.")
def compare(recipe: CompareRecipe, common: Common) -> None:
    """Cut a model by every method to the same counted budgets, and measure them in the same way.

    Finished cells are kept: run the same command again to resume after a kill, or add --methods
    or budgets later. With --params whole models are compared, heads and MLPs.

    Example: headwise compare ./model --attn-params 75%,50% --text notes.txt -o compared
    """
    assert common.out is not None
    before = _stamp(common.out)
    found: ComparisonRecord = common.run(recipe)
    same = before is not None and before == _stamp(common.out)
    say(f"{common.out} is finished; nothing was run." if same else f"Wrote {common.out}.")
    show(found.model_dump(mode="json"), as_json=common.as_json, render=_picture(found))


def _stamp(out: Path) -> int | None:
    """When the result was written, if it is there."""
    result = out / COMPARE_RECORD
    return result.stat().st_mtime_ns if result.exists() else None


def _picture(record: ComparisonRecord) -> RenderableType:
    from rich.console import Group

    names = [Path(text.source).name for text in record.texts]
    rows = []
    for cell in record.cells:
        figures = ["–"] * (1 + len(names))
        if cell.texts and cell.share is not None:
            ratios = ["∞" if t.ratio is None else f"{t.ratio:.4g}" for t in cell.texts]
            figures = [f"{cell.share:.2%}", *ratios]
        rows.append((cell.budget, cell.method, *figures))
    columns = (">budget", "method", ">counted", *(f">× {name}" for name in names))
    dense = ", ".join(
        f"{name} {text.dense_perplexity:.4f}"
        for name, text in zip(names, record.texts, strict=True)
        if text.dense_perplexity is not None
    )
    title = f"{record.model}: perplexity ÷ dense (dense: {dense})"
    problems = [
        f"Note: {cell.method} cannot reach {cell.budget}: {cell.problem}"
        for cell in record.cells
        if cell.problem
    ]
    notes = [f"Note: {note}." for note in record.notes]
    return Group(table(title, columns, rows), *problems, *notes)
