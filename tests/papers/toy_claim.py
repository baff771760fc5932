"""A claim whose trials leave a trace, wait, die or fail as their parameters say.

Loaded by name from a folder on the path, because the runner's processes must find it too.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from headwise.papers.harness.claim import Claim, Finding, Trial, Unavailable


def trials(size, seeds):
    return [Trial("toy", name, seed, {"x": seed}) for seed in seeds for name in ("a", "b")]


def run(trial):
    """Note the start, wait for a file, then do what the name says."""
    p = trial.parameters
    if "log" in p:
        with Path(p["log"]).open("a") as log:
            log.write(f"{trial.name} {trial.seed} {os.getpid()}\n")
    while "wait" in p and not Path(p["wait"]).exists():
        time.sleep(0.02)
    if trial.name == "fails":
        raise ValueError("no such luck")
    if trial.name == "absent":
        raise Unavailable("It needs a telescope.")
    if trial.name == "nan":
        return {"y": float("nan")}
    if trial.name == "dies" and (p["always"] or not Path(p["died"]).exists()):
        Path(p["died"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"y": 10 * trial.seed + len(trial.name)}


def judge(results):
    numbers = ", ".join(str(r.values["y"]) for r in results)
    return Finding("holds", f"Numbers {numbers} at seeds {results.seeds}.")


def figure(results):
    from headwise.papers.harness.charts import Axes, Point, curves
    from headwise.papers.harness.judging import summary

    points = [Point(r.trial.seed, summary([r.values["y"]]), r.trial.name) for r in results]
    return curves(points, Axes("Toy", "seed", "y"))


CLAIM = Claim(
    "toy", "A toy <claim>.", "y | 10.", "nowhere", "On fingers.", 1, trials, run, judge, figure
)
