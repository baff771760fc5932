"""LLM-Pruner (arXiv 2305.11627): coupled structures of the least first-order Taylor sum go.

    I = Σ |w · ∂loss/∂w|      over all weights that go together: a head group, a neuron

As its scripts for Llama do: block-wise, in every layer the same share, the first eighth and the
last sixteenth of the layers left alone. Where keys and values are shared, a group is one key/value
head with all its query heads, so the share of few groups that goes is rounded down to whole ones.
Where the next whole group would overshoot the budget, it stays and more neurons go.
"""

from __future__ import annotations

import math

import numpy as np

from headwise.baselines.heads import layer_params
from headwise.baselines.parts import Cut, Subject, kept_mlp, mlp_params
from headwise.errors import BudgetError
from headwise.models.backbones_headwise import Projection
from headwise.planning.fit import most_valuable
from headwise.planning.widths import largest_scale


def llm_pruner(subject: Subject, amount: int) -> Cut:
    """The least head groups and neurons removed, the same share in every layer that is cut."""

    def spent(heads: float, neurons: float) -> int:
        return sum(sum(counted(subject, i, heads, neurons)) for i in range(len(subject.dense)))

    share = largest_scale(lambda s: spent(s, s) <= amount, 1.0)
    if share is None:
        raise BudgetError(f"{amount} parameters are less than the layers left alone have.")
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
