"""`headwise profile`: what a trained model's heads do on a text, and what the loss needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.calibration import ImagesOption, read_given
from headwise.cli.console import ForceFlag, JsonFlag, say, show, table
from headwise.cli.evaluate import check_choice, quiet_transformers
from headwise.cli.report import report_beside
from headwise.profile.settings import ProfileSettings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headwise.profile.chunks import Job
    from headwise.profile.format import Profile

_D = ProfileSettings()


def profile(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder or name.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The profile's folder.")],
    text: Annotated[
        str | None, typer.Option("--text", help="File, folder, hub:owner/name or builtin:python.")
    ] = None,
    images: ImagesOption = None,
    length: Annotated[
        int | None, typer.Option(help=f"Tokens per sequence [min({_D.length}, its context)].")
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Tokens read at most; an image has one per patch and one more.")
    ] = _D.tokens,
    chunk: Annotated[int, typer.Option(help="Sequences run and saved together.")] = _D.chunk,
    seed: Annotated[int, typer.Option(help="Of an encoder's masks and probes.")] = _D.seed,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer folder or tokenizer.json [the model's].")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    device_map: Annotated[
        str | None, typer.Option(help="Spread the model over devices: auto, balanced, sequential.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run model code found in the folder.")
    ] = False,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure a model's heads on a text, or on images: one forward and one backward pass.

    Run the same command again to go on after a kill. Several processes share the work:
    torchrun --nproc_per_node 2 -m headwise profile …

    Example: headwise profile ./model --text notes.txt -o model.profile
    """
    from headwise.artifacts import refuse_existing
    from headwise.profile.chunks import Job
    from headwise.profile.source import Loading, load_profiled, sequences, usual_length

    quiet_transformers()
    check_choice("dtype", dtype, ("auto", "fp32", "bf16"))
    refuse_existing(out, force=force)
    source = read_given(text, images)
    loading = Loading(device, dtype, trust_remote_code, tokenizer, device_map)  # type: ignore[arg-type]
    loaded, reader = load_profiled(model, loading)
    if length is None:
        length = usual_length(loaded, _D.length)
    settings = ProfileSettings(length=length, tokens=tokens, chunk=chunk, seed=seed)
    job = Job(loaded, model, sequences(loaded, reader, source, settings), settings)
    made = _run(job, out, force=force)
    if made is not None:
        report_beside(out)
        show(_document(made, out), as_json=as_json, render=_picture(made))
        say(f"Wrote {out}.")


def _run(job: Job, out: Path, *, force: bool) -> Profile | None:
    """The profile; None in all but the first of several processes."""
    from headwise.cli.progress import shown
    from headwise.profile.chunks import Partial, described, measure_chunks
    from headwise.profile.run import finish, profile_model

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        with shown("profiling") as progress:
            return profile_model(job, out, force=force, tick=progress.update)

    from headwise.devices import chosen_device
    from headwise.training.processes import accelerator, on_main

    processes = accelerator(chosen_device(job.model.device.type))
    description, partial = described(job), Partial(out)
    on_main(processes, lambda: partial.open(description, force=force))
    with shown("profiling") as progress:
        measure_chunks(
            job,
            partial,
            rank=processes.process_index,
            processes=processes.num_processes,
            tick=progress.update if processes.is_main_process else None,
        )
    processes.wait_for_everyone()
    made: list[Profile] = []
    on_main(
        processes,
        lambda: made.append(finish(job, partial, out, description, force=force)),
    )
    processes.end_training()
    return made[0] if made else None


def _document(made: Profile, out: Path) -> dict[str, Any]:
    record = made.record.model_dump(mode="json", exclude={"plan", "tensors"})
    return {"profile": str(out), "profile_sha256": made.sha256, **record, "layers": _layers(made)}


def _layers(made: Profile) -> list[dict[str, float | None]]:
    """Per layer: what dropping each side would cost, and how saturated its attention is."""

    def half(layer: int, *parts: str) -> float | None:
        names = [f"{part}_sensitivity" for part in parts if made.has(layer, f"{part}_sensitivity")]
        return 0.5 * sum(float(made.get(layer, n).sum()) for n in names) if names else None

    return [
        {
            "query_key": half(i, "plane", "free"),
            "value_output": half(i, "vo"),
            "entropy": float(made.get(i, "entropy")[-1].mean()),
            "jacobian_norm": float(made.get(i, "jacobian_norm")[-1].mean()),
            "score_spread": float(made.get(i, "score_spread")[-1].mean()),
        }
        for i in range(len(made.plan.layers))
    ]


def _picture(made: Profile) -> RenderableType:
    from rich.console import Group

    record = made.record
    loss = "" if record.loss is None else f", loss {record.loss:.4f} {record.unit}"
    read = f"{record.sequences} {'images' if record.of_images else 'sequences'}"
    title = f"{record.model}: {read} of {record.settings['length']} tokens{loss}"
    rows = [
        (str(i), *("–" if x is None else f"{x:.4g}" for x in layer.values()))
        for i, layer in enumerate(_layers(made))
    ]
    at = f"at {record.lengths[-1]}"
    columns = (
        ">layer",
        ">query-key sensitivity",
        ">value-output sensitivity",
        f">entropy {at}",
        f">Jacobian norm {at}",
        f">score spread {at}",
    )
    return Group(table(title, columns, rows), *(f"Note: {note}." for note in record.notes))
