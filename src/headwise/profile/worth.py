"""From a profile to a fit: what every direction is worth, and which ones a plan keeps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headwise.errors import PlanError
from headwise.plan import Plan
from headwise.planning.fit import Task, kept_planes
from headwise.planning.worth_curves import FitRules, HeadWorth, Worths, most_valuable
from headwise.profile.format import Profile


@dataclass(frozen=True, slots=True)
class Kept:
    """What one head group keeps, as places in the profile's lists, ascending."""

    planes: tuple[int, ...]
    free: tuple[int, ...]
    vo: tuple[int, ...]


def fit_task(profile: Profile, policy: str, rules: FitRules) -> Task:
    """What `headwise.planning.fit` needs to know of a profile."""
    sensitivity = worths(profile, "sensitivity")
    other = None
    if policy in {"energy", "saturation"}:
        other = worths(profile, "energy")
    if policy == "saturation" and other is not None:
        other = tuple(
            tuple(
                _weighted(head, float(profile.get(i, "jacobian_norm")[-1].mean())) for head in layer
            )
            for i, layer in enumerate(other)
        )
    return Task(profile.plan, sensitivity, rules, policy, other)


def worths(profile: Profile, measure: str) -> Worths:
    """The sensitivity or the energy of every direction."""
    return tuple(
        tuple(head_worth(profile, measure, i, j) for j in range(len(layer.heads)))
        for i, layer in enumerate(profile.plan.layers)
    )


def head_worth(profile: Profile, measure: str, layer: int, head: int) -> HeadWorth:
    """The sensitivity or the energy of the directions of one head group."""
    spec = profile.plan.layers[layer].heads[head]
    n_planes = len(spec.rotary_planes or ())
    sizes = {"plane": n_planes, "free": spec.qk_dim - 2 * n_planes, "vo": spec.vo_dim}
    # Sides that are left alone were not measured: nothing of them is dropped.
    planes, free, vo = (
        profile.get(layer, f"{part}_{measure}")[head]
        if profile.has(layer, f"{part}_{measure}")
        else np.zeros(size)
        for part, size in sizes.items()
    )
    return HeadWorth(planes, free, vo, qk_whole=profile.record.qk_whole)


def kept_directions(profile: Profile, plan: Plan, layer: int, head: int) -> Kept:
    """Which directions a head group of `plan` keeps of those in `profile`.

    Planes are named by the plan. Of the value directions the `vo_dim` most sensitive are kept,
    and of the position-free ones as many as the planes leave of `qk_dim`; of equals the first.
    """
    if len(plan.layers) != len(profile.plan.layers) or any(
        len(a.heads) != len(b.heads) for a, b in zip(plan.layers, profile.plan.layers, strict=True)
    ):
        raise PlanError(
            "the plan must have the layers and head groups of the profiled model; use the plan "
            "with the profile it was fitted to."
        )
    dense, spec = profile.plan.layers[layer].heads[head], plan.layers[layer].heads[head]
    worth = head_worth(profile, "sensitivity", layer, head)
    planes = kept_planes(dense, spec)
    n_free = spec.qk_dim - 2 * len(planes)
    if not 0 <= n_free <= len(worth.free) or spec.vo_dim > len(worth.vo):
        raise PlanError(
            f"layer {layer}, head group {head} of the plan is {spec.qk_dim}/{spec.vo_dim} wide "
            f"with {len(planes)} rotary planes, which is no cut of the profiled {dense.qk_dim}/"
            f"{dense.vo_dim}; use the plan with the profile it was fitted to."
        )
    free = most_valuable(worth.free, n_free)
    return Kept(tuple(planes), tuple(free), tuple(most_valuable(worth.vo, spec.vo_dim)))


def _weighted(head: HeadWorth, weight: float) -> HeadWorth:
    """Each part's shares of its energy, times a weight."""

    def shares(energy: np.ndarray) -> np.ndarray:
        total = energy.sum()
        return weight * energy / total if total > 0 else energy

    return HeadWorth(shares(head.planes), shares(head.free), shares(head.vo), head.qk_whole)
