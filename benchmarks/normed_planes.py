"""A model with query and key norms, cut in its values only and in its planes too, as JSON.

Both cuts have the same share of the attention's parameters, one width per layer and the same
refit; the loss is measured on text that nothing was calibrated on. `zeroed` norms divide by the
mean over the kept planes with zeros for the rest, `fitted` ones are what a cut makes.

    python benchmarks/normed_planes.py run/model --text builtin:python --max-chars 8000000
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwise.cutting.run import CutRequest, cut_model
from headwise.cutting.settings import CutSettings
from headwise.data.text import Text, held_out_split, read_source
from headwise.measure.likelihood import likelihood, scored_stream
from headwise.models.norms_headwise import KeptNorm
from headwise.plan import Budget, Limit
from headwise.planning.fit import FitProblem, fit
from headwise.planning.rules import WidthRules
from headwise.profiling.run import ProfileJob, profile_model
from headwise.profiling.settings import ProfileSettings
from headwise.profiling.source import load_for_profiling, sequences
from headwise.profiling.worth import fit_problem
from headwise.source import open_source


def values_only(problem: FitProblem) -> FitProblem:
    """The same with queries and keys whole."""
    whole = tuple(
        tuple(replace(head, qk_whole=True) for head in layer) for layer in problem.sensitivity
    )
    return replace(problem, sensitivity=whole)


def zero_norms(model: Any) -> None:
    """Norms as if what was dropped were zero."""
    for module in model.modules():
        if isinstance(module, KeptNorm):
            module.share.copy_(module.zeroed_share)
            module.rest.fill_(module.eps)


def main() -> None:
    """Print the losses as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--text", default="builtin:python")
    parser.add_argument("--max-chars", type=int)
    parser.add_argument("--split", type=float, default=0.05)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=24_576)
    parser.add_argument("--measured", type=int, default=16_384)
    parser.add_argument("--shares", default="0.85,0.75")
    parser.add_argument("--fit", type=int, help="steps of the layer fit [one pass]")
    args = parser.parse_args()
    source = open_source(args.model)
    parts = held_out_split(read_source(args.text, args.max_chars).documents, args.split)
    calibration = Text(args.text, parts.train)
    stream, _ = scored_stream(source.tokenizer, Text("held out", parts.held_out), args.measured)

    def loss(model: Any) -> float:
        return likelihood(model, stream, window=args.length, stride=args.length).nll

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = ProfileSettings(length=args.length, tokens=args.tokens)
        model = load_for_profiling(source)
        text = sequences(model, source.tokenizer, calibration, settings)
        job = ProfileJob(model, source.name, text, settings, source.weights_sha256)
        profile = profile_model(job, Path(folder) / "profile")
        dense = loss(source.load())
        for share in map(float, args.shares.split(",")):
            both = fit_problem(profile, "sensitivity", WidthRules("layer", 4))
            for name, problem in (("values only", values_only(both)), ("planes too", both)):
                found = fit(problem, Budget(attn_params=Limit(share=share)))
                row = {"share": share, "cut": name, "predicted": found.loss_increase}
                for fitted, steps in (("refit", 0), ("layer fit", args.fit)):
                    out = Path(folder) / f"{share}-{name}-{fitted}"
                    request = CutRequest(source, profile, found.plan, CutSettings(fit=steps))
                    cut_model(request, out)
                    made = open_source(out).load()
                    row[fitted] = loss(made) - dense
                    if name == "planes too" and steps == 0:
                        zero_norms(made)
                        row["refit, zeroed norms"] = loss(made) - dense
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    print(json.dumps({"dense": dense, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
