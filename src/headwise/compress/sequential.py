"""The layers cut one after another, each fitted to what the cut layers before it really send.

    dense stream   h ─► layer 0 ─► layer 1 ─► …        gives the targets
    cut stream     h ─► cut 0   ─► cut 1   ─► …        gives the inputs

A layer is made in three steps: W_O by regression, all four projections by the local fit, W_O once
more. What counts is how near its output comes to the dense layer's, on batches kept aside.

Only one layer is in memory at a time. A finished layer is saved at once; after a kill it is read
back and only run, so the result is that of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.compress.attended import outputs
from headwise.compress.cut import cut_weights
from headwise.compress.layer_refit import output, refitted, regressions
from headwise.compress.layer_task import Batches, LayerTask
from headwise.compress.local_fit import fit_rules, fitted
from headwise.compress.settings import CutSettings
from headwise.nn.backbones_headwise import Weights
from headwise.nn.layer_store import LayerStore
from headwise.nn.layer_stream import LayerStream
from headwise.plan import Plan
from headwise.profile.format import Profile

Tick = Callable[[int, int], None]
NO_ERROR = 1e-9  # squared, as a share: float32 runs of equal layers differ by less


@dataclass(frozen=True, slots=True)
class CutJob:
    """Everything a cut needs: the model's layers on text, the directions, the plan, the rules."""

    stream: LayerStream
    aside: tuple[int, ...]  # the batches on which every choice is judged
    profile: Profile
    plan: Plan
    settings: CutSettings
    store: LayerStore


@torch.no_grad()
def cut_layers(job: CutJob, tick: Tick | None = None) -> None:
    """Put the cut projections of every layer into the job's store."""
    stream = job.stream
    dense, cut = list(stream.first), list(stream.first)
    for i in stream:
        weights = stream.weights(stream.load(i))
        whole = stream.planned(i, job.profile.plan.layers[i], weights)
        attended, after = outputs(stream, whole, i, dense)
        del whole
        if not job.store.has(i):
            batches = Batches(cut, dense, attended, after, job.aside)
            task = LayerTask(stream, i, job.plan.layers[i], batches)
            made, record = _made(job, task, weights)
            job.store.put(i, _packed(made, _stored_dtype(stream, i)), record)
            del batches, task
        del attended
        dense = after
        if i < len(stream) - 1:
            # Read back, in the checkpoint's number format: what later layers will really get, and
            # what a resumed run sees too.
            narrow = stream.planned(i, job.plan.layers[i], _unpacked(job.store.get(i)))
            cut = [stream.run(narrow, i, h, b) for b, h in enumerate(cut)]
        if tick is not None:
            tick(i + 1, len(stream))


def _made(job: CutJob, task: LayerTask, weights: Weights) -> tuple[Weights, dict[str, Any]]:
    """The cut projections of a layer, and how well they reproduce the dense one."""
    made = cut_weights(job.profile, job.plan, task.place, weights)
    sums = regressions(task, made)
    folded = sums["attention"].all.error(*output(made))
    record: dict[str, Any] = {"error": {"folded": folded}}
    # Nothing was lost so far: a refit could only add rounding.
    if folded <= NO_ERROR:
        return made, record
    settings = job.settings
    if settings.refit:
        first = refitted(task, made, sums, settings.ridge)
        made, record["refit"] = first.weights, first.record
        record["error"]["refitted"] = sums["attention"].all.error(*output(made))
    rules = fit_rules(settings, len(task.batches.inputs), task.aside)
    if rules is not None:
        better, record["fit"] = fitted(task, made, rules)
        if better is not None:
            made = better
            if settings.refit:
                again = refitted(task, made, regressions(task, made), settings.ridge)
                if again.error is not None and again.error < record["fit"]["unseen_error"]["after"]:
                    made, record["second_refit"] = again.weights, again.record
    return made, record


def _stored_dtype(stream: LayerStream, i: int) -> torch.dtype:
    """The number format of layer `i`'s attention in the source."""
    start = f"{stream.prefix}.{i}.{stream.family.attention}."
    name = next(theirs for ours, theirs in stream.names.items() if ours.startswith(start))
    return stream.checkpoint.stored[name].dtype


def _packed(weights: Weights, dtype: torch.dtype) -> dict[str, Tensor]:
    matrices, biases = weights
    named = {f"{s}.weight": w for s, w in matrices.items()}
    named |= {f"{s}.bias": b for s, b in biases.items()}
    return {name: tensor.to(dtype) for name, tensor in named.items()}


def _unpacked(tensors: dict[str, Tensor]) -> Weights:
    found: Weights = ({}, {})
    for name, tensor in tensors.items():
        side, kind = name.split(".")
        found[kind == "bias"][side] = tensor
    return found
