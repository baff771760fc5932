"""`headwise compress`: a trained model made smaller, with the proof beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli import calibration as calibration_cli
from headwise.cli import parsing
from headwise.cli import plan as plan_cli
from headwise.cli import recover as recover_cli
from headwise.cli import verify as verify_cli
from headwise.cli.console import ForceFlag, JsonFlag, command_line, read_text, say, show
from headwise.cli.report import report_beside
from headwise.compress.settings import CutSettings
from headwise.errors import BudgetError, HeadwiseError
from headwise.profile.settings import ProfileSettings

if TYPE_CHECKING:
    from headwise.data.images import Images
    from headwise.data.text import Text
    from headwise.plan import Budget, Plan
    from headwise.planning.worth_curves import FitRules
    from headwise.profile.format import Profile

_D, _C = ProfileSettings(), CutSettings()


def compress(
    model: Annotated[
        str, typer.Argument(help="Folder, hub name, .gguf file, builtin:smollm2 or builtin:minilm.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The cut model's folder.")],
    text: Annotated[
        str | None,
        typer.Option("--text", help="Calibrate on this; a tenth of it is kept for the proof."),
    ] = None,
    images: calibration_cli.ImagesOption = None,
    keep: Annotated[plan_cli.Limits, plan_cli.limit_option("Attention parameters")] = None,
    total_params: Annotated[plan_cli.Limits, plan_cli.limit_option("All parameters")] = None,
    kv_bytes: Annotated[plan_cli.Limits, plan_cli.limit_option("KV bytes per token")] = None,
    flops: Annotated[plan_cli.Limits, plan_cli.limit_option("FLOPs per token")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Cut to this plan (from `plan fit`) instead of a budget.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="The profile, made if it is not there [OUT.profile].")
    ] = None,
    granularity: Annotated[
        str, typer.Option(help="Widths free per head, or equal per layer or in the whole model.")
    ] = "head",
    multiple_of: Annotated[int, typer.Option(help="Head widths are multiples of this.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens to calibrate on.")] = _D.tokens,
    length: Annotated[
        int | None, typer.Option(help=f"Tokens per sequence [min({_D.length}, its context)].")
    ] = None,
    refit: Annotated[
        bool, typer.Option(help="Refit each layer's output projection on the cut layers before it.")
    ] = _C.refit,
    fit: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Steps of fitting each layer's projections to the dense layer; 0: none "
            "[one pass over the text].",
        ),
    ] = _C.fit,
    recover: Annotated[
        int | None,
        typer.Option(min=1, help="Then train the attention on this many tokens (`recover`)."),
    ] = None,
    other_text: Annotated[
        list[str] | None, typer.Option("--other-text", help="Also verify on this; repeatable.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Measure the result against the source.")] = True,
    verify_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each text to verify on.")
    ] = 16384,
    max_ratio: Annotated[
        float | None,
        typer.Option(min=0, help="Target: perplexity ÷ dense; exit code 1 if it is missed."),
    ] = None,
    force: ForceFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Cut a trained model down to a budget: profile, plan, cut, verify.

    Run the same command again to go on after a kill. Nothing is trained unless --recover asks.

    Example: headwise compress builtin:smollm2 --keep 75% --text notes.txt -o smaller
    """
    from headwise.artifacts import refuse_existing
    from headwise.cli.evaluate import quiet_transformers
    from headwise.cli.progress import shown
    from headwise.compress.run import Request, is_finished
    from headwise.compress.run import compress as cut_model
    from headwise.planning.worth_curves import FitRules

    quiet_transformers()
    budget = parsing.budget(
        {"attn_params": keep, "total_params": total_params, "kv_bytes": kv_bytes, "flops": flops},
        names={"attn_params": "--keep"},
    )
    _check(budget, plan, max_ratio, verify=verify)
    _refuse_with(images, recover=recover, other_text=other_text, max_ratio=max_ratio)
    refuse_existing(out, force=force or _is_unproven(out, verify=verify))
    # Whatever can be wrong is found before the long work.
    rules, given = FitRules(granularity, multiple_of), _read_plan(plan) if plan else None
    profile = profile or out.with_name(f"{out.name}.profile")
    source = calibration_cli.read_given(text, images)
    calibration, held_out = calibration_cli.parts_for(source, profile)
    measured: list[str | Text | Images] = [held_out] if held_out else []
    measured += other_text or []
    if verify and not measured:
        raise _nothing_left(profile, source)
    made = calibration_cli.profiled(model, calibration, profile, tokens, length)
    chosen = given or _fitted(made, budget, rules)
    request = Request(model, made, chosen, replace(_C, refit=refit, fit=fit), command_line())
    cut = out if recover is None else out.with_name(f"{out.name}.cut")
    if not is_finished(request, cut):  # a killed recovery finds its cut model finished
        with shown("cutting") as progress:
            cut_model(request, cut, force=force, tick=progress.update)
        say(f"Wrote {cut}.")
    if recover is not None:
        length = made.record.settings["length"]
        asked = recover_cli.Asked(recover, length=length, held_out=calibration_cli.HELD_OUT)
        if not (is_finished(request, out) and _is_recovered(out, asked)):
            recover_cli.recovered(cut, model, source.source, out, asked, force=force)
    else:
        _write_card(out, model)
    record = json.loads((out / "headwise.json").read_text(encoding="utf-8"))
    document: dict[str, Any] = {"out": str(out), "cut": record, **plan_cli.costs(chosen, None)}
    if not verify:
        report_beside(out, profile)
        show(document, as_json=as_json, render=plan_cli.picture(chosen))
        return
    proof = _verified(out, model, measured, verify_tokens)
    targets = verify_cli.quality_targets(proof, {"--max-ratio": max_ratio})
    verify_cli.judge(proof, targets)
    _write_proof(out, proof)
    _write_card(out)
    report_beside(out, profile)
    document["verify"] = proof
    show(document, as_json=as_json, render=verify_cli.verification_table(proof))
    verify_cli.conclude(proof, targets)


def _check(budget: Budget, plan: Path | None, max_ratio: float | None, *, verify: bool) -> None:
    if (plan is None) == (not budget.limited):
        came = "neither" if plan is None else "both"
        raise BudgetError(
            f"a cut needs a budget such as --keep 75%, or a --plan, got {came}; give one of them."
        )
    if max_ratio is not None and not verify:
        raise HeadwiseError("--max-ratio needs the verification that --no-verify leaves out.")


def _nothing_left(profile: Path, source: Text | Images) -> HeadwiseError:
    from headwise.data.images import Images

    advice = "--no-verify" if isinstance(source, Images) else "--other-text, or --no-verify"
    return HeadwiseError(
        f"{profile} was made on all of {source.source}, so nothing of it is left for the proof; "
        f"give {advice}."
    )


def _refuse_with(images: str | None, **asked: object) -> None:
    """Refuse options that are for text where images are given."""
    for name, value in asked.items():
        if images is not None and value:
            option = f"--{name.replace('_', '-')}"
            raise HeadwiseError(f"{option} is for models of text, not with --images; leave it out.")


def _is_unproven(out: Path, *, verify: bool) -> bool:
    """Whether `out` may be a cut that was killed before its card or its proof was written."""
    wanted = ("README.md", "verify.json") if verify else ("README.md",)
    return (out / "headwise.json").exists() and not all((out / name).exists() for name in wanted)


def _is_recovered(out: Path, asked: recover_cli.Asked) -> bool:
    """Whether `out` was trained for just as long as is asked."""
    from headwise.training.settings import steps_for

    record = json.loads((out / "headwise.json").read_text(encoding="utf-8"))
    done = record.get("recovery", {}).get("settings", {}).get("steps")
    steps = steps_for(asked.tokens, batch_size=asked.batch_size, context=asked.length)
    return bool(done == steps)


def _fitted(profile: Profile, budget: Budget, rules: FitRules) -> Plan:
    from headwise.cli.plan_fit import with_origin
    from headwise.planning.fit import fit
    from headwise.profile.worth import fit_task

    return with_origin(fit(fit_task(profile, "sensitivity", rules), budget), profile)


def _read_plan(path: Path) -> Plan:
    from headwise.plan import Plan

    return Plan.from_json(read_text(path, "a plan file"), str(path))


def _verified(
    out: Path, model: str, texts: list[str | Text | Images], tokens: int
) -> dict[str, Any]:
    from headwise.cli.progress import shown
    from headwise.measure.verification import Settings, verification

    with shown("verifying") as bar:
        return verification(
            str(out),
            model,
            texts,
            Settings(max_tokens=tokens),
            lambda what, done, total: bar.update(done, total, what),
        )


def _write_proof(out: Path, proof: dict[str, Any]) -> None:
    from headwise.artifacts import write_text

    text = json.dumps(proof, indent=2, allow_nan=False) + "\n"
    write_text(out / "verify.json", text, force=True)


def _write_card(out: Path, model: str | None = None) -> None:
    """The model card; `model` is the source, whose licence comes along."""
    from headwise.nn.sources import local_folder
    from headwise.report.card import write_card

    write_card(out, None if model is None else local_folder(model))
