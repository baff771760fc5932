"""Policies: ways to spend a budget on the attention of a new model.

    width                 heads                  width
    │████████████████     │          ██████     │██████
    │████████████████     │     ███████████     │█████████████
    │████████████████     │████████████████     │████████████████
    └──────────── depth   └──────────── depth   └──────────── depth
       uniform               linear                 theory

- uniform: every head equally wide. Assumes nothing; the baseline every other policy must beat.
- linear: the number of heads grows linearly with depth (the rule of OpenELM, arXiv 2404.14619,
  which goes from one half to the whole of the usual number). Assumes later layers need more.
- theory: the principle of arXiv 2510.03784. The early third of the layers has the heads that
  minimise the paper's error bound; later layers keep these heads but narrower. Assumes that tokens
  fill `token_dim` dimensions, that head directions matter by a 1/i spectrum, and that an error in
  the last layer costs `LAST_LAYER_WEIGHT` of one in the first: a stated guess about saturation,
  which a measured profile replaces.

linear and theory contradict each other; which one is right is for measurement to say.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headwise.errors import BudgetError, PlanError, did_you_mean
from headwise.plan import (
    Budget,
    HeadSpec,
    LayerPlan,
    Limit,
    ModelShape,
    Origin,
    Plan,
)
from headwise.planning.cost import cost, dense_cost
from headwise.planning.widths import Part, Place, WidthCurve, best_widths
from headwise.theory.allocation import allocate

LAST_LAYER_WEIGHT = 0.25
EARLY_SHARE = 1 / 3
OPENELM_FIRST_SHARE = 0.5  # of the last layer's heads, in the first layer


@dataclass(frozen=True, slots=True)
class Rules:
    """What a policy has to respect besides the budget."""

    multiple_of: int = 8
    min_dim: int | None = None  # None: one multiple
    context: int | None = None  # for FLOPs; None: the shape's
    token_dim: int | None = None  # theory: None means the uniform head width
    kernel: tuple[float, ...] = (1.0,)  # theory: weight of each lag
    identity: tuple[Literal["query", "key", "value"], ...] = ()

    def floor(self, width: int) -> int:
        """The narrowest a head of this full width may become."""
        return min(width, self.multiple_of if self.min_dim is None else self.min_dim)


def new_plan(shape: ModelShape, budget: Budget, policy: str, rules: Rules | None = None) -> Plan:
    """The plan a policy makes for a new model; no budget means 100% of attention parameters."""
    rules = rules or Rules()
    if policy not in POLICIES:
        raise PlanError(
            f"policy must be one that is known, got {policy!r}. {did_you_mean(policy, POLICIES)}"
        )
    if rules.multiple_of < 1 or (rules.min_dim is not None and rules.min_dim < 1):
        raise PlanError(
            f"multiple-of and min-dim must be at least 1, got {rules.multiple_of} "
            f"and {rules.min_dim}."
        )
    widest = max(rules.multiple_of, rules.min_dim or 1)
    if widest > max(shape.qk_dim, rules.token_dim or 1):
        raise PlanError(
            f"multiple-of and min-dim must be at most the head width {shape.qk_dim}, got {widest}."
        )
    if not budget.limited:
        budget = Budget(attn_params=Limit(share=1.0))
    plan = POLICIES[policy](shape, budget, rules)
    _assert_within(plan, budget, rules)
    return plan


def uniform(shape: ModelShape, budget: Budget, rules: Rules) -> Plan:
    """Every head of every layer equally wide, as wide as the budget allows."""
    template = _template(Plan.uniform(shape), rules)
    return _fitted(
        template,
        budget,
        rules,
        tie=lambda layer, head: "all",
        weight=lambda layer: 1.0,
        origin=Origin(policy="uniform"),
    )


def linear(shape: ModelShape, budget: Budget, rules: Rules) -> Plan:
    """Heads of the usual width, their number growing linearly with depth."""
    if rules.identity:
        raise PlanError(
            "the linear policy changes the number of heads, so no projection can be the "
            f"identity, got {', '.join(rules.identity)}; use uniform or theory."
        )
    last = max(1, shape.n_layers - 1)
    share = OPENELM_FIRST_SHARE + (1 - OPENELM_FIRST_SHARE) * np.arange(shape.n_layers) / last
    per_step = share * shape.n_kv_heads  # head groups of each layer at scale 1
    # The number of groups of layer i steps from k to k + 1 at scale (k + ½) / per_step[i].
    most = 2 * shape.n_kv_heads
    scales = np.unique((np.arange(most)[:, None] + 0.5) / per_step)
    dense = Plan.uniform(shape)
    low, high = 0, len(scales)  # scales[:low] are known to fit
    while low < high:
        middle = (low + high) // 2
        if _within(_with_groups(dense, per_step, scales[middle]), budget, rules):
            low = middle + 1
        else:
            high = middle
    plan = _with_groups(dense, per_step, scales[low - 1] if low else 0.0)
    if not _within(plan, budget, rules):
        raise BudgetError(
            f"{budget} is too small for any plan with one whole head group of width "
            f"{shape.qk_dim} in each layer; raise the budget or use another policy."
        )
    return plan.model_copy(update={"origin": Origin(policy="linear")})


def theory(shape: ModelShape, budget: Budget, rules: Rules) -> Plan:
    """Early layers at the optimum of the error bound, later layers narrower."""
    heads, note = _best_heads(shape, rules)
    layer = LayerPlan(heads=heads, biases=shape.attention_biases)
    template = _template(Plan(shape=shape, layers=(layer,) * shape.n_layers), rules)
    decay = np.linspace(1.0, LAST_LAYER_WEIGHT, shape.n_layers)
    for early in range(max(1, round(shape.n_layers * EARLY_SHARE)), -1, -1):
        notes = (note, f"{early} early layers keep the bound's optimum; later ones are narrower")
        try:
            return _fitted(
                template,
                budget,
                rules,
                tie=lambda layer, head: (layer, head.vo_dim),
                weight=lambda layer: float(decay[layer]),
                whole_layers=early,
                origin=Origin(policy="theory", notes=notes),
            )
        except BudgetError:
            if early == 0:
                raise
    raise AssertionError("the loop ends with a plan or an error")


POLICIES: dict[str, Callable[[ModelShape, Budget, Rules], Plan]] = {
    "theory": theory,
    "uniform": uniform,
    "linear": linear,
}


def _best_heads(shape: ModelShape, rules: Rules) -> tuple[tuple[HeadSpec, ...], str]:
    """The heads of one layer that minimise the error bound, and a sentence about the optimum."""
    width = shape.n_heads * shape.qk_dim
    token_dim = shape.qk_dim if rules.token_dim is None else rules.token_dim
    best = allocate(width, token_dim, rules.kernel)
    heads: list[HeadSpec] = []
    for group in best.groups:
        head_dim = int(group.head_dim)
        spec = HeadSpec(qk_dim=head_dim, vo_dim=head_dim, queries=shape.queries)
        heads += [spec] * max(1, group.heads // shape.queries)
    where = "on the corner head width = token width" if best.on_corner else "inside its range"
    worth = "; the bound is vacuous there (worse than predicting zero)" if best.vacuous else ""
    return tuple(heads), f"the bound's optimum {best.bound:.4g} is {where}{worth}"


def _template(plan: Plan, rules: Rules) -> Plan:
    """The plan with the projections that shall be the identity; their side keeps its full width."""
    if not rules.identity:
        return plan
    biases = tuple(b for b in plan.layers[0].biases if b not in rules.identity)
    change: dict[str, object] = {"biases": biases, **dict.fromkeys(rules.identity, "identity")}
    # Through the constructor, so that widths that cannot be an identity are refused.
    layers = [{**layer.to_dict(), **change} for layer in plan.layers]
    return Plan.from_dict({**plan.to_dict(), "format": plan.format, "layers": layers}, "this plan")


def _fitted(
    template: Plan,
    budget: Budget,
    rules: Rules,
    *,
    tie: Callable[[int, HeadSpec], Hashable],
    weight: Callable[[int], float],
    origin: Origin,
    whole_layers: int = 0,
) -> Plan:
    """The template with its widths cut to the budget, by the one solver."""
    context = rules.context or template.shape.context
    frozen = {"qk" if side != "value" else "vo" for side in rules.identity}
    curves: dict[Place, WidthCurve] = {}
    parts: tuple[Part, ...] = ("qk", "vo")
    for i, layer in enumerate(template.layers):
        for j, head in enumerate(layer.heads):
            for part in parts:
                width: int = getattr(head, f"{part}_dim")
                whole = part in frozen or i < whole_layers
                curves[i, j, part] = WidthCurve(
                    values=weight(i) * _harmonic(width),
                    floor=width if whole else rules.floor(width),
                    multiple_of=rules.multiple_of,
                    tie=(part, i, j) if whole else tie(i, head),
                )
    widths, _ = best_widths(template, budget, context, curves)
    return _resized(template, widths, origin)


def _harmonic(width: int) -> np.ndarray:
    """Value of 0 … width directions whose importance falls like 1/i; all of them are worth 1."""
    steps = np.cumsum(1.0 / np.arange(1, width + 1))
    return np.concatenate([[0.0], steps / steps[-1]])


def _resized(plan: Plan, widths: dict[Place, int], origin: Origin) -> Plan:
    layers = []
    for i, layer in enumerate(plan.layers):
        heads = tuple(
            head.model_copy(update={"qk_dim": widths[i, j, "qk"], "vo_dim": widths[i, j, "vo"]})
            for j, head in enumerate(layer.heads)
        )
        layers.append(layer.model_copy(update={"heads": heads}))
    return plan.model_copy(update={"layers": tuple(layers), "origin": origin})


def _with_groups(dense: Plan, per_step: np.ndarray, scale: float) -> Plan:
    """The dense plan with round(scale · per_step) head groups in each layer, at least one."""
    counts = np.maximum(1, np.floor(per_step * scale + 0.5 + 1e-9)).astype(int)
    layers = tuple(
        layer.model_copy(update={"heads": layer.heads[:1] * int(n)})
        for layer, n in zip(dense.layers, counts, strict=True)
    )
    return dense.model_copy(update={"layers": layers})


def _within(plan: Plan, budget: Budget, rules: Rules) -> bool:
    spent, dense = cost(plan, rules.context), dense_cost(plan.shape, rules.context)
    return all(getattr(spent, r) <= budget.amount(r, dense) for r in budget.limited)


def _assert_within(plan: Plan, budget: Budget, rules: Rules) -> None:
    assert _within(plan, budget, rules), "a policy went over its budget"
