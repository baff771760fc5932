"""`headwise recover`: a cut model learns back from the model it was cut from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli.console import ForceFlag, JsonFlag, say, show
from headwise.errors import HeadwiseError
from headwise.training.settings import TrainSettings, steps_for

_D = TrainSettings(
    lr=1e-3,
    lr_relative=True,
    batch_size=4,
    weight_decay=0.0,
    eval_every=50,
    eval_windows=16,
    save_every=25,
)
LENGTH, HELD_OUT = 512, 0.1
# Adam's first steps go as far as any later one, in directions that one batch chose. A cut model is
# near a minimum, so they would undo it: the rate rises slowly.
WARMUP = 0.125  # of the steps


def recover(
    model: Annotated[Path, typer.Argument(help="The cut model's folder.")],
    against: Annotated[
        str, typer.Option(help="What it was cut from: folder, hub name, .gguf, builtin:smollm2.")
    ],
    text: Annotated[
        str, typer.Option("--text", help="File, folder, hub:owner/name or builtin:python.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The recovered model's folder.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to train on.")] = 100_000,
    length: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = LENGTH,
    batch_size: Annotated[
        int, typer.Option(help="Windows per step, over all processes.")
    ] = _D.batch_size,
    lr: Annotated[
        float, typer.Option(help="Highest learning rate, as a share of each matrix's size.")
    ] = _D.lr,
    seed: Annotated[int, typer.Option(help="Of the batches.")] = _D.seed,
    held_out: Annotated[
        float, typer.Option(help="Share of the text that is never trained on.")
    ] = HELD_OUT,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = _D.save_every,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = _D.device,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Train the attention of a cut model on the predictions of the dense one.

    Run the same command again to go on after a kill; torchrun shares the work.

    Example: headwise recover smaller --against ./model --text notes.txt -o recovered
    """
    asked = Asked(tokens, length, batch_size, lr, seed, held_out, save_every, device)
    document = recovered(model, against, text, out, asked, force=force)
    if document is not None:
        lines = [f"{name}: {value}" for name, value in document.items()]
        show(document, as_json=as_json, render="\n".join(lines))


@dataclass(frozen=True, slots=True)
class Asked:
    """The settings of a recovery that the command line offers."""

    tokens: int
    length: int = LENGTH
    batch_size: int = _D.batch_size
    lr: float = _D.lr
    seed: int = _D.seed
    held_out: float = HELD_OUT
    save_every: int = _D.save_every
    device: str = _D.device


def recovered(
    model: Path, against: str, text: str, out: Path, asked: Asked, *, force: bool
) -> dict[str, Any] | None:
    """Recover into `out`; what to report, or None in all but the first of several processes."""
    from headwise.artifacts import refuse_existing
    from headwise.cli.evaluate import quiet_transformers
    from headwise.cli.training_view import training_view
    from headwise.devices import chosen_device
    from headwise.report.card import write_card
    from headwise.training.processes import accelerator
    from headwise.training.recovery import recover as run_recovery

    quiet_transformers()
    refuse_existing(out, force=force)
    place = chosen_device(asked.device)
    steps = steps_for(asked.tokens, batch_size=asked.batch_size, context=asked.length)
    settings = replace(
        _D,
        steps=steps,
        warmup=max(1, round(WARMUP * steps)),
        batch_size=asked.batch_size,
        lr=asked.lr,
        seed=asked.seed,
        save_every=asked.save_every,
        held_out=asked.held_out,
    ).resolved(context=asked.length, device=place, dtype="fp32")
    task = _task(model, against, text, settings)
    processes = accelerator(place)
    with training_view(processes.is_main_process) as observer:
        outcome = run_recovery(
            task,
            out,
            processes,
            force=force,
            observer=observer,
            finishing=lambda made: write_card(made, model, name=out.name),
        )
    processes.end_training()
    if outcome.signal:
        say("Stopped; the same command goes on.")
        raise typer.Exit(128 + outcome.signal)
    if not processes.is_main_process:
        return None
    say(f"Wrote {out}.")
    last = outcome.last
    found = {"loss": last.loss, "held_out_loss": last.held_out_loss} if last else {}
    return {"out": str(out), "steps": settings.steps, **found}


def _task(model: Path, against: str, text: str, settings: TrainSettings) -> Any:
    """The cut model, its teacher and the tokens, loaded."""
    from headwise.data.split import held_out_split
    from headwise.data.text import read_source
    from headwise.data.tokens import token_stream
    from headwise.measure.loading import load_model
    from headwise.nn.modeling_headwise import HeadwisePreTrainedModel
    from headwise.training.recovery import Recovery

    source = read_source(text)
    parts = held_out_split(source.documents, settings.held_out)
    cut, words = load_model(str(model), device="cpu", dtype="fp32")
    if not isinstance(cut, HeadwisePreTrainedModel):
        raise HeadwiseError(f"{model} must be a model that headwise cut, got {type(cut).__name__}.")
    teacher, _ = load_model(against, device="cpu", dtype="fp32")
    assert settings.context is not None
    most = settings.steps * settings.batch_size * settings.context + 2 * settings.context
    return Recovery(
        folder=model,
        model=cut,
        teacher=teacher,
        tokens=token_stream(words, parts.train, most=most),
        held_out=token_stream(words, parts.held_out, most=32 * settings.context),
        text_sha256=source.sha256,
        settings=settings,
    )
