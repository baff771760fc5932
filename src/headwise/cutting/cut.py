"""One layer cut to a plan: directions and neurons are kept and folded, with no extra product.

    values    z ≈ z·E·D        W_V ← Eᵀ·W_V      W_O ← W_O·Dᵀ        (E, D: kept columns, kept rows)
    scores    planes kept as they are; position-free columns q·E_q, k·E_k

One W_V serves all query heads of a group, so they share E and D. The dropped part of z has a mean;
where the layer has an output bias, that mean moves into it, which treats value biases exactly
(the rows of an attention matrix sum to 1). A head group that the plan drops leaves just that mean.
An MLP keeps its most sensitive neurons; the mean of the others also goes into its output bias.
One that always fires with a kept one may be added to it (`merging.py`).
Groups are in the plan's order. Computed in float64; what is not cut does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from headwise.cutting.merging import Merging
from headwise.models.attention_headwise import SIDES
from headwise.models.backbones_headwise import Projection, Projections
from headwise.models.slicing import kept_neurons as narrow_mlp
from headwise.models.slicing import qk_columns
from headwise.plan import Plan
from headwise.planning.fit import Kept
from headwise.profiling.format import Profile
from headwise.profiling.worth import kept_directions, kept_neurons


def cut_projections(profile: Profile, plan: Plan, layer: int, stock: Projections) -> Projections:
    """The four projections of one layer, cut to `plan` along the profile's directions."""
    dense = profile.plan.layers[layer]
    whole = stock.map(torch.Tensor.double)
    W_O, b_O = whole["output"].weight, whole["output"].bias
    made: list[_CutGroup] = []
    ends = dict.fromkeys(SIDES, 0)
    lost_mean = torch.zeros(len(W_O), dtype=torch.float64)
    for j, head in enumerate(dense.heads):
        maps = _maps(profile, plan, layer, j)
        rows: dict[str, list[Projection]] = {side: [] for side in ("query", "key", "value")}
        columns: list[torch.Tensor] = []
        lengths = {"query": head.qk_dim, "key": head.qk_dim, "value": head.vo_dim}
        for side, width in lengths.items():
            for _ in range(head.queries if side == "query" else 1):
                mine = slice(ends[side], ends[side] + width)
                ends[side] += width
                rows[side].append(_mapped(whole[side], mine, maps[side]))
        for g in range(head.queries):
            part = W_O[:, ends["output"] : ends["output"] + head.vo_dim]
            ends["output"] += head.vo_dim
            columns.append(part @ maps["decode"].T)
            if profile.record.centred:
                mean = _mean(profile, layer, j, g)
                kept = maps["decode"].T @ (maps["value"] @ mean)
                lost_mean += part @ (mean - kept)
        made.append(_CutGroup(rows, columns))
    kept_groups = [made[source] for source in plan.layers[layer].sources]
    sides = {}
    if kept_groups:
        for side in ("query", "key", "value"):
            sides[side] = _joined([p for group in kept_groups for p in group.rows[side]])
    output = [column for group in kept_groups for column in group.columns]
    sides["output"] = Projection(
        torch.cat(output, 1) if output else W_O[:, :0], None if b_O is None else b_O + lost_mean
    )
    return Projections({side: p.to(stock[side].weight.dtype) for side, p in sides.items()})


def cut_mlp(
    profile: Profile, plan: Plan, layer: int, stock: Projections, merging: Merging | None = None
) -> Projections:
    """The projections of one layer's MLP with the neurons that `plan` keeps.

    A `merging` says which instead, and for which others they stand.
    """
    made_of = merging or Merging(tuple(kept_neurons(profile, plan, layer)))
    kept, merged, into = list(made_of.kept), list(made_of.merged), list(made_of.into)
    made = narrow_mlp(stock, kept)
    down, W = stock["down"], stock["down"].weight.double()
    factor = torch.tensor(made_of.factor, dtype=torch.float64)
    weight = made["down"].weight
    if merged:
        added = W[:, merged] * factor
        weight = weight.double().index_add(1, torch.tensor(into), added).to(weight.dtype)
    bias = down.bias
    if bias is not None and len(kept) < W.shape[1]:
        lost = torch.from_numpy(profile.get(layer, "ffn_mean"))
        means = lost[kept]
        lost[kept] = 0.0
        lost[merged] -= factor * means[into]
        bias = (bias.double() + W @ lost).to(bias.dtype)
    return made.replaced(down=Projection(weight, bias))


@dataclass(frozen=True, slots=True)
class _CutGroup:
    """One head group: the rows of its projections, and its columns of the output matrix."""

    rows: dict[str, list[Projection]]
    columns: list[torch.Tensor]


def _mapped(whole: Projection, rows: slice, by: torch.Tensor) -> Projection:
    """Some rows of a projection, multiplied from the left."""
    return whole.map(lambda t: by @ t[rows])


def _joined(parts: list[Projection]) -> Projection:
    """The rows of some projections, one upon the other."""
    biases = [p.bias for p in parts if p.bias is not None]
    return Projection(torch.cat([p.weight for p in parts]), torch.cat(biases) if biases else None)


def _maps(profile: Profile, plan: Plan, layer: int, head: int) -> dict[str, torch.Tensor]:
    """What the rows of each projection of one head group are multiplied with, (kept, full)."""
    kept = kept_directions(profile, plan, layer, head)
    spec = profile.plan.layers[layer].heads[head]
    encode, decode = profile.value_directions(layer, head)
    vo = list(kept.vo)
    query, key = _score_maps(profile, layer, head, kept)
    made = {"query": query, "key": key, "value": encode[:, vo].T, "decode": decode[vo]}
    if len(vo) == spec.vo_dim:  # whole: no basis is changed, nothing is rounded
        made |= {"value": np.eye(spec.vo_dim), "decode": np.eye(spec.vo_dim)}
    return {name: torch.from_numpy(np.ascontiguousarray(m)) for name, m in made.items()}


def _score_maps(
    profile: Profile, layer: int, head: int, kept: Kept
) -> tuple[np.ndarray, np.ndarray]:
    spec, free = profile.plan.layers[layer].heads[head], list(kept.free)
    rotary = 2 * len(spec.rotary_planes or ())
    columns = qk_columns(spec, Kept(planes=kept.planes, free=(), vo=()))
    selection = np.eye(spec.qk_dim)[columns]
    n_free = spec.qk_dim - rotary
    if not n_free:
        return selection, selection
    if len(free) == n_free:
        encode_q = encode_k = np.eye(n_free)
    else:
        encode_q, encode_k = profile.score_directions(layer, head)
    sides = []
    for encode in (encode_q, encode_k):
        block = np.zeros((len(free), spec.qk_dim))
        block[:, rotary:] = encode[:, free].T
        sides.append(np.vstack([selection, block]))
    return sides[0], sides[1]


def _mean(profile: Profile, layer: int, head: int, query: int) -> torch.Tensor:
    """The mean of z of one query head of a group."""
    heads = profile.plan.layers[layer].heads
    first = sum(h.queries for h in heads[:head])
    return torch.from_numpy(
        profile.get(layer, "z_mean").reshape(-1, heads[head].vo_dim)[first + query]
    )
