"""FLAP (arXiv 2312.11983): what fluctuates least goes, and its mean becomes a bias.

    S_j = Var(x_j) · ‖W[:, j]‖²      x: what enters W_O or W_down
    Ŝ   = (S − mean) / std           over the inputs of one matrix; a head's is its mean

All query heads and neurons of the model are ranked by Ŝ, and the lowest go until the rest fits (a
head counts by its parameters). The output that the dropped inputs had on average, W·E[x], is added
as a bias, which is counted where the model had none. In grouped attention a key/value head goes
with its last query head.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float

from headwise.baselines.heads import layer_params
from headwise.baselines.parts import Cut, Subject, kept_mlp, mlp_params, neuron_params, shifted
from headwise.errors import BudgetError
from headwise.models.backbones_headwise import Projection

Alive = list[Bool[np.ndarray, " _"]]  # of every layer


def flap(subject: Subject, amount: int) -> Cut:
    """The heads and neurons that fluctuate least removed, until the blocks fit."""
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
        columns = _standardised(_fluctuation(subject, f"{i}.mixed", attention["output"]))
        ends = np.cumsum(_widths(subject, i))[:-1]
        heads.append(np.array([part.mean() for part in np.split(columns, ends)]))
        neurons.append(_standardised(_fluctuation(subject, f"{i}.neurons", mlp["down"])))
    return heads, neurons


def kept_units(subject: Subject, amount: int) -> tuple[Alive, Alive]:
    """Which query heads and neurons stay: the lowest go, then the best that still fit return."""
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
