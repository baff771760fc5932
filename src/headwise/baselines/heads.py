"""Head pruning by gradients (Michel et al. 2019, arXiv 1905.10650).

    I_h = E_x |∂L(x)/∂ξ_h|        ξ_h: a gate on the output of query head h
    scores are divided by √(Σ I_h²) of their layer, and the lowest heads of the model go

In grouped attention a query head takes its columns of W_O and its rows of W_Q with it; the
key/value head goes with its last query head. What is left of the budget brings back the best heads
that fit.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float

from headwise.baselines.parts import Cut, Group, Subject, groups_of, joined
from headwise.errors import BudgetError
from headwise.plan import LayerPlan

Alive = list[Bool[np.ndarray, " heads"]]  # of every layer


def head_pruning(subject: Subject, amount: int) -> Cut:
    """The query heads of the least gradient removed until the rest fits."""
    plan = subject.profile.plan
    scores = [head_scores(subject.measured[f"{i}.gates"]) for i in range(len(plan.layers))]
    alive = kept_heads(subject, scores, amount)
    layers = []
    for layer, weights, heads in zip(plan.layers, subject.dense, alive, strict=True):
        groups, first = [], 0
        for group in groups_of(layer, weights):
            mine = heads[first : first + len(group.output)]
            first += len(mine)
            groups.append(_gated(group, mine))
        layers.append(weights if heads.all() else joined(groups, weights))
    return Cut(tuple(layers), _counted(subject, alive))


def head_scores(gates: Float[np.ndarray, "sequences heads"]) -> Float[np.ndarray, " heads"]:
    """Mean |∂L/∂gate| of every query head of a layer, as a share of the layer's norm."""
    importance = np.abs(gates).mean(0)
    norm = float(np.linalg.norm(importance))
    return np.asarray(importance / norm if norm > 0 else importance)


def kept_heads(
    subject: Subject, scores: list[Float[np.ndarray, " heads"]], amount: int
) -> list[Bool[np.ndarray, " heads"]]:
    """Which query heads stay: the lowest go first, then the best that still fit come back."""
    layers = subject.profile.plan.layers
    alive = [np.ones(len(s), dtype=bool) for s in scores]
    costs = [layer_params(subject, i, a) for i, a in enumerate(alive)]
    order = sorted((float(s[h]), i, h) for i, s in enumerate(scores) for h in range(len(s)))
    gone: list[tuple[int, int]] = []
    for _, i, h in order:
        if sum(costs) <= amount:
            break
        alive[i][h] = False
        costs[i] = layer_params(subject, i, alive[i])
        gone.append((i, h))
    if sum(costs) > amount:
        raise BudgetError(
            f"without any head {sum(costs)} attention parameters are left in {len(layers)} layers, "
            f"more than {amount}."
        )
    for i, h in reversed(gone):
        alive[i][h] = True
        whole = layer_params(subject, i, alive[i])
        if sum(costs) - costs[i] + whole <= amount:
            costs[i] = whole
        else:
            alive[i][h] = False
    return alive


def layer_params(subject: Subject, index: int, alive: Bool[np.ndarray, " heads"]) -> int:
    """Attention parameters of a layer in which only some query heads are left."""
    layer: LayerPlan = subject.profile.plan.layers[index]
    dense, d = subject.dense[index], subject.profile.plan.shape.d_model
    rows = dict.fromkeys(("query", "key", "value", "output"), 0)
    first = 0
    for head in layer.heads:
        left = int(alive[first : first + head.queries].sum())
        first += head.queries
        whole = subject.tied_queries  # their common norm sees the rows of heads without output too
        rows["query"] += head.qk_dim * (head.queries if whole else left)
        rows["key"] += head.qk_dim * (left > 0 or whole)
        rows["value"] += head.vo_dim * (left > 0)
        rows["output"] += head.vo_dim * left
    bias = sum(rows[side] for side in ("query", "key", "value") if dense.has_bias(side))
    return d * sum(rows.values()) + bias + (d if dense.has_bias("output") else 0)


def _counted(subject: Subject, alive: Alive) -> int:
    return sum(layer_params(subject, i, a) for i, a in enumerate(alive))


def _gated(group: Group, alive: Bool[np.ndarray, " queries"]) -> Group:
    """A head whose output is not read is as good as gone."""
    return replace(group, output=group.output * alive[:, None, None])
