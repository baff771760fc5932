"""Plans that spend the same attention parameters in different places.

theory      the planner's: early layers at the bound's optimum, later ones narrower
uniform     every head equally wide
linear      more heads with depth
random      another draw of widths by layer at each seed
reversed    theory's layers in reverse order: its widths without its reason
dense       all parameters, the model that shares refer to
"""

from __future__ import annotations

import numpy as np

from headwise.plan import Budget, HeadSpec, Limit, ModelShape, Plan
from headwise.planning.policies import Rules, new_plan

RIVALS = ("uniform", "linear", "random", "reversed")
POLICIES = ("theory", *RIVALS, "dense")
STEP = 2  # widths are even, as rotary planes need


def rival_plan(policy: str, shape: ModelShape, share: float, seed: int) -> Plan:
    """One of `POLICIES` with this share of the dense model's attention parameters."""
    assert policy in POLICIES, policy
    budget, rules = Budget(attn_params=Limit(share=share)), Rules(multiple_of=STEP)
    if policy == "dense":
        return Plan.uniform(shape)
    if policy == "reversed":
        plan = new_plan(shape, budget, "theory", rules)
        return plan.model_copy(update={"layers": plan.layers[::-1]})
    if policy == "random":
        return _random(new_plan(shape, budget, "uniform", rules), seed)
    return new_plan(shape, budget, policy, rules)


def _random(uniform: Plan, seed: int) -> Plan:
    """Width moved between random layers, as often as makes the start unrecognisable."""
    rng = np.random.default_rng(seed)
    full, n = uniform.shape.qk_dim, uniform.shape.n_layers
    widths = np.array([layer.heads[0].qk_dim for layer in uniform.layers])
    for _ in range(20 * n):
        giver, taker = rng.permutation(n)[:2]
        if widths[giver] > STEP and widths[taker] < full:
            widths[giver] -= STEP
            widths[taker] += STEP
    layers = tuple(
        layer.model_copy(
            update={"heads": (HeadSpec(qk_dim=int(w), vo_dim=int(w)),) * len(layer.heads)}
        )
        for layer, w in zip(uniform.layers, widths, strict=True)
    )
    return uniform.model_copy(update={"layers": layers})
