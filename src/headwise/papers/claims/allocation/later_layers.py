"""Claim: cutting later layers costs less than cutting early ones, and width less than heads.

Two models: the pretrained one, and a six-layer decoder trained here on about a million tokens, as
in the paper's layer experiments. One third of the depth is cut at a time, by equal parameters, and
the rise of the loss on other text is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.papers.claims.allocation.saturation import THIRDS, third_of
from headwise.papers.harness.charts import Axes, Point, curves, panels
from headwise.papers.harness.claim import (
    Claim,
    Finding,
    Results,
    ResultTable,
    Size,
    Trial,
    Values,
    at_every_seed,
)
from headwise.papers.harness.judging import Answer, counted, larger, summary, verdict, why_open
from headwise.papers.tasks.pretrained import NAME, TEXT

if TYPE_CHECKING:
    from headwise.reporting.charts import Chart

PRETRAINED: dict[Size, dict[str, Any]] = {
    "quick": {"length": 96, "windows": 5, "scored": 3, "groups_kept": [2]},
    "full": {"length": 512, "windows": 48, "scored": 24, "groups_kept": [2, 1]},
}
TRAINED: dict[str, Any] = {
    "d_model": 128, "heads": 8, "layers": 6, "context": 256, "vocab": 1024,
    "characters": 4_000_000, "steps": 500, "batch": 8, "windows": 64, "scored": 64,
    "groups_kept": [6, 4, 2],
}  # fmt: skip
LR = 3e-3
COST = {NAME: {"quick": 12.0, "full": 930.0}, "trained here": {"full": 250.0}}


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """The pretrained model on the seed's text; at full size also one trained from the seed."""
    experiments = {"pretrained": {"model": NAME, "text": TEXT, **PRETRAINED[size]}}
    if size == "full":
        experiments["six layers"] = {"model": "trained here", **TRAINED}
    return at_every_seed("later-layers", seeds, experiments, lambda p: COST[p["model"]][size])


def run(trial: Trial) -> Values:
    """The rise of the loss for every third, way and share."""
    from headwise.models.build import replaced_projections
    from headwise.papers.tasks.cuts import WAYS, cut_third, profile_windows
    from headwise.papers.tasks.pretrained import pretrained_model, trial_windows, window_loss

    p = trial.parameters
    if p["model"] == NAME:
        model = pretrained_model().model
        calibration, scored = trial_windows(p, trial.seed)
    else:
        model, calibration, scored = _train(trial)
    profile = profile_windows(model, calibration)
    dense = window_loss(model, scored)
    n_layers, rows = len(profile.plan.layers), []
    for third in range(3):
        layers = range(*third_of(third, n_layers).indices(n_layers))
        for kept in p["groups_kept"]:
            for way in WAYS:
                cut = cut_third(model, profile, layers, way, kept)
                with replaced_projections(model, cut.layers):
                    rise = window_loss(model, scored) - dense
                found = {"way": way, "removed": cut.removed, "rise": rise}
                rows.append({"third": THIRDS[third], "kept": kept, **found})
    groups = len(profile.plan.layers[0].heads)
    return {"loss": dense, "groups": groups, "cuts": rows}


def _train(trial: Trial) -> tuple[Any, np.ndarray, np.ndarray]:
    """The small model of a trial, windows to calibrate on and windows to score on."""
    from headwise.papers.tasks.training import (
        corpus,
        llama_shape,
        random_windows,
        text_model,
        train_llama,
    )
    from headwise.plan import Plan

    p = trial.parameters
    model = text_model(Plan.uniform(llama_shape(p, p["heads"])), trial.seed)
    train_llama(model, p, LR, trial.seed).finished()
    text = corpus(p["characters"], p["vocab"])
    return (
        model,
        random_windows(text.train, p["context"], p["windows"], trial.seed),
        random_windows(text.held_out, p["context"], p["scored"], trial.seed),
    )


def judge(results: Results) -> Finding:
    """Each model and share asks: is late cheaper than early, is width cheaper than heads?

    Cheaper by less than a tenth is not cheaper, and a difference within the spread leaves the
    question open. The verdict is that of `judging` over all answers; the reasons count them.
    """
    answers: dict[str, list[Answer]] = {"depth": [], "width": []}
    sentences = []
    for name in results.names:
        groups = results.named(name)[0].values["groups"]
        for kept in results.parameters_of(name)["groups_kept"]:
            early, late = (_rises(results, name, t, "width", kept) for t in ("early", "late"))
            ways = [
                np.mean([_rises(results, name, t, way, kept) for t in THIRDS], axis=0).tolist()
                for way in ("width", "heads")
            ]
            later = larger(early, late)
            wider = larger(ways[1], ways[0])
            answers["depth"].append(later)
            answers["width"].append(wider)
            sentences.append(
                f"Rise of the loss, {name}, {groups - kept} of {groups} cut: early "
                f"{summary(early)}, late "
                f"{summary(late)}{_sure(later, len(early))}; by width "
                f"{summary(ways[0])}, by heads {summary(ways[1])}"
                f"{_sure(wider, len(early))}."
            )
    counts = {k: counted(v) for k, v in answers.items()}
    asked = [a for each in answers.values() for a in each]
    why = f": {why_open(len(results.seeds))}" if "open" in asked else ""
    return Finding(
        verdict(asked),
        f"Of {len(sentences)} cuts, late layers are cheaper than early ones by more than the "
        f"spread in {answers['depth'].count('yes')} (open: {answers['depth'].count('open')}), "
        f"width is cheaper than heads in {answers['width'].count('yes')} (open: "
        f"{answers['width'].count('open')}).",
        (
            f"Is late cheaper than early: {counts['depth']}. Is width cheaper than heads: "
            f"{counts['width']}. {asked.count('open')} of {len(asked)} questions are open{why}.",
            "No cut is refitted or trained afterwards. Early and late are compared by width cuts, "
            f"width and heads by the mean over the thirds. {_by_third(results)}",
            *sentences,
        ),
        _table(results),
    )


def _by_third(results: Results) -> str:
    """How often width is the cheaper way in each third on its own, ignoring the spread."""
    told = []
    for third in THIRDS:
        pairs = [
            [summary(_rises(results, name, third, way, kept)).mean for way in ("width", "heads")]
            for name in results.names
            for kept in results.parameters_of(name)["groups_kept"]
        ]
        told.append(f"{sum(width < heads for width, heads in pairs)} of {len(pairs)} {third}")
    return f"Third by third, width has the lower mean in {', '.join(told)} cuts."


def _table(results: Results) -> ResultTable:
    rows = []
    for name in results.names:
        first = results.named(name)[0]
        for row in first.values["cuts"]:
            rises = _rises(results, name, row["third"], row["way"], row["kept"])
            share = f"{first.values['groups'] - row['kept']}/{first.values['groups']}"
            rows.append(
                (name, row["third"], share, row["way"], row["removed"], str(summary(rises)))
            )
    columns = ("model", "layers", "share cut", "way", "parameters cut", "rise of the loss")
    return ResultTable(columns, tuple(rows))


def figure(results: Results) -> Chart:
    """The rise of the loss by third of the depth."""
    parts = []
    for name in results.names:
        first = results.named(name)[0]
        groups = first.values["groups"]
        points = [
            Point(
                i + 1, summary(_rises(results, name, t, way, kept)), f"{way}, {kept}/{groups} left"
            )
            for kept in first.trial.parameters["groups_kept"]
            for way in ("width", "heads")
            for i, t in enumerate(THIRDS)
        ]
        axes = Axes(
            f"One third of the layers cut: {name}", "third of the depth", "rise of the loss",
            log_y=True, x_values=(1, 2, 3),
        )  # fmt: skip
        parts.append(curves(points, axes))
    return panels(parts)


def _rises(results: Results, name: str, third: str, way: str, kept: int) -> list[float]:
    return [
        float(row["rise"])
        for r in results.named(name)
        for row in r.values["cuts"]
        if (row["third"], row["way"], row["kept"]) == (third, way, kept)
    ]


def _sure(answer: Answer, n_seeds: int) -> str:
    if answer != "open":
        return ""
    return " (within the spread)" if n_seeds > 1 else " (one seed)"


CLAIM = Claim(
    id="later-layers",
    statement="At equal parameters, cutting later layers costs less than cutting early ones, and "
    "cutting width costs less than cutting heads.",
    expected="Later layers may shrink their head dimension (six-layer decoders, about 1M tokens).",
    source="arXiv 2510.03784, layer experiments",
    setting="SmolLM2-135M-Instruct and a small Llama model trained here, both on Python’s "
    "documentation and source; a seed draws the windows, and the small model’s weights "
    "and batches.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
