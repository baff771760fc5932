"""What a plan leaves open, decided: score scales and rotary planes.

A checkpoint never derives a scale from a width, since a cut head keeps the scale of the head it was
cut from. A new head that states none gets 1/√qk_dim. With an identity query (or key) the score's
spread at the start would be another: a learned projection with weights of spread `init_std` turns
a normalised input (entries of size 1) into entries of size init_std·√d_model, the identity leaves
them at 1. The factor init_std·√d_model restores the spread; at 0.02 and d_model 768 it is 0.55, the
"halved scale" of the paper that trains with W_Q = I.
"""

from __future__ import annotations

import math

from headwise.plan import HeadSpec, LayerPlan, Plan


def resolved(plan: Plan, *, init_std: float = 0.02, rotary_planes: int = 0) -> Plan:
    """The plan with every scale and every rotary plane explicit.

    `rotary_planes` is how many planes the backbone rotates (0: no rotary positions).
    """
    factor = init_std * math.sqrt(plan.shape.d_model)
    layers = tuple(_layer(layer, plan.shape.qk_dim, factor, rotary_planes) for layer in plan.layers)
    return plan.model_copy(update={"layers": layers})


def spread_planes(n_kept: int, n_planes: int) -> tuple[int, ...]:
    """`n_kept` of `n_planes` planes, evenly spaced, so that the whole frequency range stays."""
    kept = min(n_kept, n_planes)
    if kept <= 1:
        return tuple(range(kept))
    return tuple(round(i * (n_planes - 1) / (kept - 1)) for i in range(kept))


def _layer(layer: LayerPlan, stock_qk_dim: int, factor: float, n_planes: int) -> LayerPlan:
    spread = factor ** sum(side in layer.identities for side in ("query", "key"))
    made: dict[HeadSpec, HeadSpec] = {}
    for head in layer.heads:
        if head not in made:
            made[head] = _head(head, stock_qk_dim, spread, n_planes)
    return layer.model_copy(update={"heads": tuple(made[head] for head in layer.heads)})


def _head(head: HeadSpec, stock_qk_dim: int, spread: float, n_planes: int) -> HeadSpec:
    scale, planes = head.score_scale, head.rotary_planes
    if scale is None:
        scale = spread / math.sqrt(head.qk_dim)
    if planes is None:
        # A partly rotated head (GPT-NeoX) keeps the rotated share of its width.
        share = min(1.0, 2 * n_planes / stock_qk_dim)
        planes = spread_planes(min(round(share * head.qk_dim / 2), head.qk_dim // 2), n_planes)
    return head.model_copy(update={"score_scale": scale, "rotary_planes": planes})
