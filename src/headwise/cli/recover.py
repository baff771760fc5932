"""`headwise recover`: a cut model learns back from the model it was cut from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise.cli.console import ForceFlag, JsonFlag, command_line, say, show
from headwise.training.settings import RecoverSettings

if TYPE_CHECKING:
    from headwise.training.recover import RecoverResult

_D = RecoverSettings()


def recover(
    model: Annotated[Path, typer.Argument(help="The cut model's folder.")],
    against: Annotated[
        str, typer.Option(help="What it was cut from: folder, hub name, .gguf, builtin:smollm2.")
    ],
    text: Annotated[
        str, typer.Option("--text", help="File, folder, hub:owner/name or builtin:python.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The recovered model's folder.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to train on.")] = _D.tokens,
    length: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = _D.length,
    batch_size: Annotated[
        int, typer.Option(help="Windows per step, over all processes.")
    ] = _D.batch_size,
    lr: Annotated[
        float, typer.Option(help="Peak learning rate, relative to each matrix's root mean square.")
    ] = _D.lr,
    seed: Annotated[int, typer.Option(help="Random seed for the batches.")] = _D.seed,
    held_out: Annotated[
        float, typer.Option(help="Share of the text that is never trained on.")
    ] = _D.held_out,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = _D.save_every,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = _D.device,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Train the attention of a cut model on the predictions of the dense one.

    Run the same command again to resume after a kill; torchrun shares the work.

    Example: headwise recover smaller --against ./model --text notes.txt -o recovered
    """
    settings = RecoverSettings(
        *(tokens, length, batch_size, lr, seed, held_out, save_every),
        device=device,  # type: ignore[arg-type]
    )
    result = run_recovery(model, against, text, out, settings, force=force)
    if os.environ.get("RANK", "0") == "0":
        found = {"loss": result.loss, "held_out_loss": result.held_out_loss}
        document = {"out": str(out), "steps": result.steps, **found}
        lines = [f"{name}: {value}" for name, value in document.items()]
        show(document, as_json=as_json, render="\n".join(lines))


def run_recovery(
    model: Path,
    against: str,
    text: str,
    out: Path,
    settings: RecoverSettings,
    *,
    force: bool,
    last: tuple[str, ...] = (),
) -> RecoverResult:
    """Recover into `out`, shown on stderr, with a model card."""
    from headwise.cli.console import quiet_transformers
    from headwise.cli.training_view import training_view
    from headwise.reporting.card import write_card
    from headwise.training.recover import recover as recover_model

    quiet_transformers()
    first = os.environ.get("RANK", "0") == "0"  # of several processes, only the first speaks
    with training_view(first) as observer:
        result = recover_model(
            *(model, against, text, out),
            settings=settings,
            force=force,
            observer=observer,
            finishing=lambda made: write_card(made, model, name=out.name),
            last=last,
            command=command_line(),
        )
    if first:
        say("Stopped. Run the same command again to resume." if result.signal else f"Wrote {out}.")
    if result.signal:
        raise typer.Exit(128 + result.signal)
    return result
