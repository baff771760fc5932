"""Methods that prune whole heads and neurons: by gradients, FLAP and LLM-Pruner.

Head pruning by gradients (Michel et al. 2019, arXiv 1905.10650).

    I_h = E_x |∂L(x)/∂ξ_h|        ξ_h: a gate on the output of query head h
    scores are divided by √(Σ I_h²) of their layer, and the lowest heads of the model go

In grouped attention, removing a query head removes its columns of W_O and its rows of W_Q; the
key/value head is removed with its last query head. The rest of the budget brings back the best
heads that fit.

FLAP (arXiv 2312.11983): what fluctuates least is removed, and its mean becomes a bias.

    S_j = Var(x_j) · ‖W[:, j]‖²      x: what enters W_down
    S_j = (Var(x_j) · ‖W[:, j]‖²)²   x: what enters W_O
    Ŝ   = (S − mean) / std           over the inputs of one matrix; a head's is its mean

The second square is not in the paper, but in the program that its figures were made with
(`prune_flap` of CASIA-IVA-Lab/FLAP).

All query heads and neurons of the model are ranked by Ŝ, and the lowest are removed until the rest
fits (a head counts by its parameters). The mean output of the dropped inputs, W·E[x], is added
as a bias, which is counted where the model had none. In grouped attention a key/value head is
removed with its last query head.

LLM-Pruner (arXiv 2305.11627): removes the coupled structures with the smallest first-order Taylor
sum.

    I = Σ |w · ∂loss/∂w|      over the weights of a structure: a head group, a neuron

As in its scripts for Llama: block-wise, the same share in every layer, the first eighth and the
last sixteenth of the layers not cut. Where keys and values are shared, a group is one key/value
head with all its query heads, so the number of removed groups is rounded down.
Where the next whole group would overshoot the budget, it is kept and more neurons are removed.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float

from headwise.baselines.parts import (
    Cut,
    Group,
    Subject,
    groups_of,
    joined,
    kept_mlp,
    mlp_params,
    neuron_params,
    shifted,
)
from headwise.errors import BudgetError
from headwise.models.backbones_headwise import Projection
from headwise.plan import LayerPlan
from headwise.planning.fit import most_valuable
from headwise.planning.widths import largest_scale

Alive = list[Bool[np.ndarray, " _"]]  # heads or neurons of every layer


def head_pruning(subject: Subject, amount: int) -> Cut:
    """Remove the query heads with the smallest gradients until the rest fits."""
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
    """The query heads to keep: remove the lowest first, then bring back the best that fit."""
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
            f"even without heads {len(layers)} layers have {sum(costs)} attention parameters, more "
            f"than {amount}."
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
    """The group with the outputs of removed heads set to zero."""
    return replace(group, output=group.output * alive[:, None, None])


def flap(subject: Subject, amount: int) -> Cut:
    """Remove the heads and neurons that fluctuate least until the blocks fit."""
    heads, neurons = kept_units(subject, amount)
    layers, mlps = [], []
    for i, (attention, mlp) in enumerate(zip(subject.dense, subject.mlps, strict=True)):
        columns = np.concatenate(
            [np.full(w, alive) for w, alive in zip(_widths(subject, i), heads[i], strict=True)]
        )
        output = attention["output"]
        if not columns.all():
            shift = _lost_mean(output, subject.measured[f"{i}.mixed_mean"], columns)
            stays = torch.from_numpy(columns).to(output.weight.dtype)
            output = shifted(Projection(output.weight * stays, output.bias), shift)
        layers.append(attention.replaced(output=output))
        if neurons[i].all():
            mlps.append(mlp)
            continue
        shift = _lost_mean(mlp["down"], subject.measured[f"{i}.neurons_mean"], neurons[i])
        mlps.append(kept_mlp(mlp, np.flatnonzero(neurons[i]).tolist(), shift))
    costs = [_costs(subject, i, h, n) for i, (h, n) in enumerate(zip(heads, neurons, strict=True))]
    attn_params, ffn_params = (sum(c) for c in zip(*costs, strict=True))
    return Cut(tuple(layers), attn_params, tuple(mlps), ffn_params)


def scores(subject: Subject) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The standardised fluctuation of every query head and of every neuron, layer by layer."""
    heads, neurons = [], []
    for i, (attention, mlp) in enumerate(zip(subject.dense, subject.mlps, strict=True)):
        columns = np.square(_fluctuation(subject, f"{i}.mixed", attention["output"]))
        ends = np.cumsum(_widths(subject, i))[:-1]
        heads.append(np.array([part.mean() for part in np.split(_standardised(columns), ends)]))
        neurons.append(_standardised(_fluctuation(subject, f"{i}.neurons", mlp["down"])))
    return heads, neurons


def kept_units(subject: Subject, amount: int) -> tuple[Alive, Alive]:
    """The heads and neurons to keep: remove the lowest, then bring back the best that fit."""
    by_head, by_neuron = scores(subject)
    heads = [np.ones(len(s), dtype=bool) for s in by_head]
    neurons = [np.ones(len(s), dtype=bool) for s in by_neuron]
    order = [(float(x), 0, i, j) for i, s in enumerate(by_head) for j, x in enumerate(s)]
    order += [(float(x), 1, i, j) for i, s in enumerate(by_neuron) for j, x in enumerate(s)]
    total = sum(sum(_costs(subject, i, heads[i], neurons[i])) for i in range(len(heads)))
    sides, gone = (heads, neurons), []
    for _, side, i, j in sorted(order):
        if total <= amount:
            break
        total += _change(subject, sides, side, i, j)
        gone.append((side, i, j))
    if total > amount:
        raise BudgetError(f"{amount} parameters are fewer than the blocks' biases: {total}.")
    for side, i, j in reversed(gone):
        more = _change(subject, sides, side, i, j)
        if total + more <= amount:
            total += more
        else:
            _change(subject, sides, side, i, j)
    return heads, neurons


def _change(subject: Subject, sides: tuple[Alive, Alive], side: int, i: int, j: int) -> int:
    """Take one unit away, or bring it back; the change of the parameters."""
    alive, mlp = sides[side][i], subject.mlps[i]
    whole = alive.all()
    before = 0 if side else sum(_costs(subject, i, sides[0][i], sides[1][i]))
    alive[j] = not alive[j]
    if not side:
        return sum(_costs(subject, i, sides[0][i], sides[1][i])) - before
    new_bias = 0 if mlp.has_bias("down") else len(mlp["down"].weight)
    change = neuron_params(mlp) if alive[j] else -neuron_params(mlp)
    return change + new_bias * (int(whole) - int(alive.all()))


def _costs(
    subject: Subject, i: int, heads: Bool[np.ndarray, " h"], neurons: Bool[np.ndarray, " n"]
) -> tuple[int, int]:
    """Parameters of a layer's attention and MLP, with the biases that means became."""
    attention, mlp = subject.dense[i], subject.mlps[i]
    d = len(mlp["down"].weight)
    return (
        layer_params(subject, i, heads)
        + d * (not heads.all() and not attention.has_bias("output")),
        mlp_params(mlp, int(neurons.sum())) + d * (not neurons.all() and not mlp.has_bias("down")),
    )


def _widths(subject: Subject, i: int) -> list[int]:
    """The columns of W_O of every query head."""
    return [h.vo_dim for h in subject.profile.plan.layers[i].heads for _ in range(h.queries)]


def _fluctuation(
    subject: Subject, name: str, projection: Projection
) -> Float[np.ndarray, " inputs"]:
    squares = projection.weight.double().square().sum(0).numpy()
    return np.asarray(subject.measured[f"{name}_variance"] * squares)


def _standardised(x: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    spread = float(x.std(ddof=1)) if len(x) > 1 else 0.0
    return np.asarray((x - x.mean()) / spread if spread > 0 else x - x.mean())


def _lost_mean(
    projection: Projection, mean: Float[np.ndarray, " inputs"], alive: Bool[np.ndarray, " inputs"]
) -> Float[np.ndarray, " outputs"]:
    return np.asarray(projection.weight.double().numpy() @ np.where(alive, 0.0, mean))


def llm_pruner(subject: Subject, amount: int) -> Cut:
    """Remove the lowest head groups and neurons, the same share in every layer that is cut."""

    def spent(heads: float, neurons: float) -> int:
        return sum(sum(counted(subject, i, heads, neurons)) for i in range(len(subject.dense)))

    share = largest_scale(lambda s: spent(s, s) <= amount, 1.0)
    if share is None:
        raise BudgetError(f"{amount} parameters are fewer than the layers that stay whole have.")
    heads = min(1.0, share + 1e-6)  # on the near side of a whole group
    neurons = largest_scale(lambda s: spent(heads, s) <= amount, 1.0)
    if neurons is None:
        heads = neurons = share
    layers, mlps = [], []
    for i, (attention, mlp) in enumerate(zip(subject.dense, subject.mlps, strict=True)):
        groups, kept = _kept(subject, i, heads, neurons)
        alive = _query_heads(subject, i, groups)
        if not alive.all():
            specs = subject.profile.plan.layers[i].heads
            widths = [h.vo_dim for h in specs for _ in range(h.queries)]
            W_O, bias = attention["output"].weight, attention["output"].bias
            stays = W_O.new_tensor(np.repeat(alive, widths).astype(np.float64))
            layers.append(attention.replaced(output=Projection(W_O * stays, bias)))
        else:
            layers.append(attention)
        whole = len(kept) == mlp["down"].weight.shape[1]
        mlps.append(mlp if whole else kept_mlp(mlp, kept))
    costs = [counted(subject, i, heads, neurons) for i in range(len(layers))]
    attn_params, ffn_params = (sum(c) for c in zip(*costs, strict=True))
    return Cut(tuple(layers), attn_params, tuple(mlps), ffn_params)


def cut_layers(n_layers: int) -> range:
    """The layers that are cut: in a model of 32 the paper leaves 4 in front and 2 at the end."""
    return range(round(n_layers / 8), n_layers - round(n_layers / 16))


def counted(subject: Subject, i: int, heads: float, neurons: float) -> tuple[int, int]:
    """Parameters of a layer's attention and MLP at these shares."""
    groups, kept = _kept(subject, i, heads, neurons)
    alive = _query_heads(subject, i, groups)
    return layer_params(subject, i, alive), mlp_params(subject.mlps[i], len(kept))


def _kept(subject: Subject, i: int, heads: float, neurons: float) -> tuple[list[int], list[int]]:
    """The head groups and neurons that a layer keeps; the share that goes is rounded down."""
    if i not in cut_layers(len(subject.dense)):
        heads = neurons = 1.0

    def kept(kind: str, share: float) -> list[int]:
        worth = subject.measured[f"{i}.{kind}"]
        gone = math.floor((1.0 - share) * len(worth) + 1e-9)
        return most_valuable(worth, len(worth) - gone)

    return kept("taylor_heads", heads), kept("taylor_neurons", neurons)


def _query_heads(subject: Subject, i: int, groups: list[int]) -> np.ndarray:
    heads = subject.profile.plan.layers[i].heads
    return np.concatenate([np.full(head.queries, j in groups) for j, head in enumerate(heads)])
