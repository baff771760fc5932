"""One head of a trained model, and narrow students that imitate it.

    hidden (the dense layers before) ─┬─► teacher: the head's own projections ─► its part of the
                                      └─► student: narrower ones                 layer's output

The rest of the model stays dense, so the error of the student is all the error there is. A student
starts from the whitened truncation of the teacher's values and its strongest rotary planes, or from
random numbers of the teacher's size, and is fitted to the teacher's output by the one loop.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwise.compress.recipes.parts import attention_weights
from headwise.nn.attention_headwise import HeadwiseAttention, Surroundings
from headwise.nn.backbones_headwise import Weights
from headwise.nn.build import load_projections
from headwise.nn.configuration_headwise import Head, Layer
from headwise.plan import HeadSpec
from headwise.reproduce.pretrained import batches

Turns = tuple[Tensor, Tensor]  # cosines and sines of the positions


class _Reached(Exception):  # noqa: N818 (not an error: ends a forward pass at the layer wanted)
    pass


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the layer's attention reads on some windows."""

    hidden: Tensor  # windows × length × d_model
    turns: Turns


@dataclass(frozen=True, slots=True)
class Start:
    """The shape and the weights a student begins with."""

    spec: HeadSpec
    weights: Weights


def lesson(model: Any, layer: int, ids: np.ndarray) -> Lesson:
    """The inputs of one layer's attention; layers after it are not run."""
    hidden: list[Tensor] = []
    turns: list[Turns] = []

    def stop(module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        hidden.append(_read(args, kwargs))
        cos, sin = kwargs["position_embeddings"]
        turns.append((cos[:1], sin[:1]))
        raise _Reached

    hook = model.attentions()[layer].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            for rows in batches(ids):
                with suppress(_Reached):
                    model(input_ids=rows, use_cache=False)
    finally:
        hook.remove()
    return Lesson(torch.cat(hidden), turns[0])


@contextmanager
def exchanged(attention: Any, old: nn.Module, new: nn.Module | None) -> Iterator[None]:
    """While open, a layer gives what `new` gives in place of `old`; None: nothing in its place."""

    def change(module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> Any:
        hidden = _read(args, kwargs)
        rest = output[0] - old(hidden)
        return (rest if new is None else rest + new(hidden), *output[1:])

    hook = attention.register_forward_hook(change, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _read(args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    found: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return found


class Imitation(nn.Module):
    """Heads on their own: from what their layer reads to their part of the layer's output."""

    def __init__(self, start: Start, like: HeadwiseAttention, turns: Turns) -> None:
        super().__init__()
        self.spec, self.turns = start.spec, turns
        spec = start.spec
        assert spec.score_scale is not None
        head = Head(
            spec.qk_dim, spec.vo_dim, spec.queries, spec.score_scale, spec.rotary_planes or ()
        )
        around = Surroundings(
            config=like.config,
            d_model=like.o_proj.out_features,
            layer_idx=0,
            is_causal=True,
            rotary_planes=turns[0].shape[-1] // 2,
        )
        self.attention = HeadwiseAttention(Layer((head,), frozenset(), frozenset()), around)
        load_projections(self.attention, start.weights)

    def forward(self, hidden: Tensor) -> Tensor:
        """Windows × length × d_model."""
        turns = tuple(t[:, : hidden.shape[1]] for t in self.turns)
        output: Tensor = self.attention(hidden, position_embeddings=turns)[0]
        return output

    def weights(self) -> Weights:
        """The four projections as they are now."""
        return attention_weights(self.attention)


def error(student: Imitation, teacher: Imitation, shown: Lesson) -> float:
    """Squared error of the student's output, as a share of the teacher's square."""
    missed = power = 0.0
    with torch.no_grad():
        for rows in shown.hidden.split(4):
            target = teacher(rows)
            missed += float((student(rows) - target).double().square().sum())
            power += float(target.double().square().sum())
    return missed / power if power else 0.0
