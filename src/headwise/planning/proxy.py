"""From the profiles of small proxies to the plan of a larger model.

A proxy is a small dense model, wider in its attention than it needs, trained on the text and at the
context of the model to be designed. Its profile says what every direction of every head is worth.
Per layer and side that is a curve over the layer's width as a share of d_model:

    worth │      ╭──────  layer 0 (depth 0)          a target layer at depth t takes the curves of
          │   ╭──╯  ╭───  layer 1 (depth ⅓)          its two neighbours, mixed by distance; one
          │╭──╯╭────╯                                solver spends the target's budget on all
          └┴───┴─────────── width ÷ d_model          layers' curves

How much of it is chance is asked of the seeds: plans are fitted to all proxies but one and scored
on the one left out, beside the uniform plan of the same budget. The gain is one of *cutting* the
proxy, which need not be one of training the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from headwise.errors import PlanError
from headwise.plan import Budget, HeadSpec, LayerPlan, ModelShape, Origin, Plan
from headwise.planning.cost import SIDES, Side
from headwise.planning.design import DesignRules, new_plan
from headwise.planning.fit import Worths
from headwise.planning.widths import Place, WidthCosts, WidthCurve, WidthSolver

CONFIDENCE = 0.95
HYPOTHESIS = (
    "proxy is a hypothesis: what loses least when a proxy is cut need not be what trains best; "
    "train it beside uniform"
)


@dataclass(frozen=True, eq=False)
class ProxyCurves:
    """What one proxy's widths are worth, in nats: by side and layer, over width ÷ d_model."""

    reach: float  # the proxy's own width ÷ d_model, at which the curves end
    values: dict[Side, tuple[Float[np.ndarray, " options"], ...]]  # of 0 … all dimensions of a head
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
        return np.asarray(np.interp(widths, np.linspace(0, self.reach, len(values)), values))


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the seeds say about a fitted plan, against the uniform one of the same budget."""

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
        verdict = "" if self.is_certain else "; not beyond the seeds' spread, so uniform may do"
        differ = [
            f"{' and '.join(places) or 'none'} {word}"
            for word, places in (("wider", self.wider), ("narrower", self.narrower))
        ]
        shared = ", ".join(f"{n:.1f}" for n in self.heads)
        return (
            f"predicted gain over uniform widths when proxies are cut: {self.gain:+.3g} nats "
            f"{interval} over {self.seeds} seeds, each left out in turn{verdict}",
            f"layers that differ from uniform at every seed: {'; '.join(differ)}",
            f"heads in effect by the proxies' layers: {shared}",
            HYPOTHESIS,
        )


def proxy_curves(plan: Plan, worths: Worths) -> ProxyCurves:
    """The curves of a profiled proxy: equal widths within a layer, the best directions first."""
    shape = plan.shape
    values: dict[Side, list[Float[np.ndarray, " options"]]] = {side: [] for side in SIDES}
    heads = []
    for layer in worths:
        # A rotary plane is two dimensions, each worth half of it.
        pairs = [np.repeat(head.planes / 2, 2) for head in layer]
        qk = [np.concatenate([p, head.free]) for p, head in zip(pairs, layer, strict=True)]
        vo = [head.vo for head in layer]
        for side, parts in zip(SIDES, (qk, vo), strict=True):
            steps = sum(np.sort(part.astype(np.float64))[::-1] for part in parts)
            values[side].append(0.5 * np.concatenate([[0.0], np.cumsum(steps)]))
        each = np.array([q.sum() + v.sum() for q, v in zip(qk, vo, strict=True)], dtype=np.float64)
        heads.append(float(each.sum() ** 2 / np.square(each).sum()) if each.any() else 0.0)
    reach = shape.n_heads * shape.qk_dim / shape.d_model
    return ProxyCurves(reach, {side: tuple(rows) for side, rows in values.items()}, tuple(heads))


def plan_from_proxies(
    proxies: Sequence[ProxyCurves], shape: ModelShape, budget: Budget, rules: DesignRules
) -> tuple[Plan, Evidence]:
    """The plan of a shape under a budget, fitted to the proxies' mean curves, and its evidence."""
    if not proxies:
        raise PlanError("a design needs at least one proxy, got none; give at least one seed.")
    uniform = new_plan(shape, budget, "uniform", rules)
    plan = _fitted(proxies, shape, budget, rules)
    gains = []
    for i, proxy in enumerate(proxies):
        others = [p for j, p in enumerate(proxies) if j != i] or [proxy]
        own = _fitted(others, shape, budget, rules)
        gains.append(_worth(proxy, own) - _worth(proxy, uniform))
    single = [_fitted([proxy], shape, budget, rules) for proxy in proxies]
    wider, narrower = [], []
    for i in range(shape.n_layers):
        for side in SIDES:
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


def _fitted(
    proxies: Sequence[ProxyCurves], shape: ModelShape, budget: Budget, rules: DesignRules
) -> Plan:
    """The plan that keeps most of the proxies' mean worth; equal widths within a layer."""
    # As wide as the narrowest proxy knows, and at least the uniform width.
    reach = min(p.reach for p in proxies) * shape.d_model / shape.n_heads
    most = max(shape.qk_dim, int(reach) // rules.multiple_of * rules.multiple_of)
    head = HeadSpec(qk_dim=most, vo_dim=most, queries=shape.queries)
    layer = LayerPlan(heads=(head,) * shape.n_kv_heads, biases=shape.attention_biases)
    template = Plan(shape=shape, layers=(layer,) * shape.n_layers)
    shares = np.arange(most + 1) * shape.n_heads / shape.d_model
    curves: dict[Place, WidthCurve] = {}
    for i in range(shape.n_layers):
        depth = _depth(i, shape)
        for side in SIDES:
            values = np.mean([p.at(side, depth, shares) for p in proxies], axis=0)
            for j in range(shape.n_kv_heads):
                curves[i, j, side] = WidthCurve(
                    values=values / shape.n_kv_heads,
                    floor=rules.floor(most),
                    multiple_of=rules.multiple_of,
                    tie=(i, side),
                )
    context = rules.context or shape.context
    costs = WidthCosts(template, context, rules.batch, curves)
    widths = WidthSolver(costs, curves).solve(budget).of
    layers = tuple(
        layer.model_copy(
            update={
                "heads": (
                    head.model_copy(
                        update={"qk_dim": widths[i, 0, "qk"], "vo_dim": widths[i, 0, "vo"]}
                    ),
                )
                * shape.n_kv_heads
            }
        )
        for i in range(shape.n_layers)
    )
    return template.model_copy(update={"layers": layers})


def _worth(proxy: ProxyCurves, plan: Plan) -> float:
    """What a plan keeps of a proxy's worth, as if the proxy had the plan's layers."""
    shape, total = plan.shape, 0.0
    for i in range(shape.n_layers):
        for side in SIDES:
            share = np.array([_width(plan, i, side) * shape.n_heads / shape.d_model])
            total += float(proxy.at(side, _depth(i, shape), share)[0])
    return total * proxy.n_layers / shape.n_layers


def _width(plan: Plan, layer: int, side: Side) -> int:
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
