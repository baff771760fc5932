"""The ways to plans that engines run, against each other: predicted and measured, row by row.

    python benchmarks/portable_ways.py model.profile -o ways
    python benchmarks/portable_ways.py model.profile -o ways --held-out a.txt --held-out b.txt \\
        --text notes.txt --recover 8192

Every way of `--for` is fitted to the same profile and budgets, beside free layer plans. With
`--held-out` each model is cut (folded, nothing trained) and its perplexity ÷ the dense model's told
for each of these texts, with `--recover` also after so many tokens of recovery on `--text`. Rows
are appended to OUT/rows.jsonl as they are done; the same command does what is missing.

One way more is tried than `--for` has: neighbouring rotary planes are given one frequency, so that
heads with one list of frequencies may keep different planes of it.

    planes of the source   0 1 2 3 4 5 …      frequencies f0 f1 f2 …
    pairs merged           0 0 1 1 2 2 …      two heads may keep plane 0 and plane 1 as "the first"

Its cost alone is the row "pairs merged, nothing cut" (the dense model with those frequencies).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import headwise as hw
from headwise.cutting.settings import CutSettings
from headwise.errors import BudgetError, PlanError
from headwise.exporting.rotary import RotaryForm
from headwise.plan import Budget, Limit, Plan
from headwise.planning.fit import FitProblem, Worths, fit, ranking
from headwise.planning.portable import BY_LAYER, GROUPS, VALUES_ONLY, WIDTH, WIDTHS, Way, tied
from headwise.planning.rules import WidthRules
from headwise.planning.targets import runs_in
from headwise.plans import read_profile, with_origin
from headwise.profiling.format import Profile
from headwise.profiling.worth import fit_problem

FOLDED = CutSettings(refit=False, fit=0)
PAIR = 2  # neighbouring planes that get one frequency


def merged_planes(worths: Worths) -> Worths:
    """Heads keep as many planes of every pair, each head its own best ones."""
    heads = [head for layer in worths for head in layer]
    pairs = np.sort([h.planes.reshape(-1, PAIR) for h in heads], axis=2)[:, :, ::-1]
    slots = ranking(pairs.sum(axis=0).ravel())  # pair and place in it; the better place first

    def order(planes: np.ndarray) -> tuple[int, ...]:
        own = [PAIR * i + p for i, x in enumerate(planes.reshape(-1, PAIR)) for p in ranking(x)]
        return tuple(own[slot] for slot in slots)

    return tuple(
        tuple(replace(head, plane_order=order(head.planes)) for head in layer) for layer in worths
    )


def merged_frequencies(config: dict[str, Any]) -> dict[str, Any]:
    """A config whose neighbouring planes turn alike, at the mean of their speeds' logarithms."""
    base = config["rope_parameters"]["rope_theta"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    plane = np.arange(width // 2)
    mean = PAIR * (plane // PAIR) + (PAIR - 1) / 2
    factors = tuple(float(base ** (2 * (m - j) / width)) for j, m in zip(plane, mean, strict=True))
    form = RotaryForm(base, factors=factors)
    return {**config, "rope_parameters": form.parameters(config["max_position_embeddings"])}


MERGED = Way("one width each, pairs of planes merged", WIDTHS.rules, merged_planes)
MERGED_ONE = Way("one width, pairs of planes merged", WIDTH.rules, merged_planes)
WAYS = (BY_LAYER, GROUPS, VALUES_ONLY, WIDTHS, WIDTH, MERGED, MERGED_ONE)


@dataclass(frozen=True)
class Trial:
    """One row: a way, a budget, and the plan it gives."""

    way: str
    share: str
    plan: Plan | None
    found: dict[str, Any]

    @property
    def folder(self) -> str:
        """The name of its model's folder."""
        return f"{self.way.replace(',', '').replace(' ', '-')}-{self.share.strip('%')}"


def main() -> None:
    asked = arguments()
    profile = read_profile(asked.profile)
    asked.out.mkdir(parents=True, exist_ok=True)
    rows = asked.out / "rows.jsonl"
    done = [json.loads(x) for x in rows.read_text().splitlines()] if rows.exists() else []
    bench = Bench(asked, profile, rows, {x["row"]: x for x in done})
    for row in done:
        print(json.dumps(row), flush=True)
    for trial in trials(profile, asked):
        if asked.ways and trial.way not in asked.ways:
            continue
        bench.tell(f"{trial.folder} predicted", lambda t=trial: t.found)
        if trial.plan is not None and asked.held_out:
            bench.measure(trial)
    if asked.held_out and not asked.ways:
        bench.merged_alone()


def trials(profile: Profile, asked: argparse.Namespace) -> Iterator[Trial]:
    """Every way at every budget."""
    free = fit_problem(profile, "sensitivity", WidthRules(multiple_of=asked.multiple_of))
    problems = {"free, by layer": free} | {way.name: tied(free, way) for way in WAYS}
    for share in asked.kv_bytes.split(","):
        for name, problem in problems.items():
            yield _trial(name, share, problem, profile)


def _trial(name: str, share: str, problem: FitProblem, profile: Profile) -> Trial:
    try:
        best = fit(problem, Budget(kv_bytes=Limit.parse(share)))
    except (BudgetError, PlanError) as error:
        return Trial(name, share, None, {"refused": str(error)})
    plan = with_origin(best.plan, profile, "")
    found = {
        "predicted_loss": best.loss_increase,
        "kv_bytes": problem.cost(plan).kv_bytes / problem.dense.kv_bytes,
        "widths": sorted({(h.qk_dim, h.vo_dim) for x in plan.layers for h in x.heads}),
        "head_groups": sum(len(layer.heads) for layer in plan.layers),
        "runs_in": [one.target for one in runs_in(plan) if one.yes],
    }
    return Trial(name, share, plan, found)


@dataclass
class Bench:
    """Makes models and appends what they measure."""

    asked: argparse.Namespace
    profile: Profile
    rows: Path
    done: dict[str, dict[str, Any]]

    @property
    def model(self) -> str:
        """The dense model."""
        return self.profile.record.model

    def tell(self, row: str, measure: Any) -> None:
        """One row, unless it is there already."""
        if row in self.done:
            return
        self.done[row] = {"row": row, **measure()}
        with self.rows.open("a") as stream:
            stream.write(json.dumps(self.done[row]) + "\n")
        print(json.dumps(self.done[row]), flush=True)

    def measure(self, trial: Trial) -> None:
        """The cut alone, then after recovery."""
        out = self.asked.out / trial.folder
        self.tell("dense", lambda: {"nats": self.scores(self.model)})
        asked = {f"{trial.folder} {x}" for x in ("cut", *["recovered"] * bool(self.asked.recover))}
        if asked <= set(self.done):
            return
        if not out.exists():
            assert trial.plan is not None
            hw.cut(self.profile, trial.plan, model=self.model, settings=FOLDED, out=out)
            if "merged" in trial.way:
                file = out / "config.json"
                config = json.loads(file.read_text())
                config["backbone"] = merged_frequencies(config["backbone"])
                file.write_text(json.dumps(config))
        self.tell(f"{trial.folder} cut", lambda: self.ratios(out))
        if self.asked.recover:
            self.tell(f"{trial.folder} recovered", lambda: self.recovered(out))
        shutil.rmtree(out)

    def recovered(self, cut: Path) -> dict[str, Any]:
        """What the model measures after a short recovery."""
        made = cut.with_name(f"{cut.name}-recovered")
        how = {"text": self.asked.text, "tokens": self.asked.recover, "split": 0}
        hw.recover(cut, against=self.model, out=made, force=made.exists(), **how)
        found = {"tokens": self.asked.recover, **self.ratios(made)}
        shutil.rmtree(made)
        return found

    def merged_alone(self) -> None:
        """The dense model whose pairs of planes turn alike."""
        row, out = "pairs merged, nothing cut", self.asked.out / "merged"
        if row in self.done:
            return
        source = hw.open_source(self.model)
        source.load(device="cpu", dtype="fp32").save_pretrained(out)
        source.tokenizer.save_pretrained(out)
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(merged_frequencies(config)))
        self.tell(row, lambda: self.ratios(out))
        shutil.rmtree(out)

    def ratios(self, folder: Path) -> dict[str, Any]:
        """Perplexity ÷ dense on every text."""
        own, dense = self.scores(folder), self.done["dense"]["nats"]
        return {"ratios": {name: round(math.exp(own[name] - dense[name]), 4) for name in own}}

    def scores(self, model: Any) -> dict[str, float]:
        """Nats per token of every text."""
        found = hw.evaluate(model, text=self.asked.held_out, tokens=self.asked.tokens)
        return {Path(one.source).name: one.score.nll for one in found.texts}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", type=Path)
    parser.add_argument("--kv-bytes", default="75%,50%")
    parser.add_argument("--multiple-of", type=int, default=8)
    parser.add_argument("--ways", action="append", help="only this way; repeatable")
    parser.add_argument("--held-out", action="append", default=[])
    parser.add_argument("--tokens", type=int, default=1024, help="scored tokens of each text")
    parser.add_argument("--text", action="append", default=[], help="for recovery")
    parser.add_argument("--recover", type=int, default=0, help="tokens of recovery; 0: none")
    parser.add_argument("-o", "--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
