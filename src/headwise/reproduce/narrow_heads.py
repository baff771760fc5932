"""Narrow heads inside a model of full width, so that one loaded model serves many cuts.

A head of which only some planes and value columns are left computes the same as the full head with
zeros everywhere else:

    W_Q  [ kept │ 0 │ kept │ 0 ]      columns of kept planes, in both halves
    W_V  [ kept │ 0            ]      the first columns

so narrow projections are put into the dense ones and taken out again afterwards. Heads are fully
rotary and without biases, as in the models these claims are measured on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from headwise.compress.recipes.parts import attention_weights
from headwise.nn.attention_headwise import PROJECTIONS
from headwise.nn.backbones_headwise import Weights
from headwise.nn.build import load_projections
from headwise.nn.slicing import Kept, qk_columns
from headwise.plan import HeadSpec, LayerPlan
from headwise.planning.fit import kept_planes


def widened(dense: LayerPlan, narrow: LayerPlan, weights: Weights) -> Weights:
    """The projections of `narrow` in the shape of `dense`."""
    matrices, biases = weights
    assert not biases, "narrow heads with biases"
    places: dict[str, list[int]] = {side: [] for side in PROJECTIONS}
    ends = dict.fromkeys(PROJECTIONS, 0)
    for whole, head in zip(dense.heads, narrow.heads, strict=True):
        planes = kept_planes(whole, head)
        assert head.qk_dim == 2 * len(planes), "narrow heads with columns without positions"
        vo = list(range(head.vo_dim))
        qk = qk_columns(whole, Kept(planes=planes, free=(), vo=vo))
        for side, (columns, width, times) in _sides(whole, qk, vo).items():
            for _ in range(times):
                places[side] += [ends[side] + c for c in columns]
                ends[side] += width
    made = {}
    for side, matrix in matrices.items():
        axis = _axis(side)
        shape = list(matrix.shape)
        shape[axis] = ends[side]
        index = torch.tensor(places[side])
        made[side] = matrix.new_zeros(shape).index_copy(axis, index, matrix)
    return made, {}


def group_weights(layer: LayerPlan, group: int, weights: Weights) -> Weights:
    """The part of a layer's projections that belongs to one head group."""
    return {
        side: matrix.narrow(_axis(side), *_span(layer, group, side)).clone()
        for side, matrix in weights[0].items()
    }, {}


def head_weights(layer: LayerPlan, group: int, query: int, weights: Weights) -> Weights:
    """One query head of a head group, with the keys and values it reads."""
    mine, _ = group_weights(layer, group, weights)
    for side in ("query", "output"):
        width = mine[side].shape[_axis(side)] // layer.heads[group].queries
        mine[side] = mine[side].narrow(_axis(side), query * width, width).clone()
    return mine, {}


def without_groups(layer: LayerPlan, groups: set[int], weights: Weights) -> Weights:
    """The layer's projections without what some head groups give."""
    made = {side: matrix.clone() for side, matrix in weights[0].items()}
    for group in groups:
        made["output"].narrow(1, *_span(layer, group, "output")).zero_()
    return made, weights[1]


@contextmanager
def replaced(model: Any, layers: Mapping[int, Weights]) -> Iterator[None]:
    """While open, the model has other projections in some layers."""
    attentions = model.attentions()
    before = {i: attention_weights(attentions[i]) for i in layers}
    try:
        for i, weights in layers.items():
            load_projections(attentions[i], weights)
        yield
    finally:
        for i, weights in before.items():
            load_projections(attentions[i], weights)


def _sides(head: HeadSpec, qk: list[int], vo: list[int]) -> dict[str, tuple[list[int], int, int]]:
    """Columns that are kept, full width and number of heads, on every side."""
    return {
        "query": (qk, head.qk_dim, head.queries),
        "key": (qk, head.qk_dim, 1),
        "value": (vo, head.vo_dim, 1),
        "output": (vo, head.vo_dim, head.queries),
    }


def _span(layer: LayerPlan, group: int, side: str) -> tuple[int, int]:
    """Where a head group begins on one side, and how long it is."""
    lengths = [width * times for _, width, times in (_sides(h, [], [])[side] for h in layer.heads)]
    return sum(lengths[:group]), lengths[group]


def _axis(side: str) -> int:
    return 1 if side == "output" else 0
