"""From the profiles of small proxies to the plan of a larger model.

A proxy is a small dense model, wider in its attention and its MLPs than it needs, trained on the
text and at the context of the model to be designed. Its profile says what every direction of every
head and every neuron is worth. Per layer and side that is a curve over width as a share of d_model:

    worth │      ╭──────  layer 0 (depth 0)          a target layer at depth t takes the curves of
          │   ╭──╯  ╭───  layer 1 (depth ⅓)          its two neighbours, mixed by distance; one
          │╭──╯╭────╯                                solver spends the target's budget on all
          └┴───┴─────────── width ÷ d_model          layers' curves

MLPs are planned if a limit counts them; otherwise they have the shape's width.

The seeds show how much of it is chance: plans are fitted to all proxies but one and scored
on the one left out, against the uniform plan of the same budget (the same share of every head and
of every planned MLP). This is the gain of *cutting* the proxy, which need not be the gain of
training the target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from headwise.errors import BudgetError, PlanError
from headwise.plan import Budget, HeadSpec, LayerPlan, ModelShape, Origin, Plan
from headwise.planning.design import DesignRules, new_plan
from headwise.planning.fit import COUNT_MLPS, Worths
from headwise.planning.solver import Curve
from headwise.planning.widths import (
    Place,
    WidthCosts,
    WidthCurve,
    WidthSolver,
    largest_scale,
    mlp_place,
)

Side = Literal["qk", "vo", "ffn"]
HEAD_SIDES: tuple[Literal["qk", "vo"], ...] = ("qk", "vo")
CONFIDENCE = 0.95
HYPOTHESIS = (
    "proxy is a hypothesis: what loses least when a proxy is cut need not be what trains best; "
    "train uniform as well"
)


@dataclass(frozen=True, eq=False)
class ProxyCurves:
    """What one proxy's widths are worth, in nats: by side and layer, over width ÷ d_model."""

    reach: Mapping[Side, float]  # the proxy's own width ÷ d_model, at which the curves end
    # Of 0 … all dimensions of a head, or neurons.
    values: Mapping[Side, tuple[Float[np.ndarray, " options"], ...]]
    heads: tuple[float, ...]  # how many heads share the worth of each layer, in effect

    @property
    def n_layers(self) -> int:
        """Layers of the proxy."""
        return len(self.values["vo"])

    def at(
        self, side: Side, depth: float, widths: Float[np.ndarray, " widths"]
    ) -> Float[np.ndarray, " widths"]:
        """The worth of these widths ÷ d_model in a layer at a depth from 0 to 1."""
        place = depth * (self.n_layers - 1)
        low = min(int(place), max(0, self.n_layers - 2))
        parts = [self._layer(side, i, widths) for i in (low, min(low + 1, self.n_layers - 1))]
        share = place - low
        mixed: Float[np.ndarray, " widths"] = (1 - share) * parts[0] + share * parts[1]
        return mixed

    def _layer(
        self, side: Side, layer: int, widths: Float[np.ndarray, " widths"]
    ) -> Float[np.ndarray, " widths"]:
        values = self.values[side][layer]
        return np.asarray(np.interp(widths, np.linspace(0, self.reach[side], len(values)), values))


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence for a fitted plan over the seeds, against uniform at the same budget."""

    seeds: int
    gain: float  # predicted, in nats of the proxies, on seeds that the plan was not fitted to
    low: float | None  # of its interval; None for a single seed
    high: float | None
    wider: tuple[str, ...]  # layers and sides wider than uniform at every seed
    narrower: tuple[str, ...]
    heads: tuple[float, ...]  # heads in effect by the proxies' layers, mean over seeds

    @property
    def is_certain(self) -> bool:
        """Whether the gain lies above 0 by more than the seeds' spread."""
        return self.low is not None and self.low > 0

    def notes(self) -> tuple[str, ...]:
        """The evidence in sentences, for the plan."""
        interval = "no interval" if self.low is None else f"[{self.low:+.2g}, {self.high:+.2g}]"
        verdict = "" if self.is_certain else "; within the spread, so uniform may be as good"
        differ = [
            f"{' and '.join(places) or 'none'} {word}"
            for word, places in (("wider", self.wider), ("narrower", self.narrower))
        ]
        shared = ", ".join(f"{n:.1f}" for n in self.heads)
        return (
            f"predicted gain over uniform widths when proxies are cut: {self.gain:+.3g} nats "
            f"{interval} over {self.seeds} seeds, each left out in turn{verdict}",
            f"layers that differ from uniform at every seed: {'; '.join(differ)}",
            f"effective number of heads by proxy layer: {shared}",
            HYPOTHESIS,
        )


def proxy_curves(
    plan: Plan, worths: Worths, neurons: Sequence[Float[np.ndarray, " _"]] = ()
) -> ProxyCurves:
    """The curves of a profiled proxy: equal widths within a layer, the best directions first."""
    shape = plan.shape
    values: dict[Side, list[Float[np.ndarray, " options"]]] = {side: [] for side in HEAD_SIDES}
    heads = []
    for layer in worths:
        # A rotary plane is two dimensions, each worth half of it.
        pairs = [np.repeat(head.planes / 2, 2) for head in layer]
        qk = [np.concatenate([p, head.free]) for p, head in zip(pairs, layer, strict=True)]
        vo = [head.vo for head in layer]
        for side, parts in zip(HEAD_SIDES, (qk, vo), strict=True):
            values[side].append(_kept_worth(parts))
        each = np.array([q.sum() + v.sum() for q, v in zip(qk, vo, strict=True)], dtype=np.float64)
        heads.append(float(each.sum() ** 2 / np.square(each).sum()) if each.any() else 0.0)
    width = shape.n_heads * shape.qk_dim / shape.d_model
    reach: dict[Side, float] = dict.fromkeys(HEAD_SIDES, width)
    if neurons:
        reach["ffn"] = shape.ffn_dim / shape.d_model
        values["ffn"] = [_kept_worth([worth]) for worth in neurons]
    return ProxyCurves(reach, {side: tuple(rows) for side, rows in values.items()}, tuple(heads))


def _kept_worth(parts: Sequence[Float[np.ndarray, " n"]]) -> Float[np.ndarray, " options"]:
    """The predicted loss that the best 0, 1, … of every part keep away, all parts together."""
    steps = sum(np.sort(part.astype(np.float64))[::-1] for part in parts)
    return np.asarray(0.5 * np.concatenate([[0.0], np.cumsum(steps)]))


def plan_from_proxies(
    proxies: Sequence[ProxyCurves], shape: ModelShape, budget: Budget, rules: DesignRules
) -> tuple[Plan, Evidence]:
    """The plan of a shape under a budget, fitted to the proxies' mean curves, and its evidence."""
    if not proxies:
        raise PlanError("a design needs at least one proxy, got none; give at least one seed.")
    mlps = _plans_mlps(shape, budget)
    uniform = uniform_rival(shape, budget, rules)
    plan = _fitted(proxies, shape, budget, rules)
    gains = []
    for i, proxy in enumerate(proxies):
        others = [p for j, p in enumerate(proxies) if j != i] or [proxy]
        own = _fitted(others, shape, budget, rules)
        gains.append(_worth(proxy, own) - _worth(proxy, uniform))
    single = [_fitted([proxy], shape, budget, rules) for proxy in proxies]
    sides: tuple[Side, ...] = (*HEAD_SIDES, "ffn") if mlps else HEAD_SIDES
    wider, narrower = [], []
    for i in range(shape.n_layers):
        for side in sides:
            name = f"{i} {side}"
            base = _width(uniform, i, side)
            found = [_width(one, i, side) for one in single]
            wider += [name] if min(found) > base else []
            narrower += [name] if max(found) < base else []
    gain, low, high = _interval(gains)
    heads = tuple(np.mean([p.heads for p in proxies], axis=0).tolist())
    evidence = Evidence(len(proxies), gain, low, high, tuple(wider), tuple(narrower), heads)
    origin = Origin(policy="proxy", notes=evidence.notes())
    return plan.model_copy(update={"origin": origin}), evidence


def _plans_mlps(shape: ModelShape, budget: Budget) -> bool:
    """Whether MLP widths are planned: there are MLPs, and a limit counts them."""
    return bool(shape.ffn_dim) and any(resource in COUNT_MLPS for resource in budget.limited)


def uniform_rival(shape: ModelShape, budget: Budget, rules: DesignRules) -> Plan:
    """The plan to beat: the same share of every head and planned MLP, then MLPs as wide as fits."""
    if not _plans_mlps(shape, budget):
        return new_plan(shape, budget, "uniform", rules)
    dense, step = Plan.uniform(shape), rules.ffn_multiple_of
    whole = dense.layers[0].heads[0]

    def part(width: int, share: float, *, floor: int, **grid: Any) -> int:
        units = Curve(np.zeros(width + 1), (), floor=floor, **grid).allowed()
        below = units[units <= share * width + 1e-9]
        return int(below[-1] if len(below) else units[0])

    def at(heads: float, neurons: float) -> Plan:
        grid = {"multiple_of": rules.multiple_of, "only": rules.widths}
        floor = rules.floor(shape.qk_dim)
        qk, vo = (part(w, heads, floor=floor, **grid) for w in (whole.qk_dim, whole.vo_dim))
        head = whole.model_copy(update={"qk_dim": qk, "vo_dim": vo})
        ffn_dim = part(shape.ffn_dim, neurons, floor=min(step, shape.ffn_dim), multiple_of=step)
        change = {"heads": (head,) * shape.n_kv_heads, "ffn_dim": ffn_dim}
        layer = dense.layers[0].model_copy(update=change)
        return dense.model_copy(update={"layers": (layer,) * shape.n_layers})

    share = largest_scale(lambda s: rules.allows(at(s, s), budget), 1.0)
    if share is None:
        raise BudgetError(
            f"{budget} is less than the narrowest heads and MLPs cost; raise the budget, or lower "
            "--multiple-of or --ffn-multiple-of."
        )
    wider = largest_scale(lambda s: rules.allows(at(share, s), budget), 1.0)
    return at(share, share if wider is None else wider)


def _fitted(
    proxies: Sequence[ProxyCurves], shape: ModelShape, budget: Budget, rules: DesignRules
) -> Plan:
    """The plan that keeps most of the proxies' mean worth; equal widths within a layer."""
    most = _widest(proxies, shape, "qk", rules.multiple_of)
    head = HeadSpec(qk_dim=most, vo_dim=most, queries=shape.queries)
    layer = LayerPlan(heads=(head,) * shape.n_kv_heads, biases=shape.attention_biases)
    mlps = _plans_mlps(shape, budget)
    if mlps:
        widest = _widest(proxies, shape, "ffn", rules.ffn_multiple_of)
        layer = layer.model_copy(update={"ffn_dim": widest})
    template = Plan(shape=shape, layers=(layer,) * shape.n_layers)
    curves: dict[Place, WidthCurve] = {}
    for i in range(shape.n_layers):
        for side in HEAD_SIDES:
            values = _mean_worth(proxies, shape, i, side, np.arange(most + 1))
            for j in range(shape.n_kv_heads):
                curves[i, j, side] = WidthCurve(
                    values=values / shape.n_kv_heads,
                    floor=rules.floor(most),
                    multiple_of=rules.multiple_of,
                    tie=(
                        None if rules.one_width else i,
                        None if rules.equal_sides else side,
                    ),
                    only=rules.widths,
                )
        if mlps:
            curves[mlp_place(i)] = WidthCurve(
                values=_mean_worth(proxies, shape, i, "ffn", np.arange(widest + 1)),
                floor=min(rules.ffn_multiple_of, widest),
                multiple_of=rules.ffn_multiple_of,
                tie="ffn" if rules.one_width else None,
            )
    context = rules.context or shape.context
    costs = WidthCosts(template, context, rules.batch, curves)
    widths = WidthSolver(costs, curves).solve(budget).of
    layers = []
    for i, layer in enumerate(template.layers):
        change = {f"{side}_dim": widths[i, 0, side] for side in HEAD_SIDES}
        heads = (head.model_copy(update=change),) * shape.n_kv_heads
        ffn_dim = widths.get(mlp_place(i), layer.ffn_dim)
        layers.append(layer.model_copy(update={"heads": heads, "ffn_dim": ffn_dim}))
    return template.model_copy(update={"layers": tuple(layers)})


def _widest(proxies: Sequence[ProxyCurves], shape: ModelShape, side: Side, multiple: int) -> int:
    """As wide as the narrowest proxy knows, and at least the uniform width."""
    reach = min(proxy.reach[side] for proxy in proxies) / _share_of_one(shape, side)
    uniform = shape.ffn_dim if side == "ffn" else shape.qk_dim
    return max(uniform, int(reach + 1e-9) // multiple * multiple)


def _mean_worth(
    proxies: Sequence[ProxyCurves],
    shape: ModelShape,
    layer: int,
    side: Side,
    widths: Int[np.ndarray, " widths"],
) -> Float[np.ndarray, " widths"]:
    shares = widths * _share_of_one(shape, side)
    return np.asarray(np.mean([p.at(side, _depth(layer, shape), shares) for p in proxies], axis=0))


def _share_of_one(shape: ModelShape, side: Side) -> float:
    """What one more dimension of every head, or one neuron, is of d_model."""
    return (1 if side == "ffn" else shape.n_heads) / shape.d_model


def _worth(proxy: ProxyCurves, plan: Plan) -> float:
    """How much of a proxy's worth a plan keeps, as if the proxy had the plan's layers."""
    shape, total = plan.shape, 0.0
    for i in range(shape.n_layers):
        for side in proxy.values:
            width = np.array([_width(plan, i, side)])
            total += float(_mean_worth([proxy], shape, i, side, width)[0])
    return total * proxy.n_layers / shape.n_layers


def _width(plan: Plan, layer: int, side: Side) -> int:
    if side == "ffn":
        return plan.ffn_dims[layer]
    return int(getattr(plan.layers[layer].heads[0], f"{side}_dim"))


def _depth(layer: int, shape: ModelShape) -> float:
    return layer / max(1, shape.n_layers - 1)


def _interval(gains: Sequence[float]) -> tuple[float, float | None, float | None]:
    """The mean and its Student interval."""
    import scipy.stats

    mean = math.fsum(gains) / len(gains)
    if len(gains) == 1:
        return mean, None, None
    spread = float(np.std(gains, ddof=1)) / math.sqrt(len(gains))
    reach = float(scipy.stats.t.ppf(0.5 + CONFIDENCE / 2, len(gains) - 1)) * spread
    return mean, mean - reach, mean + reach
