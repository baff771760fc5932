"""`headwise compare`: the field's recipes and ours at the same counted budgets, in one run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli import calibration as calibration_cli
from headwise.cli import recover as recover_cli
from headwise.cli.console import ForceFlag, JsonFlag, command_line, say, show, table
from headwise.cli.report import report_beside
from headwise.compress.recipes.catalogue import METHODS, RECOVERED, CompareSettings
from headwise.compress.settings import CutSettings
from headwise.errors import HeadwiseError, did_you_mean
from headwise.profile.settings import ProfileSettings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headwise.compress.comparison_folder import ComparisonFolder
    from headwise.data.text import Text
    from headwise.plan import Limit
    from headwise.profile.format import Profile

_D, _C = ProfileSettings(), CompareSettings()


def compare(
    model: Annotated[
        str, typer.Argument(help="A causal model: folder, hub name, .gguf file, builtin:smollm2.")
    ],
    text: Annotated[
        str,
        typer.Option("--text", help="Calibrate on this; without --held, a tenth is kept apart."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The comparison's folder.")],
    keep: Annotated[
        str, typer.Option(help="Attention parameters: shares (90%,75%) or numbers (1.2M).")
    ] = "90%,75%,50%",
    methods: Annotated[
        str | None, typer.Option(help=f"Which of {', '.join(METHODS)} [all].")
    ] = None,
    held: Annotated[
        str | None, typer.Option(help="Measure on this [the kept tenth of --text].")
    ] = None,
    other_text: Annotated[
        list[str] | None, typer.Option("--other-text", help="Also measure on this; repeatable.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="The profile, made if it is not there [OUT/profile].")
    ] = None,
    recover: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens to train on, for {RECOVERED}.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to calibrate on.")] = _D.tokens,
    length: Annotated[
        int | None, typer.Option(help=f"Tokens per sequence [min({_D.length}, its context)].")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each text to measure on.")
    ] = _C.max_tokens,
    multiple_of: Annotated[
        int, typer.Option(help="Our head widths are multiples of this.")
    ] = _C.multiple_of,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Cut a model by every recipe to the same counted budgets, and measure them alike.

    Finished cells stay: the same command goes on after a kill, and more --methods or --keep
    can be added later.

    Example: headwise compare ./model --keep 75%,50% --text notes.txt -o compared
    """
    from headwise.cli.evaluate import quiet_transformers
    from headwise.compress.comparison_folder import ComparisonFolder, read_json
    from headwise.planning.worth_curves import FitRules

    quiet_transformers()
    FitRules(multiple_of=multiple_of)  # refuses a wrong one before the long work
    settings = CompareSettings(max_tokens=max_tokens, multiple_of=multiple_of)
    budgets, chosen = _budgets(keep), _methods(methods, recover)
    calibration, measured = _texts(text, held, other_text or [])
    folder = ComparisonFolder(out, CutSettings().to_dict())
    inputs = {
        "model": model,
        "text": calibration.sha256,
        "measured": [one.sha256 for one in measured],
        "tokens": tokens,
        "length": length,
        "profile": None if profile is None else str(profile),
        "settings": asdict(settings),
        "recover": recover,
    }
    folder.open(inputs, force=force)
    found = read_json(folder.result)
    if found is not None and not folder.missing(budgets, chosen):
        say(f"{out} is finished already; nothing was run.")
    else:
        made = calibration_cli.profiled(
            model, calibration, profile or folder.profile, tokens, length
        )
        folder.open(inputs | {"profile_sha256": made.sha256})
        work = _Work(model, text, made, measured, budgets, chosen, settings, recover)
        found = _compared(work, folder)
    show(found, as_json=as_json, render=_picture(found))


class _Work:
    """What the command was asked for, read and checked."""

    def __init__(
        self,
        model: str,
        text: str,
        profile: Profile,
        measured: list[Text],
        budgets: list[Limit],
        methods: list[str],
        settings: CompareSettings,
        recover: int | None,
    ) -> None:
        self.model, self.text, self.profile, self.measured = model, text, profile, measured
        self.budgets, self.methods, self.settings = budgets, methods, settings
        self.asked = None
        if recover is not None:
            self.asked = recover_cli.Asked(
                recover, length=profile.record.settings["length"], held_out=calibration_cli.HELD_OUT
            )

    def recover(self, cut: Path, out: Path) -> None:
        """The recovered model of a cut one."""
        assert self.asked is not None
        recover_cli.recovered(cut, self.model, self.text, out, self.asked, force=True)


def _compared(work: _Work, folder: ComparisonFolder) -> dict[str, Any]:
    from headwise.cli.progress import shown
    from headwise.compress.bench import Comparison
    from headwise.compress.comparison import compare as run

    job = Comparison(
        model=work.model,
        profile=work.profile,
        texts=tuple(work.measured),
        methods=tuple(work.methods),
        budgets=tuple(work.budgets),
        settings=work.settings,
        recover=None if work.asked is None else work.recover,
        recovery=None if work.asked is None else asdict(work.asked),
        command=command_line(),
    )
    with shown("comparing") as progress:
        document = run(job, folder, tick=progress.update)
    _draw(document, folder)
    say(f"Wrote {folder.result}.")
    report_beside(folder.path)
    return document


def _budgets(keep: str) -> list[Limit]:
    from headwise.plan import Limit

    found = [Limit.parse(part, "--keep") for part in keep.split(",")]
    return list(dict.fromkeys(found))


def _methods(given: str | None, recover: int | None) -> list[str]:
    """The recipes asked for, in the order of the catalogue."""
    names = [part.strip() for part in given.split(",")] if given else list(METHODS)
    for name in names:
        if name not in METHODS:
            raise HeadwiseError(
                f"--methods must be recipes that are known, got {name!r}. "
                f"{did_you_mean(name, METHODS)}"
            )
    if given is None and recover is None:
        names.remove(RECOVERED)
    if (recover is not None) != (RECOVERED in names):
        raise HeadwiseError(
            f"--recover says how long {RECOVERED} trains, so both are given or neither; got "
            f"{'--recover without it' if recover else 'it without --recover'}."
        )
    return [name for name in METHODS if name in names]


def _texts(text: str, held: str | None, others: list[str]) -> tuple[Text, list[Text]]:
    """The text to calibrate on, and those to measure on."""
    from headwise.data.text import read_source

    if held is None:
        calibration, first = calibration_cli.split_text(read_source(text))
    else:
        calibration, first = read_source(text), read_source(held)
    measured = [first, *(read_source(other) for other in others)]
    if any(one.sha256 == calibration.sha256 for one in measured):
        raise HeadwiseError(
            "a text to measure on is the calibration text itself, which flatters every recipe; "
            "give text that was not calibrated on."
        )
    return calibration, measured


def _draw(document: dict[str, Any], folder: ComparisonFolder) -> None:
    """The chart in three forms; without the plot packages the figures have to do."""
    from headwise.compress.comparison_folder import CHARTS

    try:
        from headwise.report.charts import pareto_chart, save_chart
    except HeadwiseError as error:
        say(f"Note: no chart was drawn. {error}")
        return
    if not any(cell.get("texts") for cell in document["cells"]):
        return
    chart = pareto_chart(document)
    for name in CHARTS:
        save_chart(chart, folder.path / name, force=True)


def _picture(document: dict[str, Any]) -> RenderableType:
    from rich.console import Group

    names = [f">× {Path(text['source']).name}" for text in document["texts"]]
    rows = []
    for cell in document["cells"]:
        figures = ["–"] * (1 + len(names))
        if "texts" in cell:
            ratios = ["∞" if t["ratio"] is None else f"{t['ratio']:.4g}" for t in cell["texts"]]
            figures = [f"{cell['share']:.2%}", *ratios]
        rows.append((cell["budget"], cell["method"], *figures))
    columns = (">budget", "recipe", ">counted", *names)
    dense = ", ".join(
        f"{Path(text['source']).name} {text['dense_perplexity']:.4f}"
        for text in document["texts"]
        if text["dense_perplexity"] is not None
    )
    title = f"{document['model']}: perplexity ÷ dense (dense: {dense})"
    problems = [
        f"Note: {cell['method']} cannot reach {cell['budget']}: {cell['problem']}"
        for cell in document["cells"]
        if "problem" in cell
    ]
    notes = [f"Note: {note}." for note in document["notes"]]
    return Group(table(title, columns, rows), *problems, *notes)
