"""The models whose robustness is compared: trained from plans, cut after training, pretrained."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwise.measure.robustness import Attack
from headwise.plan import Budget, Limit, Plan
from headwise.planning.cost import cost
from headwise.planning.fit import fit
from headwise.planning.policies import Rules, new_plan
from headwise.planning.worth_curves import FitRules
from headwise.profile.worth import fit_task
from headwise.reproduce.claim import Trial, Values
from headwise.reproduce.disturbances import (
    Stage,
    apart,
    disturbed,
    prose_documents,
    random_windows,
    source_documents,
    source_stream,
)
from headwise.reproduce.layer_cuts import cut_to_plan, profiled
from headwise.reproduce.narrow_heads import replaced
from headwise.reproduce.pretrained import documents, passages, subject
from headwise.reproduce.scratch_training import (
    Course,
    Source,
    corpus,
    learned_text,
    text_model,
    text_shape,
)

POLICIES = {"uniform": "uniform", "planned": "theory"}


def trained_models(trial: Trial) -> dict[str, Values]:
    """The model of one plan, or the dense one and its cut, each disturbed."""
    p = trial.parameters
    shape = text_shape(p, p["heads"])
    plan = Plan.uniform(shape)
    if p["kind"] in POLICIES:
        budget = Budget(attn_params=Limit(share=p["share"]))
        plan = new_plan(shape, budget, POLICIES[p["kind"]], Rules(multiple_of=2))
    model: Any = text_model(plan, trial.seed)
    source = Source(p["characters"], p["vocab"], p["context"])
    course = Course(p["steps"], p["batch"], p["lr"], evaluations=1)
    learned_text(model, source, course, trial.seed).finished()
    model.eval().requires_grad_(False)
    stage = _stage(trial)
    if p["kind"] in POLICIES:
        return {p["kind"]: {**disturbed(model, stage), "params": cost(plan).attn_params}}
    train = corpus(p["characters"], p["vocab"]).train
    calibrated = random_windows(train, p["context"], p["windows"], trial.seed)
    policies = {"dense": None, "cut": "sensitivity"}
    return _with_cuts(model, calibrated, stage, policies, p["share"])


def pretrained_models(trial: Trial) -> dict[str, Values]:
    """The pretrained model and two cuts of it, calibrated on prose."""
    p, it = trial.parameters, subject()
    length = p["length"]
    text, prose, code = documents(p["text"]), set(prose_documents()), set(source_documents())
    clean = tuple(d for d in text.scored if d in prose)
    read = apart(tuple(d for d in text.calibrated if d in prose), clean)
    shifted = tuple(d for d in text.scored if d in code)
    stage = Stage(
        passages(it.words, clean, (p["scored"], length + 1), trial.seed),
        passages(it.words, shifted, (p["scored"], length + 1), trial.seed),
        len(it.words),
        p["attacked"],
        Attack(p["swaps"], p["proposals"]),
        trial.seed,
    )
    calibrated = passages(it.words, read, (p["windows"], length), trial.seed)
    names = {
        "pretrained": None,
        "pretrained, uniform cut": "uniform",
        "pretrained, planned cut": "sensitivity",
    }
    return _with_cuts(it.model, calibrated, stage, names, p["share"])


def _with_cuts(
    model: Any, calibrated: np.ndarray, stage: Stage, policies: dict[str, str | None], share: float
) -> dict[str, Values]:
    """A dense model (policy None) and its cuts, none of them trained after."""
    profile, found = profiled(model, calibrated), {}
    for name, policy in policies.items():
        plan = profile.plan
        if policy is not None:
            task = fit_task(profile, policy, FitRules(multiple_of=2))
            plan = fit(task, Budget(attn_params=Limit(share=share))).plan
        with replaced(model, cut_to_plan(model, profile, plan)):
            found[name] = {**disturbed(model, stage), "params": cost(plan).attn_params}
    return found


def _stage(trial: Trial) -> Stage:
    p = trial.parameters
    length = p["context"] + 1
    held_out = corpus(p["characters"], p["vocab"]).held_out
    other = source_stream(p["characters"], p["vocab"], 40 * p["scored"] * length)
    return Stage(
        random_windows(held_out, length, p["scored"], trial.seed),
        random_windows(other, length, p["scored"], trial.seed),
        p["vocab"],
        p["attacked"],
        Attack(p["swaps"], p["proposals"]),
        trial.seed,
    )
