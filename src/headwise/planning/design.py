"""The plan of a new model: a policy applied to its uniform shape under a budget.

A policy says how to spend a budget on the attention. `uniform` assumes nothing. Every other policy
is a **hypothesis**, with its evidence in `EVIDENCE`; some contradict each other:

    heads × width, first layer ──► last layer

    uniform               6×8   6×8   6×8   6×8      every head equally wide
    narrower-late         6×8   6×8   6×6   6×4      the same heads, narrower with depth
    more-heads-late       3×8   4×8   5×8   6×8      OpenELM's rule for heads (arXiv 2404.14619)
    openelm               the same, and MLPs that grow from 0.22 to 1.78 of the uniform width
    early-many-late-few   12×4  8×6   6×8   4×12     proposed by readers of the papers
    early-few-late-many   3×16  4×12  6×8   12×4     its reverse, as in Prism (arXiv 2606.27449)
    theory                the heads of the error bound early, fewer late, scores narrowed by the
                          context (arXiv 2510.03784)

MLPs have the shape's width, or a width by depth (`openelm`). A limit on MLP parameters makes them
narrower; every other limit applies to the heads. With `refill_ffn` the parameters saved in the
attention go to the MLP of the same layer, as in the paper that trains with W_Q = I.

`theory` uses the inputs of the paper's formulas, the token width (or the measured spectrum of token
vectors) and the lag kernel, and only the total width of the uniform shape. The context
enters through saturation. With scores bounded by C, an error in the scores changes the softmax over
L tokens by at most e^{2C}/L (½ at most), so a direction of queries and keys counts that much
less than one of values. The later layers have fewer heads, as the paper allows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Float

from headwise.errors import BudgetError, PlanError, did_you_mean, quoted
from headwise.plan import Budget, HeadSpec, Limit, ModelShape, Origin, Plan
from headwise.planning.cost import (
    SIDES,
    Side,
    dense_cost,
    ffn_params,
    layer_params,
    neuron_cost,
    within_budget,
)
from headwise.planning.families import FAMILIES, new_shape
from headwise.planning.rules import check_multiples
from headwise.planning.targets import kernels_of, target_of
from headwise.planning.widths import (
    Place,
    WidthCosts,
    WidthCurve,
    WidthSolver,
    largest_scale,
)
from headwise.theory.allocation import allocate
from headwise.theory.estimators import Spectrum
from headwise.theory.saturation import NORM_CEILING, saturation_bound

__all__ = ["EVIDENCE", "FAMILIES", "POLICIES", "DesignRules", "new_plan", "new_shape"]

LAST_LAYER_WEIGHT = 0.25  # narrower-late: of an error in the last layer, relative to the first
EARLY_SHARE = 1 / 3  # of the layers are early
LATE_HEADS = 0.5  # theory: of the early layers' heads, in the last layer
OPENELM_FIRST_SHARE = 0.5  # of the last layer's heads, in the first layer
OPENELM_MULTIPLIERS = (0.5, 4.0)  # MLP width ÷ d_model, first and last layer; taken as shares
MOST_HEADS = 2.0  # early-many-late-few: of the uniform number, in the first layer; 1/2 in the last


@dataclass(frozen=True, slots=True)
class DesignRules:
    """Constraints on a policy besides the budget, and the inputs of the theory policy."""

    multiple_of: int = 8
    min_dim: int | None = None  # None: one multiple
    context: int | None = None  # for FLOPs, traffic and saturation; None: the shape's
    batch: int = 1  # for traffic
    token_dim: int | Spectrum | None = None  # theory: the width tokens fill, or their spectrum
    kernel: tuple[float, ...] = (1.0,)  # theory: weight of each lag
    score_bound: float = 2.0  # theory: the largest absolute score
    identity: tuple[Literal["query", "key", "value"], ...] = ()
    ffn_multiple_of: int = 64  # MLP widths that a policy chooses
    widths: tuple[int, ...] | None = None  # heads are as wide as one of these; None: any multiple
    equal_sides: bool = False  # queries and keys as wide as values
    one_width: bool = False  # of a side, in all layers; only for designs, policies state their own
    refill_ffn: bool = False  # what the attention saves goes to the MLPs

    def __post_init__(self) -> None:
        check_multiples(self.multiple_of, self.min_dim)
        check_multiples(self.ffn_multiple_of, None, "ffn-multiple-of")

    def allows(self, plan: Plan, budget: Budget) -> bool:
        """Whether a plan meets every limit of a budget."""
        return within_budget(plan, budget, self.context, self.batch)

    def tied_for(self, targets: Sequence[str]) -> DesignRules:
        """The rules with what these targets need tied."""
        asked, kernels = [target_of(name) for name in targets], kernels_of(targets)
        return replace(
            self,
            multiple_of=math.lcm(self.multiple_of, kernels.multiple_of),
            widths=kernels.widths,
            equal_sides=any(one.equal_sides for one in asked),
            one_width=any(one.one_width for one in asked),
        )

    def floor(self, width: int) -> int:
        """The narrowest a head of this full width may become."""
        return min(width, self.multiple_of if self.min_dim is None else self.min_dim)


def new_plan(
    shape: ModelShape, budget: Budget, policy: str = "uniform", rules: DesignRules | None = None
) -> Plan:
    """A policy's plan for a new model; without a budget, 100% of the attention parameters."""
    rules = rules or DesignRules()
    if policy not in POLICIES:
        raise PlanError(f"unknown policy {quoted(policy)}. {did_you_mean(policy, POLICIES)}")
    widest = max(rules.multiple_of, rules.min_dim or 1)
    if widest > shape.qk_dim:
        raise PlanError(
            f"multiple-of and min-dim must be at most the head width {shape.qk_dim}, got {widest}."
        )
    if not budget.limited:
        budget = Budget(attn_params=Limit(share=1.0))
    plan = POLICIES[policy](_dense(shape, budget, policy, rules), budget, rules)
    if rules.refill_ffn:
        plan = _refilled(plan, budget, rules)
    assert rules.allows(plan, budget), "a policy went over its budget"
    if policy == "uniform":
        return plan
    notes = (*plan.origin.notes, f"{policy} is a hypothesis: {EVIDENCE[policy]}")
    return plan.model_copy(update={"origin": plan.origin.model_copy(update={"notes": notes})})


# --- the policies ------------------------------------------------------------------------------


def uniform(dense: Plan, budget: Budget, rules: DesignRules) -> Plan:
    """Every head of every layer equally wide, as wide as the budget allows."""
    return _narrowed(
        _with_identities(dense, rules),
        budget,
        rules,
        tie=lambda layer, head, side: "all",
        weight=lambda layer, side: 1.0,
        origin=Origin(policy="uniform"),
    )


def narrower_late(dense: Plan, budget: Budget, rules: DesignRules) -> Plan:
    """The uniform heads; the first third of the layers whole, later ones increasingly narrower."""
    decay = np.linspace(1.0, LAST_LAYER_WEIGHT, dense.shape.n_layers)
    return _early_whole(
        _with_identities(dense, rules),
        budget,
        rules,
        tie=lambda layer, head, side: (layer, head.vo_dim),
        weight=lambda layer, side: float(decay[layer]),
        origin=Origin(policy="narrower-late"),
    )


def more_heads_late(dense: Plan, budget: Budget, rules: DesignRules) -> Plan:
    """Heads of the uniform width, whose number grows linearly with depth."""
    return _growing("more-heads-late", dense, budget, rules)


def openelm(dense: Plan, budget: Budget, rules: DesignRules) -> Plan:
    """The same heads; MLP widths also grow linearly with depth (set by `_dense`)."""
    return _growing("openelm", dense, budget, rules)


def _growing(policy: str, dense: Plan, budget: Budget, rules: DesignRules) -> Plan:
    _refuse_identities(policy, rules)
    shape = dense.shape
    share = np.linspace(OPENELM_FIRST_SHARE, 1.0, shape.n_layers)
    per_step = share * shape.n_kv_heads  # head groups of each layer at scale 1
    # The number of groups of layer i steps from k to k + 1 at scale (k + ½) / per_step[i].
    most = 2 * shape.n_kv_heads
    scales = np.unique((np.arange(most)[:, None] + 0.5) / per_step)
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
    return plan.model_copy(update={"origin": Origin(policy=policy)})


def early_many_late_few(dense: Plan, budget: Budget, rules: DesignRules) -> Plan:
    """Many narrow heads in the first layer, few wide ones in the last; equal total widths."""
    return _graded("early-many-late-few", MOST_HEADS, dense, budget, rules)


def early_few_late_many(dense: Plan, budget: Budget, rules: DesignRules) -> Plan:
    """Few wide heads in the first layer, many narrow ones in the last; equal total widths."""
    return _graded("early-few-late-many", 1 / MOST_HEADS, dense, budget, rules)


def theory(dense: Plan, budget: Budget, rules: DesignRules) -> Plan:
    """Early layers at the optimum of the error bound, later ones with fewer heads; scores narrower
    with the context.
    """
    shape = dense.shape
    if rules.token_dim is None:
        raise PlanError(
            "the policy theory needs the width that tokens fill, which the bound depends on; "
            "measure it with --vectors, assume it with --token-dim, or use another policy."
        )
    heads, note = _best_heads(shape, rules)
    late = np.linspace(1.0, LATE_HEADS, shape.n_layers - _early(shape) + 1)[1:]
    shares = [*([1.0] * _early(shape)), *late.tolist()]
    layers = tuple(
        layer.model_copy(update={"heads": _thinned(heads, share)})
        for layer, share in zip(dense.layers, shares, strict=True)
    )
    context = rules.context or shape.context
    answer = min(NORM_CEILING, saturation_bound(rules.score_bound, context)) / NORM_CEILING
    saturation = (
        f"over {context} tokens with scores up to {rules.score_bound:g}, a direction of queries "
        f"and keys counts {answer:.3g} times one of values"
    )
    return _early_whole(
        _with_identities(dense.model_copy(update={"layers": layers}), rules),
        budget,
        rules,
        tie=lambda layer, head, side: (layer, head.vo_dim, None if rules.equal_sides else side),
        weight=lambda layer, side: answer if side == "qk" else 1.0,
        origin=Origin(policy="theory", notes=(note, saturation)),
    )


Policy = Callable[[Plan, Budget, DesignRules], Plan]  # what it starts from is the uniform plan
POLICIES: dict[str, Policy] = {
    "uniform": uniform,
    "narrower-late": narrower_late,
    "more-heads-late": more_heads_late,
    "openelm": openelm,
    "early-many-late-few": early_many_late_few,
    "early-few-late-many": early_few_late_many,
    "theory": theory,
}
# One clause each, without a full stop: what speaks for a policy and against it.
EVIDENCE: dict[str, str] = {
    "uniform": "the baseline; nothing is assumed",
    "narrower-late": "the paper says later layers may be narrower; here it was not "
    "distinguishable from uniform in six layers, and in two layers a wider first layer lost 5.8% "
    "on windows of 256 tokens (5 of 5 seeds)",
    "more-heads-late": "used by OpenELM's authors; here it was not distinguishable from uniform in "
    "six layers",
    "openelm": "used by OpenELM's authors; not measured here",
    "early-many-late-few": "proposed by readers of the papers, never measured; it contradicts "
    "narrower-late",
    "early-few-late-many": "reported by Prism's authors; not measured here; it contradicts "
    "early-many-late-few",
    "theory": "the bound is proven for one layer on a linear task, and is vacuous where tokens "
    "fill the model's width; the rest is assumed, and not measured here",
}


# --- what they have in common ------------------------------------------------------------------


def _dense(shape: ModelShape, budget: Budget, policy: str, rules: DesignRules) -> Plan:
    """The uniform plan with the MLP widths of a policy, within the limit on MLP parameters."""
    dense, n = Plan.uniform(shape), shape.n_layers
    shares = np.linspace(*OPENELM_MULTIPLIERS, n) if policy == "openelm" else np.ones(n)
    neurons = n * shape.ffn_dim
    if budget.ffn_params is not None:
        most = budget.amount("ffn_params", dense_cost(shape))
        # Some biases are there at any width.
        fixed = n * (ffn_params(shape, 1) - neuron_cost(shape)["ffn_params"])
        neurons = min(neurons, max(0, most - fixed) // max(1, neuron_cost(shape)["ffn_params"]))
    if not shape.ffn_dim or (policy != "openelm" and neurons == n * shape.ffn_dim):
        return dense
    step = rules.ffn_multiple_of
    # The running sum is rounded, so that no neuron is lost to rounding on the way.
    ends = np.cumsum(shares / shares.sum() * neurons + 1e-6).astype(np.int64) // step * step
    widths = np.diff(ends, prepend=0)
    if policy != "openelm":
        widths = np.full(n, neurons // n // step * step)
    if widths.min() < 1:
        raise BudgetError(
            f"{budget} is too small for MLPs of {step} neurons in each layer; raise the budget, "
            "lower --ffn-multiple-of, or use another policy."
        )
    return _with_ffn_dims(dense, widths.tolist())


def _with_ffn_dims(plan: Plan, widths: Sequence[int]) -> Plan:
    layers = tuple(
        layer.model_copy(update={"ffn_dim": width})
        for layer, width in zip(plan.layers, widths, strict=True)
    )
    return plan.model_copy(update={"layers": layers})


def _refilled(plan: Plan, budget: Budget, rules: DesignRules) -> Plan:
    """The plan with the parameters that each layer's attention saves added to its MLP."""
    shape = plan.shape
    of_attention = {"attn_params", "kv_bytes"}
    if not of_attention.issuperset(budget.limited):
        raise PlanError(
            "--refill-ffn gives what the attention saves to the MLPs, so it works only with limits "
            f"on attention parameters and cached bytes, got {budget}; leave one of them out."
        )
    if not shape.ffn_dim:
        raise PlanError("--refill-ffn needs a model with MLPs, got an ffn-dim of 0.")
    whole = layer_params(Plan.uniform(shape).layers[0], shape.d_model)
    saved = [max(0, whole - layer_params(layer, shape.d_model)) for layer in plan.layers]
    step, price = rules.ffn_multiple_of, neuron_cost(shape)["ffn_params"]
    more = [one // price // step * step for one in saved]
    widths = [width + extra for width, extra in zip(plan.ffn_dims, more, strict=True)]
    told = f"{sum(more)} neurons beyond the uniform MLPs, paid for by savings in the attention"
    notes = (*plan.origin.notes, told)
    origin = plan.origin.model_copy(update={"notes": notes})
    return _with_ffn_dims(plan, widths).model_copy(update={"origin": origin})


def _early(shape: ModelShape) -> int:
    return max(1, round(shape.n_layers * EARLY_SHARE))


def _early_whole(template: Plan, budget: Budget, rules: DesignRules, **how: object) -> Plan:
    """The narrowed plan with the early layers whole; fewer of them if the budget is too small."""
    origin = how.pop("origin")
    assert isinstance(origin, Origin)
    for early in range(_early(template.shape), -1, -1):
        told = f"{early} early layers have full width; later ones are narrower"
        noted = origin.model_copy(update={"notes": (*origin.notes, told)})
        try:
            return _narrowed(template, budget, rules, whole_layers=early, origin=noted, **how)  # type: ignore[arg-type]
        except BudgetError:
            if early == 0:
                raise
    raise AssertionError("the loop ends with a plan or an error")


def _graded(policy: str, first: float, dense: Plan, budget: Budget, rules: DesignRules) -> Plan:
    """Heads from `first` times the uniform number to 1/first of it, each layer as wide in all."""
    _refuse_identities(policy, rules)
    shape = dense.shape
    grades = np.geomspace(first, 1 / first, shape.n_layers)
    counts = np.maximum(1, np.round(shape.n_kv_heads * grades)).astype(int)

    def scaled(scale: float) -> Plan:
        layers = []
        for layer, n in zip(dense.layers, counts.tolist(), strict=True):
            full = shape.n_kv_heads * shape.qk_dim / n
            width = int(scale * full + 1e-9) // rules.multiple_of * rules.multiple_of
            width = max(width, rules.multiple_of, rules.min_dim or 1)
            head = HeadSpec(qk_dim=width, vo_dim=width, queries=shape.queries)
            layers.append(layer.model_copy(update={"heads": (head,) * n}))
        return dense.model_copy(update={"layers": tuple(layers)})

    scale = largest_scale(lambda s: rules.allows(scaled(s), budget), 1.0)
    if scale is None:
        raise BudgetError(
            f"{budget} is too small for {int(counts.max())} head groups of width "
            f"{max(rules.multiple_of, rules.min_dim or 1)} in a layer; raise the budget, lower "
            "multiple-of, or use another policy."
        )
    told = f"{counts[0]} head groups in the first layer, {counts[-1]} in the last"
    return scaled(scale).model_copy(update={"origin": Origin(policy=policy, notes=(told,))})


def _refuse_identities(policy: str, rules: DesignRules) -> None:
    if rules.identity:
        raise PlanError(
            f"the policy {policy} changes the number of heads, so no projection can be the "
            f"identity, got {', '.join(rules.identity)}; use uniform or narrower-late."
        )


def _best_heads(shape: ModelShape, rules: DesignRules) -> tuple[tuple[HeadSpec, ...], str]:
    """The heads of one layer that minimise the error bound, and a sentence about the optimum."""
    assert rules.token_dim is not None
    best = allocate(
        shape.n_heads * shape.qk_dim,
        rules.token_dim,
        rules.kernel,
        heads_multiple=shape.queries,
        dims_multiple=rules.multiple_of,
    )
    heads: list[HeadSpec] = []
    for group in best.groups:
        head_dim = int(group.head_dim)
        spec = HeadSpec(qk_dim=head_dim, vo_dim=head_dim, queries=shape.queries)
        heads += [spec] * (group.heads // shape.queries)
    where = "at the corner head width = token width" if best.on_corner else "off the corner"
    vacuous = "; the bound is vacuous there (worse than predicting zero)" if best.vacuous else ""
    in_all = sum(group.heads for group in best.groups)
    return tuple(
        heads
    ), f"the bound's optimum {best.bound:.4g}, {in_all} heads, is {where}{vacuous}"


def _thinned(heads: tuple[HeadSpec, ...], share: float) -> tuple[HeadSpec, ...]:
    """About this share of the heads of each kind, at least one of each."""
    kept: list[HeadSpec] = []
    for head, run in itertools.groupby(heads):
        kept += [head] * max(1, round(share * len(list(run))))
    return tuple(kept)


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
    tie: Callable[[int, HeadSpec, Side], Hashable],
    weight: Callable[[int, Side], float],
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
                    values=weight(i, side) * _worth(width, rules.token_dim),
                    floor=width if whole else rules.floor(width),
                    multiple_of=rules.multiple_of,
                    tie=(side, i, j) if whole else tie(i, head, side),
                    only=rules.widths,
                )
    costs = WidthCosts(template, context, rules.batch, curves)
    widths = WidthSolver(costs, curves).solve(budget).of
    layers = []
    for i, layer in enumerate(template.layers):
        heads = tuple(
            head.model_copy(update={"qk_dim": widths[i, j, "qk"], "vo_dim": widths[i, j, "vo"]})
            for j, head in enumerate(layer.heads)
        )
        layers.append(layer.model_copy(update={"heads": heads}))
    return template.model_copy(update={"layers": tuple(layers), "origin": origin})


def _worth(width: int, tokens: int | Spectrum | None) -> Float[np.ndarray, " options"]:
    """Value of 0 … width directions, all of them worth 1: by the tokens' measured energy, or, where
    none was measured, falling like 1/i.
    """
    if isinstance(tokens, Spectrum):
        steps = np.cumsum(np.array([*tokens.eigenvalues, *[0.0] * width])[:width])
    else:
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
