"""From a plan to a model, and from a stock model to the same model with its attention planned.

Plan ───────── build_model ──► new Hugging Face model, random weights
stock model ── convert ──────► the same function, exactly
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from transformers.initialization import no_init_weights

from headwise.errors import PlanError
from headwise.nn import modeling_headwise as modeling
from headwise.nn.attention_headwise import PROJECTIONS, HeadwiseAttention
from headwise.nn.backbones_headwise import (
    Weights,
    family_of,
    rotary_planes,
    stock_attentions,
    stock_weights,
)
from headwise.nn.configuration_headwise import HeadwiseConfig
from headwise.nn.resolve import resolved
from headwise.nn.shapes import (
    TASKS,
    plan_errors,
    stock_class,
    stock_config,
    stock_plan,
    task_class,
)
from headwise.plan import PLAN_FORMAT, Plan

__all__ = ["build_model", "convert", "headwise_config", "plan_of", "stock_config", "stock_plan"]


def headwise_config(plan: Plan, backbone: Any, task: str = "causal-lm") -> HeadwiseConfig:
    """The config of a plan on a stock config, with every scale and rotary plane resolved."""
    with torch.device("meta"):
        planes = rotary_planes(stock_class(backbone, task)(copy.deepcopy(backbone)))
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


def convert(stock: Any, plan: Plan | None = None) -> modeling.HeadwisePreTrainedModel:
    """A stock model as a headwise model of its uniform plan: equal weights, equal outputs."""
    task = _task_of(stock)
    uniform = stock_plan(stock.config, task)
    plan = plan or uniform
    if _widths(plan) != _widths(uniform):
        raise PlanError("a stock model converts to its uniform plan; cut it to follow another.")
    with plan_errors(), no_init_weights():
        config = headwise_config(plan, copy.deepcopy(stock.config), task)
        model = TASKS[task]._from_config(config, dtype=stock.dtype)
    model.to(stock.device)
    load_around(model, stock)
    for attention, weights in zip(model.attentions(), stock_weights(stock), strict=True):
        load_projections(attention, weights)
    return model.train(stock.training)


def load_around(model: modeling.HeadwisePreTrainedModel, source: Any) -> None:
    """Copy everything but the attention's projections from a stock or a headwise model."""
    target, source = inner(model), inner(source)
    family = family_of(source.config.model_type)
    replaced: set[Any] = {attention for _, attention in stock_attentions(source)}
    if family.holds_output:
        replaced |= {
            layer.get_submodule(family.holds_output) for layer, _ in stock_attentions(source)
        }
    prefixes = tuple(f"{n}." for n, m in source.named_modules() if m in replaced)
    state = {
        name: value
        for name, value in source.state_dict().items()
        if not name.startswith(prefixes) or "q_norm" in name or "k_norm" in name
    }
    missing, unexpected = target.load_state_dict(state, strict=False)
    left = [n for n in missing if not any(f".{p}." in n for p in PROJECTIONS.values())]
    assert not left, left
    assert not unexpected, unexpected
    target.tie_weights()
    for name, buffer in source.named_buffers():  # rotary frequencies, rounded if the model is
        owner, _, last = name.rpartition(".")
        setattr(target.get_submodule(owner), last, buffer.clone())


def load_projections(attention: HeadwiseAttention, weights: Weights) -> None:
    """Copy the four projections into one attention module."""
    matrices, biases = weights
    with torch.no_grad():
        for side, name in PROJECTIONS.items():
            module = getattr(attention, name, None)
            if module is not None:
                module.weight.copy_(matrices[side])
                if module.bias is not None:
                    module.bias.copy_(biases[side])


def inner(model: Any) -> Any:
    """The stock model inside a headwise model; a stock model is its own."""
    backbone = model.backbone if isinstance(model, modeling.HeadwisePreTrainedModel) else model
    return backbone.base_model if isinstance(backbone, modeling.Body) else backbone


def _task_of(stock: Any) -> str:
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
    return [[(h.qk_dim, h.vo_dim, h.queries) for h in layer.heads] for layer in plan.layers]


@contextlib.contextmanager
def _seeded(seed: int | None) -> Any:
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
