"""A ragged model made by keeping some columns of every head and some neurons of every MLP.

Dropping a column or neuron is the same as setting it to zero: the scores and outputs of the kept
columns do not change. So a model whose dropped columns and neurons are zero computes the same
function as its slice.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch
from transformers.initialization import no_init_weights

from headwise.models.attention_headwise import NORMS, PROJECTIONS, HeadwiseAttention
from headwise.models.backbones_headwise import (
    Projection,
    Projections,
    family_of,
    layer_mlp,
    projections_of,
    stock_attentions,
)
from headwise.models.build import inner, load_around, load_projections, plan_of
from headwise.models.configuration_headwise import HeadwiseConfig
from headwise.models.modeling_headwise import HeadwisePreTrainedModel
from headwise.models.norms_headwise import KeptNorm, epsilon
from headwise.models.shapes import plan_errors
from headwise.plan import PLAN_FORMAT, HeadSpec, LayerPlan, Plan
from headwise.planning.fit import Kept


def sliced(
    model: HeadwisePreTrainedModel,
    kept: Sequence[Sequence[Kept]],
    neurons: Sequence[Sequence[int]] | None = None,
) -> HeadwisePreTrainedModel:
    """The model with only the kept columns, `kept[layer][head]`; scales are unchanged.

    `neurons[layer]` are those that an MLP keeps; None: all.
    """
    plan = plan_of(model)
    layers = [_layer(old, new) for old, new in zip(plan.layers, kept, strict=True)]
    if neurons is not None:
        layers = [
            layer.model_copy(update={"ffn_dim": len(some)})
            for layer, some in zip(layers, neurons, strict=True)
        ]
    ragged = Plan(shape=plan.shape, layers=tuple(layers), origin=plan.origin)
    config = HeadwiseConfig(
        backbone=copy.deepcopy(model.config.backbone),
        plan={"format": PLAN_FORMAT, **ragged.to_dict()},
    )
    with plan_errors(), no_init_weights():
        made = type(model)._from_config(config, dtype=model.dtype)
    made.to(model.device)
    load_around(made, model, _kept_mlps(model, neurons or ()))
    whole = zip(made.attentions(), model.attentions(), plan.layers, kept, strict=True)
    for target, source, layer, parts in whole:
        made_of = _kept_projections(source, layer, parts)
        load_projections(target, made_of.with_norms(_kept_norms(target, source)))
    return made.train(model.training)


def kept_neurons(mlp: Projections, kept: Sequence[int]) -> Projections:
    """An MLP with only these neurons: rows of the matrices into them, columns of that out."""
    index = torch.tensor(list(kept), device=mlp["down"].weight.device)
    made = {
        side: own.map(partial(torch.index_select, dim=0, index=index))
        for side, own in mlp.items()
        if side != "down"
    }
    down = mlp["down"]
    return Projections({**made, "down": Projection(down.weight.index_select(1, index), down.bias)})


def _kept_mlps(
    model: HeadwisePreTrainedModel, neurons: Sequence[Sequence[int]]
) -> dict[str, torch.Tensor]:
    """The tensors of the narrower MLPs, by their names in the stock model."""
    stock = inner(model)
    mlp = family_of(stock.config.model_type).mlp
    own = {module: name for name, module in stock.named_modules()}
    made: dict[str, torch.Tensor] = {}
    for (layer, _), kept in zip(stock_attentions(stock), neurons, strict=False):
        narrow = kept_neurons(layer_mlp(layer, stock.config), kept)
        made |= {f"{own[layer]}.{name}": t for name, t in mlp.written(narrow).items()}
    return made


def qk_columns(head: HeadSpec, kept: Kept) -> list[int]:
    """The columns of one query or key head that stay, in canonical order."""
    half = len(head.rotary_planes or ())
    return [*kept.planes, *(half + p for p in kept.planes), *(2 * half + f for f in kept.free)]


def _layer(layer: LayerPlan, kept: Sequence[Kept]) -> LayerPlan:
    heads = []
    for head, part in zip(layer.heads, kept, strict=True):
        planes = head.rotary_planes or ()
        heads.append(
            HeadSpec(
                qk_dim=2 * len(part.planes) + len(part.free),
                vo_dim=len(part.vo),
                queries=head.queries,
                score_scale=head.score_scale,
                rotary_planes=tuple(planes[p] for p in part.planes),
            )
        )
    return layer.model_copy(update={"heads": tuple(heads)})


def _kept_projections(
    attention: HeadwiseAttention, layer: LayerPlan, kept: Sequence[Kept]
) -> Projections:
    rows: dict[str, list[int]] = {side: [] for side in PROJECTIONS}
    ends = dict.fromkeys(PROJECTIONS, 0)
    for head, part in zip(layer.heads, kept, strict=True):
        qk, vo = qk_columns(head, part), list(part.vo)
        each = {
            "query": (qk, head.qk_dim, head.queries),
            "key": (qk, head.qk_dim, 1),
            "value": (vo, head.vo_dim, 1),
            "output": (vo, head.vo_dim, head.queries),
        }
        for side, (columns, width, times) in each.items():
            for _ in range(times):
                rows[side] += [ends[side] + c for c in columns]
                ends[side] += width
    made = {}
    for side, whole in projections_of(attention).items():
        index = torch.tensor(rows[side], device=whole.weight.device)
        if side == "output":
            made[side] = Projection(whole.weight.index_select(1, index), whole.bias)
        else:
            made[side] = whole.map(partial(torch.index_select, dim=0, index=index))
    return Projections(made)


def _kept_norms(target: HeadwiseAttention, source: HeadwiseAttention) -> dict[str, torch.Tensor]:
    """The norms over what is kept, as if the rest were zero: a smaller share of its mean."""
    found: dict[str, torch.Tensor] = {}
    for side, name in NORMS.items():
        norm, whole = getattr(target, name, None), getattr(source, name, None)
        if not isinstance(norm, KeptNorm):
            continue
        share, rest = norm.zeroed_share, torch.full_like(norm.zeroed_share, epsilon(whole))
        if isinstance(whole, KeptNorm):
            share, rest = whole.share * share / whole.zeroed_share, whole.rest
        found |= {f"{side}.share": share, f"{side}.rest": rest}
    return found
