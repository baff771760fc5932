"""`headwise train`: a plan and a text become a model.

Every default is the one of `TrainSettings`. When a run goes on (`--resume`), options that are not
given keep the values it was started with, so `headwise train -o RUN --resume` is enough; an option
that is given must agree with them, unless it changes only how often the run is saved.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.console import ForceFlag, JsonFlag, command_line, read_text, say, show
from headwise.cli.report import report_beside
from headwise.errors import HeadwiseError, OutputError
from headwise.training.settings import TrainSettings, differences, steps_for

if TYPE_CHECKING:
    from headwise.training.loop import Outcome
    from headwise.training.run_folder import RunFolder

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
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = _D.lr,
    min_lr: Annotated[float | None, typer.Option(help="Last learning rate [lr/10].")] = None,
    weight_decay: Annotated[float, typer.Option(help="Decoupled decay.")] = _D.weight_decay,
    warmup: Annotated[int | None, typer.Option(help="Steps of rising rate [steps/20].")] = None,
    clip: Annotated[float, typer.Option(help="Longest gradient.")] = _D.clip,
    accumulate: Annotated[
        int, typer.Option(help="Parts a process's share of a batch is computed in.")
    ] = _D.accumulate,
    seed: Annotated[int, typer.Option(help="Of weights, batches and dropout.")] = _D.seed,
    held_out: Annotated[
        float, typer.Option(help="Share of the text that is never trained on.")
    ] = _D.held_out,
    eval_every: Annotated[int, typer.Option(help="Steps between validations.")] = _D.eval_every,
    eval_windows: Annotated[int, typer.Option(help="Windows per validation.")] = _D.eval_windows,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = _D.save_every,
    keep: Annotated[int, typer.Option(help="Newest checkpoints kept.")] = _D.keep,
    dtype: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = _D.dtype,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = _D.device,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or tokenizer.json [trained on the text].")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(help="Tokens of a trained tokenizer [the plan's, else 4096].")
    ] = None,
    max_chars: Annotated[
        int | None, typer.Option(help="Use only the first N characters of the text.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in OUT.")] = False,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a plan's model from scratch; under torchrun, on several processes.

    Example: headwise train plan.json --text notes.txt --steps 300 -o run

    Example: headwise train -o run --resume
    """
    given = {k: v for k, v in ctx.params.items() if _typed(ctx, k) and v is not None}
    try:
        _train(given, as_json=as_json)
    except HeadwiseError as error:
        if os.environ.get("RANK", "0") != "0":  # the first process says it for all
            raise SystemExit(2) from error
        raise


def _typed(ctx: typer.Context, name: str) -> bool:
    """Whether the person gave the option (a default is not given)."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name not in {"DEFAULT", "DEFAULT_MAP"}


def _train(given: dict[str, Any], *, as_json: bool) -> None:
    from headwise.cli.evaluate import quiet_transformers
    from headwise.training.loop import check_division
    from headwise.training.processes import accelerator, on_main
    from headwise.training.run_folder import RunFolder
    from headwise.training.scratch import train_prepared

    if "out" not in given:
        raise HeadwiseError("headwise train needs a folder for the run; give -o RUN.")
    folder = RunFolder(given["out"])
    going_on = _goes_on(folder, given)
    settings = _resumed(folder, given) if going_on else None
    if going_on and settings is None:
        say(f"{folder.path} is finished; the model is in {folder.model}.")
        _report(folder, as_json=as_json)
        return
    quiet_transformers()
    task = None if settings else _task(given)
    settings = settings or task.settings  # type: ignore[union-attr]
    processes = accelerator(settings.device)
    check_division(settings, processes.num_processes)
    if task is not None:
        on_main(processes, lambda: _prepare(task, folder))
    try:
        with _observer(processes.is_main_process) as observer:
            outcome = train_prepared(folder, settings, processes, observer)
    except OutputError as error:
        raise OutputError(
            f"{error} What was saved before is whole; go on with "
            f"`headwise train -o {folder.path} --resume`."
        ) from error
    processes.end_training()
    if processes.is_main_process:
        _finish(folder, outcome, as_json=as_json)
    if outcome.signal:
        raise typer.Exit(128 + outcome.signal)


def _goes_on(folder: RunFolder, given: dict[str, Any]) -> bool:
    """Whether a run in the folder is to be continued; an unwanted one is refused."""
    resume, force = given.get("resume", False), given.get("force", False)
    if resume and force:
        raise HeadwiseError("--resume goes on with a run and --force replaces it; give only one.")
    if folder.record.exists() and resume:
        return True
    unfinished = resume and {"plan", "text"} <= given.keys()  # killed before its record was written
    if resume and not unfinished:
        raise HeadwiseError(
            f"{folder.path} holds no run to resume; start one with "
            f"`headwise train PLAN --text TEXT -o {folder.path}`."
        )
    if folder.path.exists() and any(folder.path.iterdir()) and not (force or unfinished):
        raise OutputError(
            f"{folder.path} exists already; go on with --resume, replace it with --force, or give "
            "another folder."
        )
    return False


def _settings(given: dict[str, Any], base: TrainSettings) -> TrainSettings:
    """`base` with every setting the person gave."""
    names = {f.name for f in fields(TrainSettings)}
    return replace(base, **{k: v for k, v in given.items() if k in names})


def _task(given: dict[str, Any]) -> Any:
    """A new run from the command line."""
    from headwise.devices import chosen_device, training_dtype
    from headwise.plan import Plan
    from headwise.training.preparation import Task, TextChoice

    for name, what in (("plan", "a plan file"), ("text", "--text")):
        if name not in given:
            raise HeadwiseError(f"headwise train needs {what}; see `headwise train --help`.")
    if "steps" in given and "tokens" in given:
        raise HeadwiseError("--steps and --tokens both say how long to train; give only one.")
    path: Path = given["plan"]
    plan = Plan.from_json(read_text(path, "a plan"), str(path))
    settings = _settings(given, TrainSettings())
    device = chosen_device(settings.device)
    settings = settings.resolved(
        context=plan.shape.context, device=device, dtype=training_dtype(settings.dtype, device)
    )
    if "tokens" in given:
        assert settings.context is not None
        n = steps_for(given["tokens"], batch_size=settings.batch_size, context=settings.context)
        warmup = given.get("warmup", max(1, n // 20))
        settings = replace(settings, steps=n, warmup=warmup)
    choice = TextChoice(
        given["text"], given.get("max_chars"), given.get("tokenizer"), given.get("vocab_size")
    )
    return Task(plan=plan, text=choice, settings=settings, command=command_line())


def _resumed(folder: RunFolder, given: dict[str, Any]) -> TrainSettings | None:
    """The settings a run goes on with, or None if it is finished; contradictions are refused."""
    from headwise.devices import chosen_device, training_dtype
    from headwise.plan import Plan
    from headwise.training.preparation import plan_hash

    record = folder.read_record()
    old = TrainSettings.from_dict(record["settings"], str(folder.record))
    new = _settings(given, old)
    device = chosen_device(new.device)
    new = replace(new, device=device, dtype=training_dtype(new.dtype, device))
    changed = list(differences(old, new))
    if "tokens" in given:
        assert old.context is not None
        n = steps_for(given["tokens"], batch_size=old.batch_size, context=old.context)
        changed += [f"steps {old.steps} → {n}"] if n != old.steps else []
    for flag, key in (
        ("text", "source"),
        ("max_chars", "max_chars"),
        ("tokenizer", "tokenizer"),
        ("vocab_size", "vocab_size"),
    ):
        if flag in given and given[flag] != record["text"][key]:
            changed.append(f"{flag} {record['text'][key]} → {given[flag]}")
    if "plan" in given:
        path: Path = given["plan"]
        plan = Plan.from_json(read_text(path, "a plan"), str(path))
        if plan_hash(plan) != record["plan_sha256"]:
            changed.append("another plan")
    if changed:
        raise HeadwiseError(
            f"{folder.path} was started with other settings, and going on with these would change "
            f"its result ({'; '.join(changed)}); leave them out, or start a new run."
        )
    return None if record["status"] == "finished" else new


def _prepare(task: Any, folder: RunFolder) -> None:
    from headwise.cli.progress import shown
    from headwise.training.preparation import prepare

    with shown("tokenising (characters)") as progress:
        prepare(task, folder, progress.update)
    text = folder.read_record()["text"]
    say(
        f"{text['source']}: {text['train_tokens']} tokens to train on, {text['held_out_tokens']} "
        f"held out ({text['split']})."
    )


def _observer(main: bool) -> Any:
    from headwise.cli.training_view import training_view

    return training_view(main)


def _finish(folder: RunFolder, outcome: Outcome, *, as_json: bool) -> None:
    if outcome.signal:
        say(
            f"Stopped by a signal after step {outcome.progress.step}, which is saved; go on with "
            f"`headwise train -o {folder.path} --resume`."
        )
    else:
        report_beside(folder.path)
    _report(folder, as_json=as_json)


def _report(folder: RunFolder, *, as_json: bool) -> None:
    record = folder.read_record()
    last = record.get("last") or {}
    document = {
        "run": str(folder.path),
        "model": str(folder.model) if record["status"] == "finished" else None,
        "status": record["status"],
        **{k: last.get(k) for k in ("step", "loss", "held_out_loss", "tokens", "seconds")},
    }
    held_out = last.get("held_out_loss")
    words = f"{record['status']} at step {last.get('step')}, loss {last.get('loss', 0):.4f}"
    words += "" if held_out is None else f", held-out loss {held_out:.4f}"
    words += f"\n{document['model']}" if document["model"] else ""
    show(document, as_json=as_json, render=words)
