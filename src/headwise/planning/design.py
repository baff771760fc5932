"""The design of a new model: its uniform shape, and the plan a policy makes of it under a budget.

A designer gives sizes; the model family says the rest (gated MLP or not, biases, norms, positions).
A policy then says how to spend a budget on the attention:

    width                 heads                 width
    │████████████████     │          ██████     │██████
    │████████████████     │     ███████████     │█████████████
    │████████████████     │████████████████     │████████████████
    └──────────── depth   └──────────── depth   └──────────── depth
       uniform              more-heads-late        theory

- uniform: every head equally wide. Assumes nothing; the baseline every other policy must beat.
- more-heads-late: the number of heads grows linearly with depth (the rule of OpenELM, arXiv
  2404.14619, from one half to the whole of the usual number). Assumes later layers need more.
- theory: the principle of arXiv 2510.03784. The early third of the layers has the heads that
  minimise the paper's error bound; later layers keep these heads but narrower. Assumes that tokens
  fill `token_dim` dimensions, that head directions matter by a 1/i spectrum, and that an error in
  the last layer costs `LAST_LAYER_WEIGHT` of one in the first: a stated guess about saturation,
  which a measured profile replaces.

more-heads-late and theory contradict each other; only measurement can say which one is right.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from pydantic import ValidationError

from headwise.errors import BudgetError, PlanError, did_you_mean, quoted
from headwise.plan import Budget, HeadSpec, LayerPlan, Limit, ModelShape, Origin, Plan
from headwise.planning.cost import SIDES, within_budget
from headwise.planning.rules import check_multiples
from headwise.planning.widths import Place, WidthCurve, WidthSolver
from headwise.records import first_problem
from headwise.theory.allocation import allocate

LAST_LAYER_WEIGHT = 0.25
EARLY_SHARE = 1 / 3
OPENELM_FIRST_SHARE = 0.5  # of the last layer's heads, in the first layer


@dataclass(frozen=True, slots=True)
class DesignRules:
    """What a policy has to respect besides the budget, and what the theory policy assumes."""

    multiple_of: int = 8
    min_dim: int | None = None  # None: one multiple
    context: int | None = None  # for FLOPs and traffic; None: the shape's
    batch: int = 1  # for traffic
    token_dim: int | None = None  # theory: None means the uniform head width
    kernel: tuple[float, ...] = (1.0,)  # theory: weight of each lag
    identity: tuple[Literal["query", "key", "value"], ...] = ()

    def __post_init__(self) -> None:
        check_multiples(self.multiple_of, self.min_dim)

    def allows(self, plan: Plan, budget: Budget) -> bool:
        """Whether a plan keeps every limit of a budget."""
        return within_budget(plan, budget, self.context, self.batch)

    def floor(self, width: int) -> int:
        """The narrowest a head of this full width may become."""
        return min(width, self.multiple_of if self.min_dim is None else self.min_dim)


def new_shape(
    *,
    n_layers: int,
    d_model: int,
    n_heads: int,
    context: int,
    n_kv_heads: int | None = None,
    head_dim: int | None = None,
    family: str = "llama",
    **given: Any,
) -> ModelShape:
    """The shape of a new uniform model; anything in `given` overrides the family's default."""
    if family not in FAMILIES:
        raise PlanError(f"unknown family {quoted(family)}. {did_you_mean(family, FAMILIES)}")
    sizes = {"layers": n_layers, "d-model": d_model, "heads": n_heads, "context": context}
    sizes |= {"kv-heads": 1 if n_kv_heads is None else n_kv_heads}
    sizes |= {"head-dim": 1 if head_dim is None else head_dim}
    for name, value in sizes.items():
        if value < 1:
            raise PlanError(f"{name} must be a whole number of at least 1, got {value}.")
    if head_dim is None:
        if d_model % n_heads:
            raise PlanError(
                f"heads must divide d-model {d_model}, got {n_heads}; choose a divisor "
                "or give the head width with --head-dim."
            )
        head_dim = d_model // n_heads
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    if n_heads % n_kv_heads:
        raise PlanError(f"kv-heads must divide the number of heads {n_heads}, got {n_kv_heads}.")
    defaults = FAMILIES[family](d_model, context)
    defaults |= {name: value for name, value in given.items() if value is not None}
    try:
        return ModelShape(
            family=family,
            n_layers=n_layers,
            d_model=d_model,
            context=context,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            qk_dim=head_dim,
            vo_dim=head_dim,
            **defaults,
        )
    except ValidationError as error:
        raise PlanError(
            f"This shape is not possible: {first_problem(error, ModelShape, {})}"
        ) from error


def new_plan(
    shape: ModelShape, budget: Budget, policy: str, rules: DesignRules | None = None
) -> Plan:
    """The plan a policy makes for a new model; no budget means 100% of attention parameters."""
    rules = rules or DesignRules()
    if policy not in POLICIES:
        raise PlanError(f"unknown policy {quoted(policy)}. {did_you_mean(policy, POLICIES)}")
    widest = max(rules.multiple_of, rules.min_dim or 1)
    if widest > max(shape.qk_dim, rules.token_dim or 1):
        raise PlanError(
            f"multiple-of and min-dim must be at most the head width {shape.qk_dim}, got {widest}."
        )
    if not budget.limited:
        budget = Budget(attn_params=Limit(share=1.0))
    plan = POLICIES[policy](shape, budget, rules)
    assert rules.allows(plan, budget), "a policy went over its budget"
    return plan


def uniform(shape: ModelShape, budget: Budget, rules: DesignRules) -> Plan:
    """Every head of every layer equally wide, as wide as the budget allows."""
    template = _with_identities(Plan.uniform(shape), rules)
    return _narrowed(
        template,
        budget,
        rules,
        tie=lambda layer, head: "all",
        weight=lambda layer: 1.0,
        origin=Origin(policy="uniform"),
    )


def more_heads_late(shape: ModelShape, budget: Budget, rules: DesignRules) -> Plan:
    """Heads of the usual width, their number growing linearly with depth."""
    if rules.identity:
        raise PlanError(
            "the policy more-heads-late changes the number of heads, so no projection can be the "
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
        if rules.allows(_with_groups(dense, per_step, scales[middle]), budget):
            low = middle + 1
        else:
            high = middle
    plan = _with_groups(dense, per_step, scales[low - 1] if low else 0.0)
    if not rules.allows(plan, budget):
        raise BudgetError(
            f"{budget} is too small for any plan with one whole head group of width "
            f"{shape.qk_dim} in each layer; raise the budget or use another policy."
        )
    return plan.model_copy(update={"origin": Origin(policy="more-heads-late")})


def theory(shape: ModelShape, budget: Budget, rules: DesignRules) -> Plan:
    """Early layers at the optimum of the error bound, later layers narrower."""
    heads, note = _best_heads(shape, rules)
    layer = LayerPlan(heads=heads, biases=shape.attention_biases)
    template = _with_identities(Plan(shape=shape, layers=(layer,) * shape.n_layers), rules)
    decay = np.linspace(1.0, LAST_LAYER_WEIGHT, shape.n_layers)
    for early in range(max(1, round(shape.n_layers * EARLY_SHARE)), -1, -1):
        notes = (note, f"{early} early layers keep the bound's optimum; later ones are narrower")
        try:
            return _narrowed(
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


POLICIES: dict[str, Callable[[ModelShape, Budget, DesignRules], Plan]] = {
    "theory": theory,
    "uniform": uniform,
    "more-heads-late": more_heads_late,
}


def _best_heads(shape: ModelShape, rules: DesignRules) -> tuple[tuple[HeadSpec, ...], str]:
    """The heads of one layer that minimise the error bound, and a sentence about the optimum."""
    width = shape.n_heads * shape.qk_dim
    token_dim = shape.qk_dim if rules.token_dim is None else rules.token_dim
    best = allocate(width, token_dim, rules.kernel)
    heads: list[HeadSpec] = []
    for group in best.groups:
        head_dim = int(group.head_dim)
        spec = HeadSpec(qk_dim=head_dim, vo_dim=head_dim, queries=shape.queries)
        heads += [spec] * max(1, group.heads // shape.queries)
    where = "at the corner head width = token width" if best.on_corner else "inside its range"
    vacuous = "; the bound is vacuous there (worse than predicting zero)" if best.vacuous else ""
    return tuple(heads), f"the bound's optimum {best.bound:.4g} is {where}{vacuous}"


def _with_identities(plan: Plan, rules: DesignRules) -> Plan:
    """The plan with the identity projections the rules ask for; their side keeps its width."""
    if not rules.identity:
        return plan
    biases = tuple(b for b in plan.layers[0].biases if b not in rules.identity)
    change: dict[str, object] = {"biases": biases, **dict.fromkeys(rules.identity, "identity")}
    # Through the constructor, so that widths that cannot be an identity are refused.
    layers = [{**layer.to_dict(), **change} for layer in plan.layers]
    return Plan.from_dict({**plan.to_dict(), "format": plan.format, "layers": layers}, "this plan")


def _narrowed(
    template: Plan,
    budget: Budget,
    rules: DesignRules,
    *,
    tie: Callable[[int, HeadSpec], Hashable],
    weight: Callable[[int], float],
    origin: Origin,
    whole_layers: int = 0,
) -> Plan:
    """The template with its widths cut to the budget by the solver."""
    context = rules.context or template.shape.context
    frozen = {"vo" if projection == "value" else "qk" for projection in rules.identity}
    curves: dict[Place, WidthCurve] = {}
    for i, layer in enumerate(template.layers):
        for j, head in enumerate(layer.heads):
            for side in SIDES:
                width: int = getattr(head, f"{side}_dim")
                whole = side in frozen or i < whole_layers
                curves[i, j, side] = WidthCurve(
                    values=weight(i) * _harmonic(width),
                    floor=width if whole else rules.floor(width),
                    multiple_of=rules.multiple_of,
                    tie=(side, i, j) if whole else tie(i, head),
                )
    widths, _ = WidthSolver(template, context, rules.batch, curves).solve(budget)
    layers = []
    for i, layer in enumerate(template.layers):
        heads = tuple(
            head.model_copy(update={"qk_dim": widths[i, j, "qk"], "vo_dim": widths[i, j, "vo"]})
            for j, head in enumerate(layer.heads)
        )
        layers.append(layer.model_copy(update={"heads": heads}))
    return template.model_copy(update={"layers": tuple(layers), "origin": origin})


def _harmonic(width: int) -> Float[np.ndarray, " options"]:
    """Value of 0 … width directions whose importance falls like 1/i; all of them are worth 1."""
    steps = np.cumsum(1.0 / np.arange(1, width + 1))
    return np.concatenate([[0.0], steps / steps[-1]])


def _with_groups(dense: Plan, per_step: Float[np.ndarray, " layers"], scale: float) -> Plan:
    """The dense plan with round(scale · per_step) head groups in each layer, at least one."""
    counts = np.maximum(1, np.floor(per_step * scale + 0.5 + 1e-9)).astype(int)
    layers = tuple(
        layer.model_copy(update={"heads": layer.heads[:1] * int(n)})
        for layer, n in zip(dense.layers, counts, strict=True)
    )
    return dense.model_copy(update={"layers": layers})


_ALL_BIASES = ("query", "key", "value", "output")


def _llama(d_model: int, context: int) -> dict[str, Any]:
    # The gated MLP that costs what a plain ×4 one does (8/3 · d), rounded up to 64.
    ffn_dim = -(-8 * d_model // 3 // 64) * 64
    return {"ffn_dim": ffn_dim, "vocab_size": 32000, "tied_embeddings": False}


def _gpt2(d_model: int, context: int) -> dict[str, Any]:
    return {
        "attention_biases": _ALL_BIASES,
        "ffn_dim": 4 * d_model,
        "ffn_gated": False,
        "ffn_biases": True,
        "norm_biases": True,
        "learned_positions": context,
        "vocab_size": 50257,
    }


def _bert(d_model: int, context: int) -> dict[str, Any]:
    # Two token types and the norm of the embeddings (2·d each), and the pooler (d² + d).
    return _gpt2(d_model, context) | {
        "causal": False,
        "lm_head": False,
        "final_norm": False,
        "vocab_size": 30522,
        "other_params": d_model * d_model + 5 * d_model,
    }


FAMILIES = {"llama": _llama, "gpt2": _gpt2, "bert": _bert}
