"""`compare`: every published method and ours at the same counted budgets.

    text ─┬─► calibrate on ─► profile ─► each method × each budget ─┐
          └─► held out ─────────────────────────────────────────────┴─► figures, report

`headwise.baselines.comparison` makes the cells of the table; this module prepares the texts and the
shared profile, and writes the last files of the folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.baselines.comparison import (
    Comparison,
    ComparisonFolder,
    made_by,
    run_comparison,
)
from headwise.baselines.record import CompareSettings, ComparisonRecord, read_comparison
from headwise.data.mixture import Mixture, read_mixture
from headwise.data.text import Text, read_source
from headwise.errors import HeadwiseError, OutputError, StoppedError
from headwise.pipeline import opened_for, profile_at
from headwise.profiling.format import Profile
from headwise.progress import Progress, silent
from headwise.recipe import CompareRecipe, write_recipe
from headwise.reporting.card import REPORT, note_report
from headwise.runs import complete, read_run, resume_in_place, update_run
from headwise.source import AnyModel, Source, recipe_names
from headwise.training.recover import recover as recover_model
from headwise.training.settings import RecoverSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def compare(
    model: AnyModel,
    *,
    out: str | Path,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    force: bool = False,
    progress: Progress = silent,
    command: str = "",
    **options: Any,
) -> ComparisonRecord:
    """Cut a model by every published method and by ours to the same counted budgets.

    `options` are those below. Finished cells are kept in `out`: call it again to resume after a
    kill, or with more methods or budgets.

    >>> import headwise as hw
    >>> compared = hw.compare("./model", text="notes.txt", attn_params="75%", out="compared")
    """
    recipe = CompareRecipe.of(**recipe_names(model, tokenizer), **options)
    budgets, methods, folder = recipe.budgets, recipe.chosen, Path(out)
    calibration, measured = _compared_texts(recipe)
    settings = CompareSettings(
        max_tokens=recipe.verify_tokens,
        multiple_of=recipe.multiple_of,
        ffn_multiple_of=recipe.ffn_multiple_of,
        granularity=recipe.granularity,
    )
    inputs = {
        "model": recipe.model,
        "text": calibration.sha256,
        "measured": [one.sha256 for one in measured],
        "tokens": recipe.tokens,
        "length": recipe.length,
        "profile": recipe.profile,
        "settings": asdict(settings),
        "counts": recipe.counts,
        "recover": recipe.recover,
        "profile_sha256": None,
    }
    cells = ComparisonFolder(folder, made_by)
    later = ("recover", "profile_sha256")
    with resume_in_place(
        folder, "compare", inputs, force=force, reads=recipe.reads, later=later, command=command
    ):
        with suppress(HeadwiseError):  # a damaged result is made again from its cells
            if not cells.missing(budgets, methods):
                record = read_comparison(folder)
                shutil.rmtree(cells.work, ignore_errors=True)
                if not (folder / REPORT).exists():  # of a run that was killed before its last files
                    _write_last_of_comparison(folder, recipe, record)
                complete(folder)
                return record
        source = opened_for(model, tokenizer, recipe)
        source.refuse_cut()
        made = profile_at(
            Path(recipe.profile or cells.profile), source, calibration, recipe, progress
        )
        _pin_profile(folder, made)
        recovery = None
        if recipe.recover is not None:
            recovery = RecoverSettings(recipe.recover, split=recipe.split)
            recovery = recovery.within(made.record.settings["length"])
        job = Comparison(
            source=source,
            profile=made,
            texts=tuple(measured),
            n_own=max(1, len(measured) - len(recipe.held_out)),
            methods=methods,
            budgets=budgets,
            settings=settings,
            counts=recipe.counts,
            recover=None if recovery is None else _recoverer(source, recipe, recovery),
            recovery=None if recovery is None else asdict(recovery),
            command=command,
        )
        record = run_comparison(job, cells, progress=progress)
        _write_last_of_comparison(folder, recipe, record)
        complete(folder)
    return record


def _write_last_of_comparison(
    folder: Path, recipe: CompareRecipe, record: ComparisonRecord
) -> None:
    """Write the recipe, the figures and the report of a comparison whose cells are finished."""
    write_recipe(folder, recipe)
    if record.measured:
        with suppress(HeadwiseError):  # without the plot packages the figures have to do
            from headwise.reporting.pages import draw_comparison

            draw_comparison(record, folder)
    note_report(folder)


def _compared_texts(recipe: CompareRecipe) -> tuple[Mixture, list[Text]]:
    """The text to calibrate on, and those to measure on."""
    calibration, held_out = read_mixture(recipe.text).split(recipe.split)
    measured = [*held_out, *(read_source(text) for text in recipe.held_out)]
    if not measured:
        raise HeadwiseError("nothing is held out to measure on; give --held-out.")
    calibrated_on = {one.sha256 for one in calibration.texts}
    if any(one.sha256 in calibrated_on for one in measured):
        raise HeadwiseError(
            "a held-out text is the calibration text itself, which flatters every method; give "
            "text outside the calibration set."
        )
    return calibration, measured


def _pin_profile(folder: Path, profile: Profile) -> None:
    """Note which profile the cells of a comparison belong to; another one is refused."""
    inputs = read_run(folder).inputs
    if inputs.get("profile_sha256") not in (None, profile.sha256):
        raise OutputError(
            f"{folder} is a comparison with another profile; give another folder, or --force to "
            "start over."
        )
    update_run(folder, inputs={**inputs, "profile_sha256": profile.sha256})


def _recoverer(
    source: Source, recipe: CompareRecipe, settings: RecoverSettings
) -> Callable[[Path, Path], None]:
    def recover(cut: Path, out: Path) -> None:
        text = read_mixture(recipe.text)
        made = recover_model(cut, source, text, out, settings=settings, force=True)
        if made.signal:
            raise StoppedError(made.signal)

    return recover
