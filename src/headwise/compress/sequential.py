"""The layers cut one after another, each fitted to what the cut layers before it really send.

    dense stream   h ─► layer 0 ─► layer 1 ─► …        gives the targets
    cut stream     h ─► cut 0   ─► cut 1   ─► …        gives the inputs

The regression of W_O aims at the dense attention's output, the fit at the dense layer's.

Only one layer is in memory at a time. A finished layer is saved at once; after a kill it is read
back and only run, so the result is that of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.compress.attended import before_output, outputs
from headwise.compress.cut import cut_weights
from headwise.compress.local_fit import fit_rules, fitted, kept_aside
from headwise.compress.refit import OutputRegression, chosen_ridge
from headwise.compress.settings import CutSettings
from headwise.nn.backbones_headwise import Weights
from headwise.nn.layer_store import LayerStore
from headwise.nn.layer_stream import LayerStream
from headwise.plan import Plan
from headwise.profile.format import Profile

Tick = Callable[[int, int], None]
NO_ERROR = 1e-9  # squared, as a share: float32 runs of equal layers differ by less
FEW_TOKENS_RIDGE = 1.0  # where no batch can be kept aside to choose it


@dataclass(frozen=True, slots=True)
class CutJob:
    """Everything a cut needs: the model's layers on text, the directions, the plan, the rules."""

    stream: LayerStream
    profile: Profile
    plan: Plan
    settings: CutSettings
    store: LayerStore


@dataclass(frozen=True, slots=True)
class _Batches:
    """Of every batch: what enters the cut layer, and what left the dense attention and layer."""

    inputs: list[Tensor]
    attended: list[Tensor]
    outputs: list[Tensor]


@torch.no_grad()
def cut_layers(job: CutJob, tick: Tick | None = None) -> None:
    """Put the cut projections of every layer into the job's store."""
    stream = job.stream
    dense, cut = list(stream.first), list(stream.first)
    for i in stream:
        weights = stream.weights(stream.load(i))
        whole = stream.planned(i, job.profile.plan.layers[i], weights)
        attended, dense = outputs(stream, whole, i, dense)
        del whole
        if not job.store.has(i):
            made, record = _made(job, i, weights, _Batches(cut, attended, dense))
            job.store.put(i, _packed(made, _stored_dtype(stream, i)), record)
        del attended
        if i < len(stream) - 1:
            # Read back, in the checkpoint's number format: what later layers will really get, and
            # what a resumed run sees too.
            narrow = stream.planned(i, job.plan.layers[i], _unpacked(job.store.get(i)))
            cut = [stream.run(narrow, i, h, b) for b, h in enumerate(cut)]
        if tick is not None:
            tick(i + 1, len(stream))


def _made(
    job: CutJob, i: int, weights: Weights, batches: _Batches
) -> tuple[Weights, dict[str, Any]]:
    """The cut projections of layer `i`, and how well they reproduce the dense layer."""
    made = cut_weights(job.profile, job.plan, i, weights)
    sums = _sums(job, i, made, batches)
    folded = (sums[0] + sums[1]).error(*_output(made))
    record: dict[str, Any] = {"error": {"folded": folded}}
    # Nothing was lost so far: a refit could only add rounding.
    if folded <= NO_ERROR:
        return made, record
    if job.settings.refit:
        made = _refitted(job, made, sums, record)
    rules = fit_rules(job.settings, len(batches.inputs))
    if rules is not None:
        layer = job.stream.planned(i, job.plan.layers[i], made)
        pairs = list(zip(batches.inputs, batches.outputs, strict=True))
        better, record["fit"] = fitted(job.stream, layer, i, pairs, rules)
        made = better or made
    return made, record


def _sums(
    job: CutJob, i: int, made: Weights, batches: _Batches
) -> tuple[OutputRegression, OutputRegression]:
    """The regression's sums over the batches that are used, and over those kept aside."""
    layer = job.stream.planned(i, job.plan.layers[i], made)
    with_bias = "output" in made[1]
    sums = OutputRegression(with_bias), OutputRegression(with_bias)
    aside = kept_aside(len(batches.inputs))
    for b, (hidden, y) in enumerate(zip(batches.inputs, batches.attended, strict=True)):
        sums[b in aside].add(before_output(job.stream, layer, i, hidden, b), y)
    return sums


def _refitted(
    job: CutJob,
    made: Weights,
    sums: tuple[OutputRegression, OutputRegression],
    record: dict[str, Any],
) -> Weights:
    """The weights with the output projection refitted on all batches."""
    used, aside = sums
    ridge = job.settings.ridge
    if ridge is None:
        ridge = chosen_ridge(used, aside, _output(made)) if aside.power else FEW_TOKENS_RIDGE
    W_O, b_O = (used + aside).solution(*_output(made), ridge)
    record["ridge"] = ridge
    record["error"]["refitted"] = (used + aside).error(W_O, b_O)
    return {**made[0], "output": W_O}, made[1] if b_O is None else {**made[1], "output": b_O}


def _output(weights: Weights) -> tuple[Tensor, Tensor | None]:
    return weights[0]["output"], weights[1].get("output")


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
