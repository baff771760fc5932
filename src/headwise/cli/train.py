"""`headwise train`: a plan and a text become a model.

Every default is the one of `TrainSettings`. With `--resume`, options that are not given keep the
values the run was started with, so `headwise train -o RUN --resume` is enough; an option that is
given must agree with them, unless it only changes how often the run is saved.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.console import ForceFlag, JsonFlag, command_line, say, show
from headwise.cli.report import report_beside
from headwise.errors import HeadwiseError
from headwise.training.settings import TrainSettings

if TYPE_CHECKING:
    from headwise.training.train import TrainResult

_D = TrainSettings()


def train(
    ctx: typer.Context,
    plan: Annotated[Path | None, typer.Argument(help="The plan file.", show_default=False)] = None,
    text: Annotated[
        str | None, typer.Option("--text", help="File, folder, hub:owner/name or builtin:python.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The run's folder.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = _D.steps,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to train on, instead of steps.")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Windows per step, over all processes.")
    ] = _D.batch_size,
    context: Annotated[int | None, typer.Option(help="Tokens per window [the plan's].")] = None,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = _D.lr,
    min_lr: Annotated[float | None, typer.Option(help="Final learning rate [lr/10].")] = None,
    weight_decay: Annotated[float, typer.Option(help="Decoupled weight decay.")] = _D.weight_decay,
    warmup: Annotated[int | None, typer.Option(help="Warmup steps [steps/20].")] = None,
    clip: Annotated[float, typer.Option(help="Clip gradients to this norm.")] = _D.clip,
    accumulate: Annotated[int, typer.Option(help="Gradient accumulation steps.")] = _D.accumulate,
    seed: Annotated[
        int, typer.Option(help="Random seed for weights, batches and dropout.")
    ] = _D.seed,
    held_out: Annotated[
        float, typer.Option(help="Share of the text that is never trained on.")
    ] = _D.held_out,
    eval_every: Annotated[int, typer.Option(help="Steps between validations.")] = _D.eval_every,
    eval_windows: Annotated[int, typer.Option(help="Windows per validation.")] = _D.eval_windows,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = _D.save_every,
    keep: Annotated[int, typer.Option(help="Checkpoints to keep.")] = _D.keep,
    dtype: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = _D.dtype,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = _D.device,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or tokenizer.json [trained on the text].")
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Vocabulary size of a trained tokenizer [the plan's, else 4096]."),
    ] = None,
    max_chars: Annotated[
        int | None, typer.Option(help="Use only the first N characters of the text.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in OUT with its own settings.")
    ] = False,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a plan's model from scratch; under torchrun, on several processes.

    Run the same command again to resume after a kill; with --resume, -o alone is enough.

    Example: headwise train plan.json --text notes.txt --steps 300 -o run

    Example: headwise train -o run --resume
    """
    given = {k: v for k, v in ctx.params.items() if _typed(ctx, k) and v is not None}
    try:
        _train(given, as_json=as_json)
    except HeadwiseError as error:
        if not _is_first():  # the first process says it for all
            raise SystemExit(2) from error
        raise


def _typed(ctx: typer.Context, name: str) -> bool:
    """Whether the person gave the option (a default is not given)."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name not in {"DEFAULT", "DEFAULT_MAP"}


def _train(given: dict[str, Any], *, as_json: bool) -> None:
    from headwise.cli.console import quiet_transformers
    from headwise.cli.training_view import TrainingView, training_view
    from headwise.progress import silent

    if "out" not in given:
        raise HeadwiseError("headwise train needs a folder for the run; give -o RUN.")
    if given.get("resume") and given.get("force"):
        raise HeadwiseError("--resume continues a run and --force replaces it; give only one.")
    if "steps" in given and "tokens" in given:
        raise HeadwiseError("--steps and --tokens both say how long to train; give only one.")
    quiet_transformers()
    with training_view(_is_first()) as observer:
        progress = observer.prepared if isinstance(observer, TrainingView) else silent
        result = _result(given, observer=observer, progress=progress)
    if _is_first():
        _tell(result, as_json=as_json)
    if result.signal:
        raise typer.Exit(128 + result.signal)


def _is_first() -> bool:
    """Whether this is the process that speaks; torchrun starts several."""
    return os.environ.get("RANK", "0") == "0"


def _result(given: dict[str, Any], **watchers: Any) -> TrainResult:
    from headwise.training.train import resume_training, train

    names = {f.name for f in fields(TrainSettings)}
    settings = {k: v for k, v in given.items() if k in names}
    out, plan, text = given["out"], given.get("plan"), given.get("text")
    options: dict[str, Any] = {k: given.get(k) for k in ("tokenizer", "vocab_size", "max_chars")}
    new = not (out / "run.json").exists() and plan is not None and text is not None
    if given.get("resume") and not new:
        return resume_training(out, settings, plan=plan, text=text, **options, **watchers)
    for value, what in ((plan, "a plan file"), (text, "--text")):
        if value is None:
            raise HeadwiseError(f"headwise train needs {what}; see `headwise train --help`.")
    assert plan is not None
    assert text is not None
    return train(
        plan,
        text,
        out,
        settings=TrainSettings(**settings),
        **options,
        force=given.get("force", False),
        command=command_line(),
        **watchers,
    )


def _tell(result: TrainResult, *, as_json: bool) -> None:
    if result.signal:
        say(
            f"Stopped after a signal; the newest step is saved. Run the same command again, or "
            f"`headwise train -o {result.folder} --resume`, to resume."
        )
    elif not (result.folder / "report.html").exists():
        report_beside(result.folder)
    else:
        say(f"{result.folder} is finished; the model is in {result.model}.")
    last = {} if result.last is None else result.last.row()
    document = {
        "run": str(result.folder),
        "model": None if result.model is None else str(result.model),
        "status": result.status,
        **{k: last.get(k) for k in ("step", "loss", "held_out_loss", "tokens", "seconds")},
    }
    words = f"{result.status} at step {last.get('step')}, loss {last.get('loss', 0):.4f}"
    words += f", held-out loss {last['held_out_loss']:.4f}" if "held_out_loss" in last else ""
    words += f"\n{result.model}" if result.model else ""
    show(document, as_json=as_json, render=words)
