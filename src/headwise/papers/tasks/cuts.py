"""Narrow heads inside a model of full width, so that one loaded model serves many cuts.

A head that keeps only some planes and value columns computes the same as the full head with zeros
everywhere else:

    W_Q  [ kept │ 0 │ kept │ 0 ]      columns of kept planes, in both halves
    W_V  [ kept │ 0            ]      the first columns

So narrow projections are put into the dense ones and taken out again afterwards. Heads are fully
rotary and have no biases, as in the models that claims are measured on.

A third of the depth is cut in two ways by equal parameters, narrower heads or fewer:

    width   every head group keeps the same share of its dimensions: the planes and value
            directions to which the loss is most sensitive
    heads   every layer loses whole head groups, those whose gate has the smallest gradient
            (Michel et al. 2019, arXiv 1905.10650), until the same share is left

Nothing is refitted afterwards: the two are compared as cuts.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from headwise.cutting.cut import cut_projections
from headwise.models.attention_headwise import PROJECTIONS, SIDES
from headwise.models.backbones_headwise import Projection, Projections, projections_of
from headwise.models.slicing import qk_columns
from headwise.plan import HeadSpec, LayerPlan, Plan
from headwise.planning.cost import layer_params
from headwise.planning.fit import Kept, kept_planes, most_valuable
from headwise.profiling.format import Profile
from headwise.profiling.run import ProfileJob, profile_model
from headwise.profiling.settings import ProfileSettings
from headwise.profiling.source import Sequences


def widened(dense: LayerPlan, narrow: LayerPlan, cut: Projections) -> Projections:
    """The projections of `narrow` in the shape of `dense`."""
    assert not any(cut.has_bias(side) for side in SIDES), "narrow heads with biases"
    places: dict[str, list[int]] = {side: [] for side in PROJECTIONS}
    ends = dict.fromkeys(PROJECTIONS, 0)
    for whole, head in zip(dense.heads, narrow.heads, strict=True):
        planes = kept_planes(whole, head)
        assert head.qk_dim == 2 * len(planes), "narrow heads with non-rotary columns"
        vo = list(range(head.vo_dim))
        qk = qk_columns(whole, Kept(planes=planes, free=(), vo=vo))
        for side, (columns, width, times) in _sides(whole, qk, vo).items():
            for _ in range(times):
                places[side] += [ends[side] + c for c in columns]
                ends[side] += width
    made = {}
    for side, projection in cut.items():
        matrix, axis = projection.weight, _axis(side)
        shape = list(matrix.shape)
        shape[axis] = ends[side]
        index = torch.tensor(places[side])
        made[side] = Projection(matrix.new_zeros(shape).index_copy(axis, index, matrix))
    return Projections(made)


def group_projections(layer: LayerPlan, group: int, whole: Projections) -> Projections:
    """The part of a layer's projections that belongs to one head group."""
    return Projections(
        {
            side: Projection(p.weight.narrow(_axis(side), *_span(layer, group, side)))
            for side, p in whole.items()
        }
    )


def head_projections(layer: LayerPlan, group: int, query: int, whole: Projections) -> Projections:
    """One query head of a head group, with the keys and values it reads."""
    mine = group_projections(layer, group, whole)
    own = {}
    for side in ("query", "output"):
        weight = mine[side].weight
        width = weight.shape[_axis(side)] // layer.heads[group].queries
        own[side] = Projection(weight.narrow(_axis(side), query * width, width))
    return mine.replaced(**own)


def without_groups(layer: LayerPlan, groups: set[int], whole: Projections) -> Projections:
    """The layer's projections with the outputs of some head groups set to zero."""
    W_O = whole["output"].weight.clone()
    for group in groups:
        W_O.narrow(1, *_span(layer, group, "output")).zero_()
    return whole.replaced(output=Projection(W_O, whole["output"].bias))


def _sides(head: HeadSpec, qk: list[int], vo: list[int]) -> dict[str, tuple[list[int], int, int]]:
    """Kept columns, full width and number of heads, on every side."""
    return {
        "query": (qk, head.qk_dim, head.queries),
        "key": (qk, head.qk_dim, 1),
        "value": (vo, head.vo_dim, 1),
        "output": (vo, head.vo_dim, head.queries),
    }


def _span(layer: LayerPlan, group: int, side: str) -> tuple[int, int]:
    """Where a head group begins on one side, and how wide it is."""
    lengths = [width * times for _, width, times in (_sides(h, [], [])[side] for h in layer.heads)]
    return sum(lengths[:group]), lengths[group]


def _axis(side: str) -> int:
    return 1 if side == "output" else 0


Way = Literal["width", "heads"]
WAYS: tuple[Way, ...] = ("width", "heads")


@dataclass(frozen=True, slots=True)
class CutLayers:
    """Projections in the dense shape by layer, and the number of parameters that are cut."""

    layers: dict[int, Projections]
    removed: int


def profile_windows(model: Any, ids: np.ndarray) -> Profile:
    """Profile a causal model on these windows; nothing stays on disk."""
    rows = Sequences(ids, "next-token", "windows", "")
    chunk = max(1, 1024 // ids.shape[1])
    settings = ProfileSettings(length=ids.shape[1], tokens=ids.size, chunk=chunk)
    with tempfile.TemporaryDirectory() as folder:
        return profile_model(ProfileJob(model, "model", rows, settings), Path(folder) / "profile")


def cut_to_plan(model: Any, profile: Profile, plan: Plan) -> dict[int, Projections]:
    """Cut the layers that a plan narrows; their projections in the dense shape."""
    made = {}
    for i, (dense, narrow) in enumerate(zip(profile.plan.layers, plan.layers, strict=True)):
        if dense != narrow:
            whole = projections_of(model.attentions()[i])
            made[i] = widened(dense, narrow, cut_projections(profile, plan, i, whole))
    return made


def cut_third(model: Any, profile: Profile, layers: range, way: Way, groups_kept: int) -> CutLayers:
    """Cut some layers to `groups_kept` head groups, or to that share of every head's width."""
    dense, d_model = profile.plan, profile.plan.shape.d_model
    if way == "width":
        plan = dense.model_copy(
            update={
                "layers": tuple(
                    _narrowed(profile, i, groups_kept) if i in layers else layer
                    for i, layer in enumerate(dense.layers)
                )
            }
        )
        pairs = zip(dense.layers, plan.layers, strict=True)
        removed = sum(layer_params(a, d_model) - layer_params(b, d_model) for a, b in pairs)
        return CutLayers(cut_to_plan(model, profile, plan), removed)
    made, removed = {}, 0
    for i in layers:
        layer = dense.layers[i]
        kept = most_valuable(group_importance(profile, i), groups_kept)
        gone = set(range(len(layer.heads))) - set(kept)
        made[i] = without_groups(layer, gone, projections_of(model.attentions()[i]))
        left = layer.model_copy(update={"heads": tuple(layer.heads[j] for j in kept)})
        removed += layer_params(layer, d_model) - layer_params(left, d_model)
    return CutLayers(made, removed)


def group_importance(profile: Profile, layer: int) -> np.ndarray:
    """Mean |∂loss/∂gate| of every head group.

    A gate on the whole group scales all its directions at once, so its gradient is their sum.
    """
    return np.asarray(np.abs(profile.get(layer, "vo_gradients").sum(-1)).mean(0))


def _narrowed(profile: Profile, index: int, groups_kept: int) -> LayerPlan:
    """Every head of a layer, narrowed to the share that `groups_kept` is of all groups.

    Widths are rounded so that at least as much is cut as by removing whole groups.
    """
    layer = profile.plan.layers[index]
    heads = []
    for j, head in enumerate(layer.heads):
        total = (head.qk_dim + head.vo_dim) * groups_kept // len(layer.heads)
        n_planes = head.qk_dim * groups_kept // len(layer.heads) // 2
        places = most_valuable(profile.get(index, "plane_sensitivity")[j], n_planes)
        planes = head.rotary_planes or ()
        change = {
            "qk_dim": 2 * n_planes,
            "vo_dim": min(head.vo_dim, total - 2 * n_planes),
            "rotary_planes": tuple(planes[p] for p in places),
        }
        heads.append(head.model_copy(update=change))
    return layer.model_copy(update={"heads": tuple(heads)})
