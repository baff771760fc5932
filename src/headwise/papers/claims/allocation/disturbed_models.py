"""The models whose robustness is compared, each under disturbed input.

Models: trained from plans, cut after training, pretrained. Those trained here read documentation
(the beginning of the built-in text); shifted text is source code of the standard library, which
none of them has seen. Measured are the loss on clean text and what every disturbance adds to it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headwise.data.text import read_source
from headwise.data.tokens import token_stream
from headwise.measure.robustness import Attack, greedily_swapped, noisy, sequence_losses
from headwise.models.build import replaced_projections
from headwise.papers.harness.claim import Trial, Values
from headwise.papers.tasks.cuts import cut_to_plan, profile_windows
from headwise.papers.tasks.pretrained import (
    CHARACTERS,
    TEXT,
    batches,
    documents,
    pretrained_model,
    random_passages,
)
from headwise.papers.tasks.training import (
    corpus,
    corpus_tokenizer,
    llama_shape,
    random_windows,
    text_model,
    train_llama,
)
from headwise.plan import Budget, Limit, Plan
from headwise.planning.cost import cost
from headwise.planning.design import DesignRules, new_plan
from headwise.planning.fit import fit
from headwise.planning.rules import WidthRules
from headwise.profiling.worth import fit_problem

POLICIES = {"uniform": "uniform", "planned": "narrower-late"}
NOISE = (0.05, 0.2)
PROSE = 450_000  # characters at the beginning of the built-in text that are documentation
LONG_LINE = 40  # characters: two texts with such a line in common have more in common


@dataclass(frozen=True, slots=True)
class DisturbanceInputs:
    """Windows of clean and of shifted text (one token longer than what is read), and the attack."""

    clean: np.ndarray
    shifted: np.ndarray
    vocab_size: int
    attacked: int  # of the clean windows
    attack: Attack
    seed: int


# --- models ------------------------------------------------------------------------------------


def measure_models(trial: Trial) -> dict[str, Values]:
    """The models of a trial, each disturbed."""
    kind = trial.parameters["kind"]
    return _measure_pretrained(trial) if kind == "pretrained" else _measure_trained(trial)


def _measure_trained(trial: Trial) -> dict[str, Values]:
    """The model of one plan, or the dense one and its cut."""
    p = trial.parameters
    shape = llama_shape(p, p["heads"])
    plan = Plan.uniform(shape)
    if p["kind"] in POLICIES:
        budget = Budget(attn_params=Limit(share=p["share"]))
        plan = new_plan(shape, budget, POLICIES[p["kind"]], DesignRules(multiple_of=2))
    model: Any = text_model(plan, trial.seed)
    train_llama(model, p, p["lr"], trial.seed).finished()
    text, length = corpus(p["characters"], p["vocab"]), p["context"] + 1
    other = source_stream(p["characters"], p["vocab"], 40 * p["scored"] * length)
    inputs = DisturbanceInputs(
        random_windows(text.held_out, length, p["scored"], trial.seed),
        random_windows(other, length, p["scored"], trial.seed),
        p["vocab"],
        p["attacked"],
        Attack(p["swaps"], p["proposals"]),
        trial.seed,
    )
    if p["kind"] in POLICIES:
        return {p["kind"]: {**disturb(model, inputs), "params": cost(plan).attn_params}}
    calibration = random_windows(text.train, p["context"], p["windows"], trial.seed)
    policies = {"dense": None, "cut": "sensitivity"}
    return _measure_cuts(model, calibration, inputs, policies, p["share"])


def _measure_pretrained(trial: Trial) -> dict[str, Values]:
    """The pretrained model and two cuts of it, calibrated on prose."""
    p, it = trial.parameters, pretrained_model()
    length = p["length"]
    text, prose, code = documents(p["text"]), set(prose_documents()), set(source_documents())
    clean = tuple(d for d in text.scored if d in prose)
    read = apart(tuple(d for d in text.calibration if d in prose), clean)
    shifted = tuple(d for d in text.scored if d in code)
    inputs = DisturbanceInputs(
        random_passages(it.tokenizer, clean, (p["scored"], length + 1), trial.seed),
        random_passages(it.tokenizer, shifted, (p["scored"], length + 1), trial.seed),
        len(it.tokenizer),
        p["attacked"],
        Attack(p["swaps"], p["proposals"]),
        trial.seed,
    )
    calibration = random_passages(it.tokenizer, read, (p["windows"], length), trial.seed)
    policies = {
        "pretrained": None,
        "pretrained, uniform cut": "uniform",
        "pretrained, planned cut": "sensitivity",
    }
    return _measure_cuts(it.model, calibration, inputs, policies, p["share"])


def _measure_cuts(
    model: Any,
    calibration: np.ndarray,
    inputs: DisturbanceInputs,
    policies: dict[str, str | None],
    share: float,
) -> dict[str, Values]:
    """A dense model (policy None) and its cuts, none of them trained afterwards."""
    profile, found = profile_windows(model, calibration), {}
    for name, policy in policies.items():
        plan = profile.plan
        if policy is not None:
            problem = fit_problem(profile, policy, WidthRules("head", multiple_of=2))
            problem = replace(problem, fixed_groups=True)
            plan = fit(problem, Budget(attn_params=Limit(share=share))).plan
        with replaced_projections(model, cut_to_plan(model, profile, plan)):
            found[name] = {**disturb(model, inputs), "params": cost(plan).attn_params}
    return found


# --- disturbances ------------------------------------------------------------------------------


def disturb(model: Any, given: DisturbanceInputs) -> Values:
    """The loss on clean text; by disturbance the loss, and its rise over the same clean windows."""
    inputs, labels = (torch.from_numpy(x) for x in (given.clean[:, :-1], given.clean[:, 1:]))
    clean = _losses(model, inputs.numpy(), labels.numpy())
    other = _losses(model, given.shifted[:, :-1], given.shifted[:, 1:])
    found = {"shifted text": (other.mean(), other.mean() - clean.mean())}
    for share in NOISE:
        changed = noisy(inputs, share, given.vocab_size, given.seed)
        losses = _losses(model, changed.numpy(), labels.numpy())
        found[f"noise {100 * share:g}%"] = (losses.mean(), (losses - clean).mean())
    few, targets = inputs[: given.attacked], labels[: given.attacked]
    swapped = greedily_swapped(model, few, targets, given.attack)
    losses = _losses(model, swapped.numpy(), targets.numpy())
    rise = (losses - clean[: given.attacked]).mean()
    found[f"{given.attack.swaps} greedy swaps"] = (losses.mean(), rise)
    both = {name: {"loss": float(loss), "rise": float(r)} for name, (loss, r) in found.items()}
    return {"clean": float(clean.mean()), "disturbed": both}


def _losses(model: Any, inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    pairs = zip(batches(inputs), batches(labels), strict=True)
    return torch.cat([sequence_losses(model, x, y) for x, y in pairs]).double().numpy()


# --- texts -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def source_stream(characters: int, vocab_size: int, most: int) -> np.ndarray:
    """Source code in the tokens of a model that was trained on the first `characters` of the text.

    The built-in text begins with documentation; its second half is source code.
    """
    return token_stream(corpus_tokenizer(characters, vocab_size), source_documents(), most=most)


@functools.lru_cache(maxsize=1)
def prose_documents() -> tuple[str, ...]:
    """Documents of documentation, whole ones only."""
    return read_source(TEXT, PROSE).documents[:-1]


@functools.lru_cache(maxsize=1)
def source_documents() -> tuple[str, ...]:
    """Documents of source code."""
    found = read_source(TEXT, CHARACTERS).documents
    return found[len(found) // 2 :]


def apart(documents: tuple[str, ...], scored: tuple[str, ...]) -> tuple[str, ...]:
    """The documents that share no long line with those to score on.

    Topics of the documentation contain others word for word.
    """
    lines = {line for d in scored for line in _long_lines(d)}
    return tuple(d for d in documents if lines.isdisjoint(_long_lines(d)))


def _long_lines(document: str) -> set[str]:
    lines = (line.strip() for line in document.splitlines())
    return {line for line in lines if len(line) >= LONG_LINE}
