"""The report of a training run: curves, the plan, and what the model writes."""

from __future__ import annotations

from dataclasses import replace

from headwise.planning.cost import cost, dense_cost
from headwise.report import pieces
from headwise.report.card_metadata import shown_source
from headwise.report.head_charts import width_maps
from headwise.report.pieces import Card
from headwise.report.proof_charts import loss_chart, rate_chart
from headwise.report.sources import TrainingRun

PROMPTS = ("", "The ", "def ")
NEW_TOKENS = 80


def run_page(run: TrainingRun) -> str:
    """The whole page."""
    record, last = run.record, run.rows[-1] if run.rows else None
    text = record["text"]
    source = shown_source(text["source"])
    lead = f"Trained on {text['train_tokens']:,} tokens of {source}; {record['status']}."
    parts = [pieces.section("How it went", pieces.cards(_headline(run)))]
    warned = list(_warnings(run))
    if warned:
        parts.append(pieces.section("Mind this", pieces.warnings(warned)))
    if last is not None:
        charts = [loss_chart(run.rows), rate_chart(run.rows)]
        parts.append(pieces.section("Curves", pieces.figures(charts, "run")))
    parts.append(pieces.section("The plan", pieces.figures(width_maps(run.plan), "map")))
    if run.samples:
        parts.append(_samples(run))
    parts.append(_provenance(run))
    return pieces.page(f"Training run: {run.folder.path.resolve().name}", lead, *parts)


def with_samples(run: TrainingRun) -> TrainingRun:
    """The run with what its finished model writes; without a model, as it is."""
    if not run.folder.model.is_dir():
        return run
    from headwise.errors import HeadwiseError
    from headwise.measure.generation import continuation
    from headwise.measure.loading import load_model

    model, words = load_model(str(run.folder.model), device="cpu", dtype="fp32")
    most = min(NEW_TOKENS, run.plan.shape.context // 2)
    found = []
    for seed, prompt in enumerate(PROMPTS):
        try:
            made = continuation(model, words, prompt, max_new_tokens=most, seed=seed)
        except HeadwiseError:  # a tokenizer without a start token cannot begin from nothing
            continue
        found.append((prompt, made.text))
    return replace(run, samples=tuple(found))


def _headline(run: TrainingRun) -> list[Card]:
    spent, dense = cost(run.plan), dense_cost(run.plan.shape)
    share = spent.attn_params / dense.attn_params
    items = [
        Card("Parameters", f"{spent.total_params:,}", f"of {dense.total_params:,} if uniform"),
        Card("Attention parameters", f"{spent.attn_params:,}", f"{share:.1%} of uniform heads"),
    ]
    if run.rows:
        last = run.rows[-1]
        held = [r for r in run.rows if r.get("held_out_loss") is not None]
        if held:
            loss = held[-1]["held_out_loss"]
            items.append(Card("Held-out loss", f"{loss:.3f}", f"at step {held[-1]['step']}"))
        items.append(Card("Training loss", f"{last['loss']:.3f}", f"at step {last['step']}"))
        rate = f"{last['tokens_per_second']:,.0f} tokens/s"
        items.append(Card("Tokens seen", f"{last['tokens']:,}", rate))
    return items


def _warnings(run: TrainingRun) -> list[str]:
    found = []
    status, text = run.record["status"], run.record["text"]
    if status != "finished":
        reason = run.record.get("reason")
        found.append(f"The run is {status}{f': {reason}' if reason else ''}.")
    if not run.rows:
        found.append("No step has been taken yet.")
    elif run.rows[-1]["tokens"] > 4 * text["train_tokens"]:
        times = run.rows[-1]["tokens"] / text["train_tokens"]
        found.append(f"It saw every token about {times:.0f} times; watch the held-out loss.")
    return found


def _samples(run: TrainingRun) -> str:
    parts = [pieces.paragraph("Drawn at temperature 0.8, not chosen. The prompt comes first.")]
    for prompt, text in run.samples:
        parts += [pieces.quotation(f"{prompt}{text}")]
    return pieces.section("What it writes", *parts)


def _provenance(run: TrainingRun) -> str:
    record = run.record
    settings = ", ".join(f"{name} {value}" for name, value in record["settings"].items())
    rows = [
        ("text", record["text"]["source"]),
        ("text's SHA-256", record["text"]["sha256"]),
        ("held out", record["text"]["split"]),
        ("settings", settings),
        ("made with", ", ".join(f"{n} {v}" for n, v in record["versions"].items())),
    ]
    return pieces.section("Where it came from", pieces.facts(rows), pieces.code(record["command"]))
