"""Equal cuts in one third of the depth: narrower heads, or fewer.

    width   every head group of the third keeps the same share of its dimensions, the planes and
            value directions to which the loss is most sensitive
    heads   every layer of the third loses whole head groups, those whose gate has the smallest
            gradient (Michel et al. 2019, arXiv 1905.10650), until the same share is left

Nothing is refitted afterwards: the two are compared as cuts.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headwise.compress.cut import cut_weights
from headwise.compress.recipes.parts import attention_weights
from headwise.nn.backbones_headwise import Weights
from headwise.plan import LayerPlan, Plan
from headwise.planning.cost import layer_params
from headwise.planning.worth_curves import most_valuable
from headwise.profile.chunks import Job
from headwise.profile.format import Profile
from headwise.profile.run import profile_model
from headwise.profile.settings import ProfileSettings
from headwise.profile.source import Sequences
from headwise.reproduce.narrow_heads import widened, without_groups

Way = Literal["width", "heads"]
WAYS: tuple[Way, ...] = ("width", "heads")


@dataclass(frozen=True, slots=True)
class CutLayers:
    """Projections in the dense shape by layer, and the attention parameters they stand for."""

    layers: dict[int, Weights]
    removed: int


def profiled(model: Any, ids: np.ndarray) -> Profile:
    """The profile of a causal model on these windows; nothing stays on the disk."""
    rows = Sequences(ids, "next-token", "windows", "")
    chunk = max(1, 1024 // ids.shape[1])
    settings = ProfileSettings(length=ids.shape[1], tokens=ids.size, chunk=chunk)
    with tempfile.TemporaryDirectory() as folder:
        return profile_model(Job(model, "model", rows, settings), Path(folder) / "profile")


def cut_to_plan(model: Any, profile: Profile, plan: Plan) -> dict[int, Weights]:
    """The layers that a plan narrows, in the dense shape."""
    made = {}
    for i, (dense, narrow) in enumerate(zip(profile.plan.layers, plan.layers, strict=True)):
        if dense != narrow:
            weights = attention_weights(model.attentions()[i])
            made[i] = widened(dense, narrow, cut_weights(profile, plan, i, weights))
    return made


def cut_third(model: Any, profile: Profile, layers: range, way: Way, groups_kept: int) -> CutLayers:
    """Some layers cut to `groups_kept` head groups, or to that share of every head's width."""
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
        made[i] = without_groups(layer, gone, attention_weights(model.attentions()[i]))
        left = layer.model_copy(update={"heads": tuple(layer.heads[j] for j in kept)})
        removed += layer_params(layer, d_model) - layer_params(left, d_model)
    return CutLayers(made, removed)


def group_importance(profile: Profile, layer: int) -> np.ndarray:
    """Mean |∂loss/∂gate| of every head group.

    A gate on the whole group moves all its directions at once, so its gradient is their sum.
    """
    return np.asarray(np.abs(profile.get(layer, "vo_gradients").sum(-1)).mean(0))


def _narrowed(profile: Profile, index: int, groups_kept: int) -> LayerPlan:
    """Every head of a layer at the share of its width that `groups_kept` groups are of all.

    Widths are rounded so that at least as much is cut as by taking whole groups.
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
