"""`headwise verify`: what a cut model lost and saved, against the model it was cut from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwise.cli.calibration import ImagesOption, read_given
from headwise.cli.console import ForceFlag, JsonFlag, say, show, table

if TYPE_CHECKING:
    from rich.console import RenderableType

MISSED = 1  # exit code when the work was done and a target was not met


@dataclass(frozen=True, slots=True)
class Target:
    """What was asked of one figure; `at_least` or at most."""

    option: str
    limit: float
    found: float | None  # None: beyond any float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the figure keeps the limit."""
        if self.found is None:
            return False
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    @property
    def sentence(self) -> str:
        """What was missed."""
        bound = "at least" if self.at_least else "at most"
        found = "beyond any float" if self.found is None else _plain(self.found)
        return f"{self.option} asked for {bound} {_plain(self.limit)}, but it is {found}."


def verify(
    out: Annotated[str, typer.Argument(help="The cut model's folder.")],
    against: Annotated[
        str,
        typer.Option(help="What it was cut from: folder, hub name, .gguf file, builtin:smollm2."),
    ],
    text: Annotated[
        str | None, typer.Option("--text", help="Held-out text of the calibration text's kind.")
    ] = None,
    images: ImagesOption = None,
    other_text: Annotated[
        list[str] | None, typer.Option("--other-text", help="Text of another kind; repeatable.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also write the JSON document here.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Tokens seen at once [min(context, 1024)].")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens scored per window [the window].")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Score only the first N tokens of each text.")
    ] = None,
    max_ratio: Annotated[
        float | None, typer.Option(min=0, help="Target: perplexity ÷ dense on --text.")
    ] = None,
    max_other_ratio: Annotated[
        float | None, typer.Option(min=0, help="Target: the same on every --other-text.")
    ] = None,
    max_attn_params: Annotated[
        str | None, typer.Option(help="Target: attention parameters, 75% or a number.")
    ] = None,
    max_total_params: Annotated[
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
    from headwise.artifacts import refuse_existing, write_text
    from headwise.cli.evaluate import check_choice, quiet_transformers
    from headwise.cli.progress import shown
    from headwise.measure.verification import Settings, verification
    from headwise.report.card import write_card

    quiet_transformers()
    check_choice("dtype", dtype, ("auto", "fp32", "bf16"))
    sizes = {
        "attn_params": _limit("--max-attn-params", max_attn_params),
        "total_params": _limit("--max-total-params", max_total_params),
        "kv_bytes": _limit("--max-kv-bytes", max_kv_bytes),
    }
    if output is not None:
        refuse_existing(output, force=force)
    source = read_given(text, images)
    settings = Settings(
        window=window,
        stride=stride,
        max_tokens=max_tokens,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,  # type: ignore[arg-type]
        trust_remote_code=trust_remote_code,
        repeats=repeats,
    )
    with shown("verifying") as bar:
        document = verification(
            out,
            against,
            [source, *(other_text or [])],
            settings,
            lambda what, done, total: bar.update(done, total, what),
        )
    quality = {
        "--max-ratio": max_ratio,
        "--max-other-ratio": max_other_ratio,
        "--min-agreement": min_agreement,
        "--min-cosine": min_cosine,
    }
    targets = [*quality_targets(document, quality), *_size_targets(document, sizes)]
    judge(document, targets)
    if output is not None:
        text_form = json.dumps(document, indent=2, allow_nan=False) + "\n"
        write_text(output, text_form, force=force)
        if output.resolve() == (Path(out) / "verify.json").resolve():
            write_card(Path(out))  # the proof lies beside the model: its card tells the figures
    show(document, as_json=as_json, render=verification_table(document))
    conclude(document, targets)


def judge(document: dict[str, Any], targets: list[Target]) -> None:
    """Note in the document what was asked and whether it was met."""
    document["targets"] = [
        {"option": t.option, "limit": t.limit, "found": t.found, "met": t.met} for t in targets
    ]
    document["met"] = all(t.met for t in targets)


def conclude(document: dict[str, Any], targets: list[Target]) -> None:
    """Say what to mind and what was missed; a missed target is exit code 1."""
    for warning in document["warnings"]:
        say(f"Note: {warning}")
    for target in targets:
        if not target.met:
            say(f"Missed: {target.sentence}")
    if not document["met"]:
        raise typer.Exit(MISSED)


def verification_table(document: dict[str, Any]) -> RenderableType:
    """What people read of a verification document."""
    rows: list[tuple[str, str, str, str]] = []
    for text in document["texts"]:
        where = f"{Path(text['source']).name} ({text['role']})"
        if "cosine" in text:
            rows.append((f"cosine, {where}", "1", _number(text["cosine"]), ""))
            rows.append((f"least cosine, {where}", "1", _number(text["least_cosine"]), ""))
            if "top_agreement" in text:
                rows.append(("  top class agrees", "", f"{100 * text['top_agreement']:.2f}%", ""))
                rows.append(("  KL, nats per image", "", f"{text['kl']:.4f}", ""))
            continue
        dense, own = text["dense_perplexity"], text["perplexity"]
        rows.append((f"perplexity, {where}", _number(dense), _number(own), _times(text["ratio"])))
        rows.append(("  top token agrees", "", f"{100 * text['top_agreement']:.2f}%", ""))
        first, last = text["by_position"][0], text["by_position"][-1]
        drift = f"{first['kl']:.4f} → {last['kl']:.4f} at {last['last']}"
        rows.append(("  KL, nats per token", "", f"{text['kl']:.4f}", drift))
    names = {
        "attn_params": "attention parameters",
        "total_params": "parameters",
        "kv_bytes": "cached bytes per token",
    }
    for name, size in document["size"].items():
        share = f"{100 * size['share']:.2f}%"
        rows.append((names[name], f"{size['dense']:,}", f"{size['cut']:,}", share))
    for name in ("prefill", "decode"):
        speed = (document["speed"] or {}).get(name)
        if speed:
            dense, own = _rate(speed["dense"]), _rate(speed["cut"])
            rows.append((f"{name}, tokens/s", dense, own, _times(speed["ratio"])))
    title = f"{document['model']} against {document['against']}"
    return table(title, ("", ">dense", ">cut", ">cut ÷ dense"), rows)


def _limit(option: str, value: str | None) -> Any:
    from headwise.plan import Limit

    return None if value is None else Limit.parse(value, option)


def quality_targets(document: dict[str, Any], asked: dict[str, float | None]) -> list[Target]:
    """What was asked of quality, beside what was found."""
    from headwise.errors import HeadwiseError

    keys = {
        "--max-ratio": "ratio",
        "--max-other-ratio": "ratio",
        "--min-agreement": "top_agreement",
        "--min-cosine": "cosine",
    }
    found = []
    for option, limit in asked.items():
        if limit is None:
            continue
        texts = document["texts"]
        texts = texts[1:] if option == "--max-other-ratio" else texts[:1]
        for text in texts:
            if keys[option] not in text:
                raise HeadwiseError(
                    f"{option} is not a target for {document['kind']} models; leave it out."
                )
            at_least = option.startswith("--min")
            found.append(Target(option, limit, text[keys[option]], at_least=at_least))
    return found


def _size_targets(document: dict[str, Any], asked: dict[str, Any]) -> list[Target]:
    from headwise.errors import HeadwiseError

    found = []
    for name, limit in asked.items():
        if limit is None:
            continue
        option = f"--max-{name.replace('_', '-')}"
        if name not in document["size"]:
            raise HeadwiseError(
                f"{option} is not a target for {document['kind']} models; leave it out."
            )
        size = document["size"][name]
        most = limit.amount if limit.share is None else int(limit.share * size["dense"] + 1e-6)
        found.append(Target(option, float(most), float(size["cut"])))
    return found


def _plain(value: float) -> str:
    """Counts in full, other figures to six digits."""
    return f"{value:,.0f}" if value.is_integer() else f"{value:.6g}"


def _number(value: float | None) -> str:
    return "∞" if value is None else f"{value:.4f}"


def _times(ratio: float | None) -> str:
    return "∞" if ratio is None else f"×{ratio:.4f}"


def _rate(rate: dict[str, float]) -> str:
    """The median, and how far the repetitions lay from it."""
    spread = max(rate["high"] / rate["median"] - 1, 1 - rate["low"] / rate["median"])
    return f"{rate['median']:,.0f} ±{100 * spread:.0f}%"
