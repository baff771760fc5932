"""The ways to plans that engines run, against each other: predicted loss, as one JSON document.

    python benchmarks/bench_portable.py model.profile --kv-bytes 75%,50%

Every way of `--for` is fitted to the same profile and budgets, beside free layer plans. What the
cut and refitted models measure is told by `headwise compress … --plan` and `headwise verify`; this
writes the plans for them into the folder `--plans`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from headwise.errors import BudgetError, PlanError
from headwise.plan import Budget, Limit
from headwise.planning.fit import fit
from headwise.planning.portable import BY_LAYER, GROUPS, VALUES_ONLY, WIDTH, WIDTHS, tied
from headwise.planning.rules import WidthRules
from headwise.planning.targets import runs_in
from headwise.plans import read_profile, with_origin
from headwise.profiling.worth import fit_problem

WAYS = (VALUES_ONLY, WIDTHS, WIDTH, GROUPS, BY_LAYER)


def main() -> None:
    """Fit every way and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", type=Path)
    parser.add_argument("--kv-bytes", default="75%,50%")
    parser.add_argument("--multiple-of", type=int, default=8)
    parser.add_argument("--plans", type=Path, help="a folder for the plans")
    asked = parser.parse_args()
    profile = read_profile(asked.profile)
    free = fit_problem(profile, "sensitivity", WidthRules(multiple_of=asked.multiple_of))
    problems = {"free, by layer": free} | {way.name: tied(free, way) for way in WAYS}
    found: dict[str, Any] = {}
    for share in asked.kv_bytes.split(","):
        budget = Budget(kv_bytes=Limit.parse(share))
        for name, problem in problems.items():
            try:
                best = fit(problem, budget)
            except (BudgetError, PlanError) as error:
                found.setdefault(share, {})[name] = {"refused": str(error)}
                continue
            plan = with_origin(best.plan, profile, "")
            found.setdefault(share, {})[name] = {
                "predicted_loss": best.loss_increase,
                "kv_bytes": problem.cost(plan).kv_bytes / problem.dense.kv_bytes,
                "widths": sorted({(h.qk_dim, h.vo_dim) for x in plan.layers for h in x.heads}),
                "head_groups": [len(layer.heads) for layer in plan.layers],
                "runs_in": [one.target for one in runs_in(plan) if one.yes],
            }
            if asked.plans is not None:
                asked.plans.mkdir(parents=True, exist_ok=True)
                file = (
                    asked.plans / f"{name.replace(', ', '-').replace(' ', '-')}-{share.strip('%')}"
                )
                file.with_suffix(".json").write_text(plan.to_json())
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
