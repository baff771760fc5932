"""Stock configs and model shapes, each from the other.

A shape is read from the stock model itself, built on the meta device (no memory, no weights):
which projections have biases, how many norms a layer has, and the remaining parameters. So the cost
of a plan equals the parameters of the real model, whatever options the config has.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from transformers import CONFIG_MAPPING

from headwise.errors import HeadwiseError, PlanError, quoted
from headwise.models import modeling_headwise as modeling
from headwise.models.backbones_headwise import (
    Family,
    base_of,
    family_of,
    layer_mlp,
    stock_attentions,
    stock_projections,
)
from headwise.plan import Bias, HeadSpec, LayerPlan, ModelShape, Plan
from headwise.planning.cost import cost
from headwise.records import first_problem

if sys.flags.optimize > 1:
    raise HeadwiseError(
        "transformers builds models from docstrings, which python -OO and PYTHONOPTIMIZE=2 remove; "
        "unset it, or use PYTHONOPTIMIZE=1."
    )

_BIASES: tuple[Bias, ...] = ("query", "key", "value", "output")

TASKS: dict[str, type[modeling.HeadwisePreTrainedModel]] = {
    "bare": modeling.HeadwiseModel,
    "causal-lm": modeling.HeadwiseForCausalLM,
    "masked-lm": modeling.HeadwiseForMaskedLM,
    "sequence-classification": modeling.HeadwiseForSequenceClassification,
    "image-classification": modeling.HeadwiseForImageClassification,
}
_KEPT_HEADS = ("causal-lm", "image-classification")  # that a cut keeps and is verified with


@contextmanager
def plan_errors() -> Iterator[None]:
    """Turn errors of the `*_headwise.py` files, which cannot import PlanError, into PlanErrors."""
    try:
        yield
    except ValueError as error:
        raise PlanError(str(error)) from error


def backbone_of(config: Any) -> Any:
    """The stock config: the whole, or what a plan surrounds; other configs use that name, too."""
    return config.backbone if config.model_type == "headwise" else config


def task_class(task: str) -> type[modeling.HeadwisePreTrainedModel]:
    """The headwise class of a task."""
    if task not in TASKS:
        raise PlanError(f"task must be one of {', '.join(TASKS)}, got {task!r}.")
    return TASKS[task]


def stock_class(config: Any, task: str) -> Any:
    """The stock class of a config for a task."""
    mapping = task_class(task)._task._model_mapping
    if type(config) not in mapping:
        raise PlanError(f"a {config.model_type} model has no {task} variant; choose another task.")
    return mapping[type(config)]


def saved_task(config: Any) -> str:
    """The task whose head a checkpoint was saved with; bare where none of TASKS is named."""
    stock = backbone_of(config)
    with plan_errors():
        if family_of(stock.model_type).causal:
            return "causal-lm"
    saved = (config.architectures or [""])[0]
    for task, ours in TASKS.items():
        mapping = ours._task._model_mapping
        if type(stock) in mapping and saved in (mapping[type(stock)].__name__, ours.__name__):
            return task
    return "bare"


def kept_task(task: str) -> str:
    """The task of a cut model: heads that a cut does not keep leave the bare model."""
    return task if task in _KEPT_HEADS else "bare"


def empty_model(config: Any, task: str) -> Any:
    """A stock or headwise model on the meta device: shapes and names, no memory."""
    own = copy.deepcopy(config)
    made = task_class(task) if config.model_type == "headwise" else stock_class(config, task)
    with plan_errors(), torch.device("meta"):
        return made(own)


def stock_plan(config: Any, task: str | None = None) -> Plan:
    """The uniform plan of a stock config; `task` (default: that of its cut) sets its head."""
    with plan_errors():
        family_of(config.model_type)
    return plan_of_stock(empty_model(config, task or kept_task(saved_task(config))))


def plan_of_stock(model: Any) -> Plan:
    """The uniform plan of a stock model, which may be empty."""
    try:
        shape = _shape(model, family_of(model.config.model_type))
    except ValidationError as error:
        problem = first_problem(error, ModelShape, {})
        raise PlanError(
            f"the config of this {model.config.model_type} model has sizes that no plan has: "
            f"{problem}"
        ) from error
    found = [attention for _, attention in stock_attentions(model)]
    layers = tuple(_layer(shape, attention.scaling) for attention in found)
    spare = sum(p.numel() for p in model.parameters())
    spare -= cost(Plan(shape=shape, layers=layers)).params
    if spare < 0:  # embeddings narrower than the model (OPT-350m): all of them are "other"
        spare += shape.vocab_size * shape.d_model * (1 if shape.tied_embeddings else 2)
        shape = shape.model_copy(update={"vocab_size": 0})
    return Plan(shape=shape.model_copy(update={"other_params": spare}), layers=layers)


def stock_config(shape: ModelShape, **overrides: Any) -> Any:
    """A new stock config of the shape's family and sizes."""
    with plan_errors():
        family = family_of(shape.family)
    if shape.causal != family.causal:
        raise PlanError(
            f"a {shape.family} model is {'' if family.causal else 'not '}causal, "
            f"got causal={shape.causal}; change the family or the shape."
        )
    # The stock heads are replaced anyway; stock configs insist that their number divides d_model.
    divides = shape.d_model % shape.n_heads == 0
    sizes: dict[str, Any] = {
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads if divides else 1,
        "max_position_embeddings": shape.context + family.unused_positions,
        family.ffn_dim: shape.ffn_dim,
        **_windows(shape, family),
    }
    if shape.vocab_size:
        sizes |= {"vocab_size": shape.vocab_size, "tie_word_embeddings": shape.tied_embeddings}
    if family.grouped:
        sizes["num_key_value_heads"] = shape.n_kv_heads if divides else 1
        sizes["head_dim"] = shape.qk_dim
    for side in ("bos", "eos", "pad"):  # the family's usual tokens may not exist here
        usual = getattr(CONFIG_MAPPING[shape.family](), f"{side}_token_id", None)
        if isinstance(usual, int) and usual >= shape.vocab_size:
            sizes[f"{side}_token_id"] = None
    with plan_errors():
        return CONFIG_MAPPING[shape.family](**(sizes | overrides))


def _shape(model: Any, family: Family) -> ModelShape:
    config, base = model.config, base_of(model)
    d = config.hidden_size
    first, attention = next(stock_attentions(model))
    projections = next(stock_projections(model))
    n_heads = config.num_attention_heads
    n_kv_heads = (
        (getattr(config, "num_key_value_heads", None) or n_heads) if family.grouped else n_heads
    )
    inside = set(attention.modules())
    if family.holds_output:
        inside.add(first.get_submodule(family.holds_output))
    outside = [m for m in first.modules() if m not in inside and hasattr(m, "weight")]
    norms = [m for m in outside if m.weight.ndim == 1]
    mlp = layer_mlp(first, config)
    final = [m for n, m in base.named_children() if _is_norm(m) and "embed" not in n]
    final += [m for m in _parent(base, family).children() if _is_norm(m) and m not in final]
    positions = sum(
        p.numel() // d
        for n, p in base.named_parameters()
        if ("position" in n or "wpe" in n) and p.shape[-1] == d
    )
    windows = tuple(_window(a, config) for _, a in stock_attentions(model))
    return ModelShape(
        family=config.model_type,
        n_layers=config.num_hidden_layers,
        d_model=d,
        context=getattr(config, "max_position_embeddings", positions) - family.unused_positions,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        qk_dim=projections["key"].weight.shape[0] // n_kv_heads,
        vo_dim=projections["value"].weight.shape[0] // n_kv_heads,
        attention_biases=tuple(s for s in _BIASES if projections.has_bias(s)),
        causal=family.causal,
        windows=windows if any(windows) else (),
        vocab_size=getattr(config, "vocab_size", 0),
        tied_embeddings=getattr(config, "tie_word_embeddings", False),
        lm_head=model.get_output_embeddings() is not None,
        learned_positions=positions,
        ffn_dim=mlp["down"].weight.shape[1],
        ffn_gated="gate" in mlp.by_side,
        ffn_biases=mlp.has_bias("down"),
        norm_biases=any(getattr(m, "bias", None) is not None for m in norms),
        norms_per_layer=len(norms),
        final_norm=bool(final),
        kv_dtype_bytes=_bytes(config.dtype),
        weight_dtype_bytes=_bytes(config.dtype),
    )


def _layer(shape: ModelShape, scale: float) -> LayerPlan:
    usual = abs(scale * shape.qk_dim**0.5 - 1) < 1e-9
    head = HeadSpec(
        qk_dim=shape.qk_dim,
        vo_dim=shape.vo_dim,
        queries=shape.queries,
        score_scale=None if usual else scale,
    )
    return LayerPlan(heads=(head,) * shape.n_kv_heads, biases=shape.attention_biases)


def _windows(shape: ModelShape, family: Family) -> dict[str, Any]:
    sizes = {w for w in shape.windows if w}
    if not family.windows:
        if sizes:
            raise PlanError(f"a {shape.family} model has no sliding windows, got {shape.windows}.")
        return {}
    windows = shape.windows or (None,) * shape.n_layers
    if len(sizes) > 1 or (family.windows == "all" and sizes and not all(windows)):
        raise PlanError(
            f"a {shape.family} model has one window size"
            f"{' for all its layers' if family.windows == 'all' else ''}, got {windows}."
        )
    window = sizes.pop() if sizes else None
    if family.windows == "all":
        return {"sliding_window": window}
    kinds = ["sliding_attention" if w else "full_attention" for w in windows]
    given: dict[str, Any] = {"layer_types": kinds}
    if window:
        given |= {"sliding_window": window, "use_sliding_window": True}
    return given


def _window(attention: nn.Module, config: Any) -> int | None:
    window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
    return window or None


def _is_norm(module: nn.Module) -> bool:
    return getattr(getattr(module, "weight", None), "ndim", 0) == 1


def _parent(base: nn.Module, family: Family) -> nn.Module:
    """The module that holds the list of layers, and the last norm beside it."""
    return base.get_submodule(family.layers.rpartition(".")[0])


def _bytes(dtype: torch.dtype | str | None) -> int:
    """Bytes of a number; a config that was just saved holds its dtype as a word."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found is not None and not isinstance(found, torch.dtype):
        raise HeadwiseError(
            f"config.json must name a number format such as bfloat16 as its dtype, got "
            f"{quoted(dtype)}."
        )
    return 2 if found is None else found.itemsize
