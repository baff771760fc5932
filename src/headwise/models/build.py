"""From a plan to a model, and from a stock model to the same model with its layers planned.

Plan ───────── build_model ──► new Hugging Face model, random weights
stock model ── convert ──────► the same function, exactly

Score scales and rotary planes that a plan leaves open are resolved here. A checkpoint never derives
a scale from a width, since a cut head keeps the scale of the head it was cut from. A new head
without a scale gets 1/√qk_dim. With an identity query (or key) the initial spread of the scores
would differ: a learned projection with weights of spread `init_std` turns a normalised input
(entries of size 1) into entries of size init_std·√d_model, the identity leaves them at 1. The
factor init_std·√d_model restores the spread; at 0.02 and d_model 768 it is 0.55, the "halved
scale" of the paper that trains with W_Q = I.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from transformers.initialization import no_init_weights

from headwise.errors import PlanError
from headwise.models import modeling_headwise as modeling
from headwise.models.attention_headwise import NORMS, HeadwiseAttention
from headwise.models.backbones_headwise import (
    NORM_TENSORS,
    TENSOR_PLACES,
    Projections,
    family_of,
    layer_projections,
    rotary_planes,
    stock_attentions,
)
from headwise.models.configuration_headwise import HeadwiseConfig
from headwise.models.shapes import (
    TASKS,
    empty_model,
    plan_errors,
    plan_of_stock,
    stock_config,
    stock_plan,
    task_class,
)
from headwise.plan import PLAN_FORMAT, HeadSpec, LayerPlan, Plan

__all__ = ["build_model", "convert", "headwise_config", "plan_of", "stock_config", "stock_plan"]


def headwise_config(
    plan: Plan, backbone: Any, task: str = "causal-lm", *, planes: int | None = None
) -> HeadwiseConfig:
    """The config of a plan on a stock config, with every scale and rotary plane resolved.

    `planes` are those that the backbone rotates, where they are known already.
    """
    if planes is None:
        planes = rotary_planes(empty_model(backbone, task))
    std: float = getattr(backbone, "initializer_range", getattr(backbone, "init_std", 0.02))
    explicit = resolved(plan, init_std=std, rotary_planes=planes)
    return HeadwiseConfig(backbone=backbone, plan={"format": PLAN_FORMAT, **explicit.to_dict()})


def plan_of(model: Any) -> Plan:
    """The plan that a headwise model follows."""
    return Plan.from_dict(model.config.plan, "the model's config")


def build_model(
    plan: Plan,
    *,
    task: str = "causal-lm",
    config: Any = None,
    overrides: dict[str, Any] | None = None,
    seed: int | None = None,
    dtype: torch.dtype | None = None,
) -> modeling.HeadwisePreTrainedModel:
    """A new model with random weights.

    The model around the attention is `config`, a stock config, or one made from the plan's shape;
    `overrides` are further settings of it (dropout, rope_parameters, num_labels, …).
    """
    model_class = task_class(task)
    if config is None:
        config = stock_config(plan.shape, **(overrides or {}))
    else:
        config = copy.deepcopy(config)
        config.update(overrides or {})
    with plan_errors(), _seeded(seed):
        made = headwise_config(plan, config, task)
        return model_class._from_config(made, dtype=dtype or torch.get_default_dtype())


def convert(
    stock: Any, plan: Plan | None = None, *, weights: Literal["copy", "share", "take"] = "copy"
) -> modeling.HeadwisePreTrainedModel:
    """Convert a stock model to a headwise model of its uniform plan with the same outputs.

    Shared `weights` are the stock model's own memory: never write to them. With "take" the weights
    are moved out of the stock model, so that they are held once.
    """
    task = task_of(stock)
    uniform = plan_of_stock(stock)
    plan = plan or uniform
    if _widths(plan) != _widths(uniform):
        raise PlanError("a stock model converts to its uniform plan; cut it to follow another.")
    with plan_errors(), no_init_weights(), init_empty_weights(include_buffers=False):
        planes = rotary_planes(stock)
        config = headwise_config(plan, copy.deepcopy(stock.config), task, planes=planes)
        model = TASKS[task]._from_config(config, dtype=stock.dtype)
    _move_around(model, stock, copied=weights == "copy")
    layers = zip(model.attentions(), stock_attentions(stock), strict=True)
    for attention, (layer, _) in layers:
        found = layer_projections(layer, stock.config)
        _place_projections(attention, found, copied=weights == "copy")
        if weights == "take":
            for module in _replaced(layer, stock.config):
                module.to_empty(device="meta")
    return model.train(stock.training)


def load_around(
    model: modeling.HeadwisePreTrainedModel,
    source: Any,
    changed: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Copy everything but the attention's projections from a stock or a headwise model.

    `changed` replaces some weights, by their names in the stock model.
    """
    target, source = inner(model), inner(source)
    state = _state_around(source) | dict(changed or {})
    _check_around(target.load_state_dict(state, strict=False))
    _finish_around(target, source)


def _move_around(model: modeling.HeadwisePreTrainedModel, source: Any, *, copied: bool) -> None:
    """The same into an empty model, whose weights become the source's, or copies of them."""
    target, state = inner(model), _state_around(source)
    if copied:
        once: dict[int, torch.Tensor] = {}  # tied weights are one tensor
        state = {n: once.setdefault(t.data_ptr(), t.clone()) for n, t in state.items()}
    _check_around(target.load_state_dict(state, strict=False, assign=True))
    _finish_around(target, source)


def _state_around(source: Any) -> dict[str, torch.Tensor]:
    """The weights of a model but for the attention's projections."""
    replaced: set[Any] = {
        m for layer, _ in stock_attentions(source) for m in _replaced(layer, source.config)
    }
    prefixes = tuple(f"{n}." for n, m in source.named_modules() if m in replaced)
    return {
        name: value
        for name, value in source.state_dict().items()
        if not name.startswith(prefixes) or any(f".{n}.weight" in name for n in NORMS.values())
    }


def _replaced(layer: Any, config: Any) -> list[Any]:
    """The modules of a layer in whose place the planned attention stands."""
    family = family_of(config.model_type)
    paths = [family.attention, *([family.holds_output] if family.holds_output else [])]
    return [layer.get_submodule(path) for path in paths]


def _check_around(result: Any) -> None:
    missing, unexpected = result
    left = [n for n in missing if not any(n.endswith(f".{p}") for p in TENSOR_PLACES.values())]
    assert not left, left
    assert not unexpected, unexpected


def _finish_around(target: Any, source: Any) -> None:
    target.tie_weights()
    for name, buffer in source.named_buffers():  # rotary frequencies, rounded if the model is
        owner, _, last = name.rpartition(".")
        setattr(target.get_submodule(owner), last, buffer.clone())


def _place_projections(
    attention: HeadwiseAttention, projections: Projections, *, copied: bool
) -> None:
    """Give an empty attention module these projections themselves, or copies of them."""
    given = projections.tensors()
    for name, (module, kind) in _tensor_places(attention).items():
        tensor = given[name]
        whole = tensor.is_contiguous() and not _is_slice(tensor)
        own = (
            tensor if whole and not copied else tensor.clone(memory_format=torch.contiguous_format)
        )
        setattr(module, kind, torch.nn.Parameter(own, own.is_floating_point()))


def _tensor_places(attention: HeadwiseAttention) -> dict[str, tuple[torch.nn.Module, str]]:
    """The module and attribute of every tensor, by its name in `Projections.tensors`."""
    return {
        name: (getattr(attention, module), kind)
        for name, (module, kind) in ((n, p.split(".")) for n, p in TENSOR_PLACES.items())
        if getattr(getattr(attention, module, None), kind, None) is not None
    }


def _is_slice(tensor: torch.Tensor) -> bool:
    """Whether it is a part of a fused weight, which would be held as long as the part is."""
    return tensor.untyped_storage().nbytes() != tensor.nbytes


def load_projections(attention: HeadwiseAttention, projections: Projections) -> None:
    """Copy the four projections into one attention module.

    Norms over kept columns that were not fitted stay as built: as if the rest were zero.
    """
    given = projections.tensors()
    with torch.no_grad():
        for name, (module, kind) in _tensor_places(attention).items():
            if name in given or name not in NORM_TENSORS:
                getattr(module, kind).copy_(given[name])


@contextlib.contextmanager
def replaced_projections(
    model: modeling.HeadwisePreTrainedModel,
    layers: Mapping[int, Projections],
    mlps: Mapping[int, Projections] | None = None,
) -> Iterator[None]:
    """Replace projections in some layers, and MLPs of the same shape, while it is open.

    The model's own tensors are set aside and never written to: a live model may share them. Missing
    biases are added temporarily.
    """
    stock, own = inner(model), []
    table = family_of(stock.config.model_type).mlp
    owners = [owner for owner, _ in stock_attentions(stock)]

    def put(module: torch.nn.Module, kind: str, tensor: torch.Tensor) -> None:
        before, like = getattr(module, kind), module.get_parameter("weight")
        own.append((module, kind, before))
        made = tensor.to(like.device, like.dtype)
        setattr(module, kind, torch.nn.Parameter(made, like.requires_grad))

    try:
        for i, projections in layers.items():
            attention = model.attentions()[i]
            for name, tensor in projections.tensors().items():
                path, _, kind = TENSOR_PLACES[name].partition(".")
                if name not in NORM_TENSORS:  # what a cut fitted stays
                    put(attention.get_submodule(path), kind, tensor)
        for i, mlp in (mlps or {}).items():
            for name, tensor in table.written(mlp).items():
                path, _, kind = name.rpartition(".")
                put(owners[i].get_submodule(path), kind, tensor)
        yield
    finally:
        for module, kind, before in reversed(own):
            setattr(module, kind, before)


def inner(model: Any) -> Any:
    """The stock model inside a headwise model; a stock model is its own."""
    backbone = model.backbone if isinstance(model, modeling.HeadwisePreTrainedModel) else model
    return backbone.base_model if isinstance(backbone, modeling.Body) else backbone


def task_of(stock: Any) -> str:
    """The task of a stock or a headwise model's class."""
    for task, ours in TASKS.items():
        if type(stock) is ours:
            return task
    with plan_errors():
        family_of(stock.config.model_type)
    for task, model_class in TASKS.items():
        mapping = model_class._task._model_mapping
        if type(stock.config) in mapping and mapping[type(stock.config)] is type(stock):
            return task
    raise PlanError(
        f"the model must be a stock model for one of {', '.join(TASKS)}, got "
        f"{type(stock).__name__}; load it with the Auto class of its task."
    )


def _widths(plan: Plan) -> Any:
    heads = [[(h.qk_dim, h.vo_dim, h.queries) for h in layer.heads] for layer in plan.layers]
    return heads, plan.ffn_dims


@contextlib.contextmanager
def _seeded(seed: int | None) -> Any:
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def resolved(plan: Plan, *, init_std: float = 0.02, rotary_planes: int = 0) -> Plan:
    """The plan with every scale and every rotary plane explicit.

    `rotary_planes` is how many planes the backbone rotates (0: no rotary positions).
    """
    factor = init_std * math.sqrt(plan.shape.d_model)
    layers = tuple(
        _resolved_layer(layer, plan.shape.qk_dim, factor, rotary_planes) for layer in plan.layers
    )
    return plan.model_copy(update={"layers": layers})


def spread_planes(n_kept: int, n_planes: int) -> tuple[int, ...]:
    """`n_kept` of `n_planes` planes, evenly spaced, so that the whole frequency range stays."""
    kept = min(n_kept, n_planes)
    if kept <= 1:
        return tuple(range(kept))
    return tuple(round(i * (n_planes - 1) / (kept - 1)) for i in range(kept))


def _resolved_layer(layer: LayerPlan, stock_qk_dim: int, factor: float, n_planes: int) -> LayerPlan:
    spread = factor ** sum(side in layer.identities for side in ("query", "key"))
    made: dict[HeadSpec, HeadSpec] = {}
    for head in layer.heads:
        if head not in made:
            made[head] = _resolved_head(head, stock_qk_dim, spread, n_planes)
    return layer.model_copy(update={"heads": tuple(made[head] for head in layer.heads)})


def _resolved_head(head: HeadSpec, stock_qk_dim: int, spread: float, n_planes: int) -> HeadSpec:
    scale, planes = head.score_scale, head.rotary_planes
    if scale is None:
        scale = spread / math.sqrt(head.qk_dim)
    if planes is None:
        # A partly rotated head (GPT-NeoX) keeps the rotated share of its width.
        share = min(1.0, 2 * n_planes / stock_qk_dim)
        planes = spread_planes(min(round(share * head.qk_dim / 2), head.qk_dim // 2), n_planes)
    return head.model_copy(update={"score_scale": scale, "rotary_planes": planes})
