"""From a profile to the planner: the worth of every direction, and which ones a plan keeps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from headwise.errors import PlanError
from headwise.plan import Plan
from headwise.planning.fit import (
    FitProblem,
    HeadWorth,
    Kept,
    Worths,
    kept_by_worth,
    kept_planes,
    most_valuable,
)
from headwise.planning.rules import WidthRules
from headwise.profiling.format import Profile


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """What dropping each side of a layer would cost, and how saturated its attention is.

    A side that is not cut was not measured: None. Saturation is that at the longest context.
    """

    query_key: float | None
    value_output: float | None
    mlp: float | None
    entropy: float
    jacobian_norm: float
    score_spread: float


def layer_summaries(profile: Profile) -> tuple[LayerSummary, ...]:
    """A profile in a few numbers per layer."""

    def half(layer: int, *parts: str) -> float | None:
        names = [f"{p}_sensitivity" for p in parts if profile.has(layer, f"{p}_sensitivity")]
        return 0.5 * sum(float(profile.get(layer, n).sum()) for n in names) if names else None

    return tuple(
        LayerSummary(
            half(i, "plane", "free"),
            half(i, "vo"),
            half(i, "ffn"),
            *(
                float(profile.get(i, name)[-1].mean())
                for name in ("entropy", "jacobian_norm", "score_spread")
            ),
        )
        for i in range(len(profile.plan.layers))
    )


def fit_problem(profile: Profile, policy: str, rules: WidthRules) -> FitProblem:
    """The fit problem of a profile, for `headwise.planning.fit`."""
    worth = None
    if policy in {"energy", "saturation"}:
        worth = worths(profile, "energy")
    if policy == "saturation" and worth is not None:
        worth = tuple(
            tuple(
                _weighted(head, float(profile.get(i, "jacobian_norm")[-1].mean())) for head in layer
            )
            for i, layer in enumerate(worth)
        )
    record = profile.record
    measured = all(profile.has(i, "ffn_sensitivity") for i in range(len(profile.plan.layers)))
    return FitProblem(
        profile.plan,
        worths(profile, "sensitivity"),
        rules,
        policy,
        worth,
        record.unit,
        fixed_groups=record.qk_whole if record.fixed_groups is None else record.fixed_groups,
        neurons=neuron_worths(profile, "sensitivity") if measured else None,
        neuron_worth=neuron_worths(profile, "energy") if measured and worth is not None else None,
    )


def neuron_worths(profile: Profile, measure: str) -> tuple[Float[np.ndarray, " neurons"], ...]:
    """The sensitivity or the energy of every neuron, layer by layer."""
    return tuple(profile.get(i, f"ffn_{measure}") for i in range(len(profile.plan.layers)))


def kept_neurons(profile: Profile, plan: Plan, layer: int) -> list[int]:
    """Which neurons `plan` keeps of a layer of `profile`: the most sensitive ones."""
    width, dense = plan.ffn_dims[layer], profile.plan.ffn_dims[layer]
    if width == dense:
        return list(range(dense))
    if width > dense or not profile.has(layer, "ffn_sensitivity"):
        reason = f"more than the profiled {dense}"
        if width <= dense:
            reason = "narrower than the profiled one, whose neurons were not measured"
        raise PlanError(
            f"layer {layer} of the plan has an MLP of {width} neurons, {reason}; make the profile "
            "again, and fit the plan to it."
        )
    return most_valuable(profile.get(layer, "ffn_sensitivity"), width)


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
    """Which directions `plan` keeps of a head group of `profile`: the most sensitive ones.

    Nothing is kept of a group that the plan drops.
    """
    known = profile.plan.layers
    if len(plan.layers) != len(known) or any(
        max(a.sources, default=0) >= len(b.heads) for a, b in zip(plan.layers, known, strict=True)
    ):
        raise PlanError(
            "the plan must have the layers and head groups of the profiled model, or some of the "
            "groups; use the plan with the profile it was fitted to."
        )
    dense, spec = known[layer].heads[head], plan.layers[layer].by_source.get(head)
    if spec is None:
        return Kept(planes=(), free=(), vo=())
    worth = head_worth(profile, "sensitivity", layer, head)
    n_planes = len(kept_planes(dense, spec))
    if not 0 <= spec.qk_dim - 2 * n_planes <= len(worth.free) or spec.vo_dim > len(worth.vo):
        raise PlanError(
            f"layer {layer}, head group {head} of the plan is {spec.qk_dim}/{spec.vo_dim} wide "
            f"with {n_planes} rotary planes, which cannot be cut from the profiled {dense.qk_dim}/"
            f"{dense.vo_dim}; use the plan with the profile it was fitted to."
        )
    return kept_by_worth(worth, dense, spec)


def _weighted(head: HeadWorth, weight: float) -> HeadWorth:
    """Each part's shares of its energy, times a weight."""

    def shares(energy: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        total = energy.sum()
        return weight * energy / total if total > 0 else energy

    return HeadWorth(shares(head.planes), shares(head.free), shares(head.vo), head.qk_whole)
