"""`headwise verify`: what a cut model lost and saved, against the model it was cut from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import headwise as hw
from headwise.artifacts import check_output
from headwise.cli.console import (
    ForceFlag,
    JsonFlag,
    check_choice,
    quiet_transformers,
    say,
    show,
    shown,
    table,
)
from headwise.measure.record import (
    SIZE_NAMES,
    VERIFY_RECORD,
    ImageQuality,
    LanguageQuality,
    Quality,
    Rate,
    Targets,
    Verification,
)
from headwise.plan import Limit
from headwise.records import write_record

if TYPE_CHECKING:
    from rich.console import RenderableType

MISSED = 1  # the exit code when the work was done, but a target was missed


def verify(
    out: Annotated[str, typer.Argument(help="The cut model's folder.")],
    against: Annotated[
        str,
        typer.Option(help="What it was cut from: folder, hub name, .gguf file, builtin:smollm2."),
    ],
    text: Annotated[
        str | None, typer.Option("--text", help="Held-out text of the calibration text's kind.")
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(help="For image models, instead of --text: a folder or a .safetensors file."),
    ] = None,
    held_out: Annotated[
        list[str] | None, typer.Option(help="Also verify on this text; repeatable.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--out", help="Also write the JSON document here.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Tokens seen at once [min(context, 1024)].")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens scored per window [the window].")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each text to score [all].")
    ] = None,
    max_ratio: Annotated[
        float | None, typer.Option(min=0, help="Target: perplexity ÷ dense on --text.")
    ] = None,
    max_other_ratio: Annotated[
        float | None, typer.Option(min=0, help="Target: the same on every --held-out.")
    ] = None,
    max_attn_params: Annotated[
        str | None, typer.Option(help="Target: attention parameters, 75% or a number.")
    ] = None,
    max_params: Annotated[
        str | None, typer.Option(help="Target: all parameters, 90% or a number.")
    ] = None,
    max_kv_bytes: Annotated[
        str | None, typer.Option(help="Target: cached bytes per token, 75% or a number.")
    ] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Target: agreement of the top token, or class."),
    ] = None,
    min_cosine: Annotated[
        float | None, typer.Option(min=-1, max=1, help="Target for encoders: mean cosine.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=0, help="Timings per model; 0 skips them.")] = 5,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer folder or tokenizer.json [the models'].")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run model code found in the folders.")
    ] = False,
    as_json: JsonFlag = False,
    force: ForceFlag = False,
) -> None:
    """Measure a cut model against its source; exit code 1 says that a target was missed.

    Example: headwise verify smaller --against ./model --text held-out.txt --max-ratio 1.1
    """
    quiet_transformers()
    check_choice("dtype", dtype, ("auto", "fp32", "bf16"))
    targets = Targets(
        max_ratio=max_ratio,
        max_other_ratio=max_other_ratio,
        min_agreement=min_agreement,
        min_cosine=min_cosine,
        max_attn_params=_limit("--max-attn-params", max_attn_params),
        max_params=_limit("--max-params", max_params),
        max_kv_bytes=_limit("--max-kv-bytes", max_kv_bytes),
    )
    if output is not None:
        check_output(output, force=force)
    with shown() as progress:
        found = hw.verify(
            out,
            against=against,
            text=[*([text] if text else []), *(held_out or [])],
            images=images,
            targets=targets,
            progress=progress,
            window=window,
            stride=stride,
            max_tokens=tokens,
            tokenizer=tokenizer,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            repeats=repeats,
        )
    if output is not None:
        write_record(output, found, force=force)
        if output.resolve() == (Path(out) / VERIFY_RECORD).resolve():
            from headwise.reporting.card import write_card

            write_card(Path(out))  # it lies beside the model, so the card quotes its figures
    show(found.model_dump(mode="json"), as_json=as_json, render=verification_table(found))
    conclude(found)


def conclude(found: Verification) -> None:
    """Say the warnings and the missed targets; a missed target is exit code 1."""
    for warning in found.warnings:
        say(f"Note: {warning}")
    for target in found.targets:
        if not target.met:
            say(f"Missed: {target.sentence}")
    if not found.met:
        raise typer.Exit(MISSED)


def verification_table(found: Verification) -> RenderableType:
    """A verification as people read it."""
    rows = [row for text in found.texts for row in _quality_rows(text)]
    for name, size in found.size.items():
        share = f"{size.share:.2%}"
        rows.append((SIZE_NAMES[name], f"{size.dense:,}", f"{size.cut:,}", share))
    for which, speed in found.speed.items() if found.speed else ():
        rates = (_rate(speed.dense), _rate(speed.cut))
        rows.append((f"{which}, tokens/s", *rates, _times(speed.ratio)))
    title = f"{found.model} against {found.against}"
    return table(title, ("", ">dense", ">cut", ">cut ÷ dense"), rows)


def _quality_rows(text: Quality) -> list[tuple[str, str, str, str]]:
    where = f"{Path(text.source).name} ({text.role})"
    if isinstance(text, LanguageQuality):
        first, last = text.by_position[0], text.by_position[-1]
        perplexities = (_number(text.dense_perplexity), _number(text.perplexity))
        drift = f"{first.kl:.4f} → {last.kl:.4f} at {last.last}"
        return [
            (f"perplexity, {where}", *perplexities, _times(text.ratio)),
            ("  top token agrees", "", f"{text.top_agreement:.2%}", ""),
            ("  KL, nats per token", "", f"{text.kl:.4f}", drift),
        ]
    rows = [
        (f"cosine, {where}", "1", _number(text.cosine), ""),
        (f"least cosine, {where}", "1", _number(text.least_cosine), ""),
    ]
    if isinstance(text, ImageQuality) and text.top_agreement is not None:
        rows.append(("  top class agrees", "", f"{text.top_agreement:.2%}", ""))
        rows.append(("  KL, nats per image", "", _number(text.kl), ""))
    return rows


def _limit(option: str, value: str | None) -> Limit | None:
    return None if value is None else Limit.parse(value, option)


def _number(value: float | None) -> str:
    return "∞" if value is None else f"{value:.4f}"


def _times(ratio: float | None) -> str:
    return "∞" if ratio is None else f"×{ratio:.4f}"


def _rate(rate: Rate) -> str:
    """The median, and how far the repetitions were from it."""
    spread = max(rate.high / rate.median - 1, 1 - rate.low / rate.median)
    return f"{rate.median:,.0f} ±{spread:.0%}"
