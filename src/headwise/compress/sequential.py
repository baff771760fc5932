"""The layers cut one after another, each refitted on what the cut layers before it really send.

    dense stream   h ─► layer 0 ─► layer 1 ─► …        gives the targets (attention outputs)
    cut stream     h ─► cut 0   ─► cut 1   ─► …        gives the inputs

Only one layer is in memory at a time. A finished layer is saved at once; after a kill it is read
back and only run, so the result is that of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.compress.cut import cut_weights
from headwise.compress.refit import OutputRegression
from headwise.compress.settings import CutSettings
from headwise.nn.attention_headwise import HeadwiseAttention
from headwise.nn.backbones_headwise import Weights
from headwise.nn.layer_store import LayerStore
from headwise.nn.layer_stream import LayerStream
from headwise.plan import Plan
from headwise.profile.format import Profile

Tick = Callable[[int, int], None]
NO_ERROR = 1e-9  # squared, as a share: float32 runs of equal layers differ by less


class _Reached(Exception):  # noqa: N818 (not an error: ends a layer's run at its output projection)
    pass


@dataclass(frozen=True, slots=True)
class CutJob:
    """Everything a cut needs: the model's layers on text, the directions, the plan, the rules."""

    stream: LayerStream
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
        targets, dense = _outputs(stream, whole, i, dense)
        del whole
        if not job.store.has(i):
            made, record = _made(job, i, weights, list(zip(cut, targets, strict=True)))
            job.store.put(i, _packed(made, _stored_dtype(stream, i)), record)
        del targets
        if i < len(stream) - 1:
            # Read back, in the checkpoint's number format: what later layers will really get, and
            # what a resumed run sees too.
            narrow = stream.planned(i, job.plan.layers[i], _unpacked(job.store.get(i)))
            cut = [stream.run(narrow, i, h, b) for b, h in enumerate(cut)]
        if tick is not None:
            tick(i + 1, len(stream))


def _made(
    job: CutJob, i: int, weights: Weights, pairs: list[tuple[Tensor, Tensor]]
) -> tuple[Weights, dict[str, Any]]:
    """The cut projections of layer `i`, and how well they reproduce the dense layer's output.

    `pairs` are the inputs of the cut layer and the outputs of the dense attention.
    """
    matrices, biases = cut_weights(job.profile, job.plan, i, weights)
    narrow = job.stream.planned(i, job.plan.layers[i], (matrices, biases))
    regression = OutputRegression(with_bias="output" in biases)
    for b, (hidden, target) in enumerate(pairs):
        regression.add(_before_output(job.stream, narrow, i, hidden, b), target)
    bias = biases.get("output")
    folded = regression.error(matrices["output"], bias)
    record: dict[str, Any] = {"error": {"folded": folded}}
    # Nothing was lost so far: a refit could only add rounding.
    if job.settings.refit and folded > NO_ERROR:
        W_O, b_O = regression.solution(matrices["output"], bias, job.settings.ridge)
        matrices = {**matrices, "output": W_O}
        biases = biases if b_O is None else {**biases, "output": b_O}
        record["error"]["refitted"] = regression.error(W_O, b_O)
    return (matrices, biases), record


def _outputs(
    stream: LayerStream, layer: nn.Module, i: int, inputs: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The attention outputs and the layer outputs, batch by batch."""
    attended: list[Tensor] = []
    with _hooked(_attention(layer).o_proj, lambda m, args, out: attended.append(out)):
        outputs = [stream.run(layer, i, h, b) for b, h in enumerate(inputs)]
    return attended, outputs


def _before_output(
    stream: LayerStream, layer: nn.Module, i: int, hidden: Tensor, batch: int
) -> Tensor:
    """What enters the output projection; the rest of the layer is not run."""
    found: list[Tensor] = []

    def stop(module: Any, args: Any, output: Any) -> None:
        found.append(args[0])
        raise _Reached

    with _hooked(_attention(layer).o_proj, stop), suppress(_Reached):
        stream.run(layer, i, hidden, batch)
    return found[0]


def _attention(layer: nn.Module) -> HeadwiseAttention:
    return next(m for m in layer.modules() if isinstance(m, HeadwiseAttention))


@contextmanager
def _hooked(module: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


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
