"""Does the predicted loss order plans as the measured loss does? On a real model, as JSON.

Plans (budgets from 90% to 50%, the loss-aware policy and the rules of thumb, widths free or equal
in a layer) are cut in memory without refitting and measured on text the profile has not seen.
Spearman's rank correlation of predicted and measured loss is what counts, over all plans and over
those with equal widths in a layer, which are what is fitted by default; that of the plain number
of parameters stands beside it.

    python benchmarks/rank_correlation.py builtin:smollm2 --tokens 8192 --measured 2048
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr
from transformers.initialization import no_init_weights

from headwise.cutting.cut import cut_projections
from headwise.data.text import Text, held_out_split, read_source
from headwise.measure.comparison import embedding_cosines, text_comparison
from headwise.measure.likelihood import scored_stream
from headwise.models.backbones_headwise import projections_of
from headwise.models.build import headwise_config, load_around, load_projections
from headwise.plan import Budget, Limit, Plan
from headwise.planning.cost import cost
from headwise.planning.fit import fit, predicted_loss
from headwise.planning.rules import WidthRules
from headwise.profiling.format import Profile
from headwise.profiling.run import ProfileJob, profile_model
from headwise.profiling.settings import ProfileSettings
from headwise.profiling.source import load_for_profiling, sequences
from headwise.profiling.worth import fit_problem
from headwise.source import open_source

# Policy, share of attention parameters, granularity.
CASES = (
    ("sensitivity", 0.9, "head"),
    ("sensitivity", 0.8, "head"),
    ("sensitivity", 0.65, "head"),
    ("sensitivity", 0.5, "head"),
    ("sensitivity", 0.9, "layer"),
    ("sensitivity", 0.75, "layer"),
    ("sensitivity", 0.6, "layer"),
    ("sensitivity", 0.5, "layer"),
    ("uniform", 0.8, "layer"),
    ("narrower-late", 0.7, "layer"),
    ("wider-late", 0.75, "layer"),
    ("energy", 0.85, "layer"),
    ("uniform", 0.875, "head"),
    ("uniform", 0.75, "head"),
    ("uniform", 0.5, "head"),
    ("narrower-late", 0.8, "head"),
    ("energy", 0.75, "head"),
    ("saturation", 0.7, "head"),
)
Measure = Callable[[Any], float]  # a cut model: how much it lost


def plans(profile: Profile) -> Iterator[tuple[str, Plan]]:
    """The plans of `CASES`, each with its name."""
    for policy, share, granularity in CASES:
        task = fit_problem(profile, policy, WidthRules(granularity, 4))
        budget = Budget(attn_params=Limit(share=share))
        yield f"{policy} {share:.1%} by {granularity}", fit(task, budget).plan


def cut_model(dense: Any, profile: Profile, plan: Plan) -> Any:
    """The dense headwise model cut to a plan in memory, nothing refitted."""
    task = "causal-lm" if plan.shape.causal else "bare"
    config = headwise_config(plan, dense.config.backbone, task)
    with no_init_weights():
        model = type(dense)._from_config(config, dtype=dense.dtype)
    load_around(model, dense)
    for i, (narrow, whole) in enumerate(zip(model.attentions(), dense.attentions(), strict=True)):
        load_projections(narrow, cut_projections(profile, plan, i, projections_of(whole)))
    return model.eval()


def correlation(dense: Any, profile: Profile, measure: Measure) -> dict[str, Any]:
    """Every plan's predicted and measured loss, and how alike they order the plans."""
    task = fit_problem(profile, "sensitivity", WidthRules())
    rows: list[dict[str, Any]] = [
        {
            "plan": name,
            "attn_params": cost(plan).attn_params,
            "predicted": predicted_loss(task, plan),
            "measured": measure(cut_model(dense, profile, plan)),
        }
        for name, plan in plans(profile)
    ]
    by_layer = [row for row in rows if row["plan"].endswith("by layer")]

    def ordered(some: list[dict[str, Any]], by: str, sign: int = 1) -> float:
        given = [sign * row[by] for row in some]
        return float(spearmanr(given, [row["measured"] for row in some]).statistic)

    found = {
        "predicted": ordered(rows, "predicted"),
        "parameters": ordered(rows, "attn_params", -1),
        "predicted, layer plans": ordered(by_layer, "predicted"),
        "parameters, layer plans": ordered(by_layer, "attn_params", -1),
    }
    return {"rank_correlation": found, "plans": rows}


def subject(
    name: str, text: Text, settings: ProfileSettings, measured_tokens: int, folder: Path
) -> tuple[Any, Profile, Measure]:
    """A real model, its profile on most of a text, and a measure on the rest of it."""
    source = open_source(name)
    dense, tokenizer = load_for_profiling(source), source.tokenizer
    parts = held_out_split(text.documents, 0.1)
    rows = sequences(dense, tokenizer, Text(text.source, parts.train), settings)
    profile = profile_model(ProfileJob(dense, name, rows, settings), folder / "profile")
    other = Text(f"{text.source} (held out)", parts.held_out)
    if profile.plan.shape.causal:
        stream, _ = scored_stream(tokenizer, other, measured_tokens)

        def rise(model: Any) -> float:
            found = text_comparison(model, dense, stream, window=settings.length)
            return found.nll - found.reference_nll

        return dense, profile, rise
    lines = [line.strip() for d in other.documents for line in d.splitlines()]
    sentences = [line for line in lines if len(line.split()) > 4][: measured_tokens // 16]

    def turned(model: Any) -> float:
        cosines = embedding_cosines(model, dense, tokenizer, sentences)
        return 1 - math.fsum(cosines) / len(cosines)

    return dense, profile, turned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="builtin:smollm2")
    parser.add_argument("--text", default="builtin:python")
    parser.add_argument("--tokens", type=int, default=8192, help="to profile on")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--measured", type=int, default=2048, help="tokens to measure on")
    given = parser.parse_args()
    settings = ProfileSettings(length=given.length, tokens=given.tokens)
    with tempfile.TemporaryDirectory() as folder:
        text = read_source(given.text)
        parts = subject(given.model, text, settings, given.measured, Path(folder))
        found = correlation(*parts)
    json.dump({**vars(given), **found}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
