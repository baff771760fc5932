"""What a plan costs: counted, not estimated.

- attention parameters: weights and biases of the four projections (not norms).
- MLP parameters: weights and biases of its two or three matrices; both together: block parameters.
- total parameters: every number in the checkpoint; tied embeddings count once.
- key-value bytes: what one token leaves in the cache, all layers together.
- FLOPs: of one new token that attends to `context` tokens; two per weight it is multiplied with and
  two per cached number it is compared or mixed with. Norms, softmax, rotary positions, activations
  and embedding look-ups are left out, as is usual.
- traffic: bytes that memory must deliver per generated token when `batch` sequences are decoded
  together, each with `context` tokens in its cache. A step reads every weight once for the whole
  batch (projections, MLP, norms, output head, and all other weights), and for each sequence
  its cache and one row of the embeddings. It limits decoding speed on most devices. It is counted
  per step, in whole bytes; dividing by the batch gives the bytes per token. Encoders generate
  nothing: 0.

All are linear in the widths of heads and MLPs, which is what makes exact planning possible:
`unit_cost` and `neuron_cost` are the slopes.
"""

from __future__ import annotations

from typing import Literal

from headwise.errors import PlanError
from headwise.plan import Budget, Cost, HeadSpec, LayerPlan, ModelShape, Plan, Resource

Side = Literal["qk", "vo"]
SIDES: tuple[Side, ...] = ("qk", "vo")


def cost(plan: Plan, context: int | None = None, batch: int = 1) -> Cost:
    """The cost of a plan for `batch` sequences of `context` tokens (default: the shape's)."""
    shape = plan.shape
    context = shape.context if context is None else context
    if context < 1 or batch < 1:
        raise PlanError(f"context and batch must be at least 1, got {context} and {batch}.")
    attention = sum(layer_params(layer, shape.d_model) for layer in plan.layers)
    ffn = sum(ffn_params(shape, width) for width in plan.ffn_dims)
    flops = 2 * (shape.vocab_size * shape.d_model if shape.lm_head else 0)
    for i, layer in enumerate(plan.layers):
        weights = layer_weights(layer, shape.d_model) + _ffn_weights(shape, plan.ffn_dims[i])
        mixed = layer.query_width + layer.output_width
        flops += 2 * weights + 2 * reach(shape, i, context) * mixed
    cached = [layer.key_width + layer.value_width for layer in plan.layers]
    step = 0
    if shape.causal:
        reached = sum(reach(shape, i, context) * width for i, width in enumerate(cached))
        step = (attention + ffn + _outside_read(shape)) * shape.weight_dtype_bytes
        step += batch * reached * shape.kv_dtype_bytes
        step += batch * _rows_read(shape) * shape.d_model * shape.weight_dtype_bytes
    return Cost(
        attn_params=attention,
        ffn_params=ffn,
        params=attention + ffn + outside_params(shape),
        kv_bytes=sum(cached) * shape.kv_dtype_bytes if shape.causal else 0,
        flops=flops,
        step_bytes=step,
        context=context,
        batch=batch,
    )


def dense_cost(shape: ModelShape, context: int | None = None, batch: int = 1) -> Cost:
    """The cost of the uniform model that shares such as 75% refer to."""
    return cost(Plan.uniform(shape), context, batch)


def within_budget(plan: Plan, budget: Budget, context: int | None = None, batch: int = 1) -> bool:
    """Whether a plan meets every limit of a budget."""
    spent, dense = cost(plan, context, batch), dense_cost(plan.shape, context, batch)
    return all(spent.counted(r) <= budget.amount(r, dense) for r in budget.limited)


def reach(shape: ModelShape, layer: int, context: int) -> int:
    """How many tokens a token of this layer attends to."""
    window = shape.windows[layer] if shape.windows else None
    return min(context, window) if window else context


def layer_weights(layer: LayerPlan, d_model: int) -> int:
    """Weights of the four projections of one layer, biases not counted."""
    widths = {
        "query": layer.query_width,
        "key": layer.key_width,
        "value": layer.value_width,
        "output": layer.output_width,
    }
    return d_model * sum(w for side, w in widths.items() if side not in layer.identities)


def layer_params(layer: LayerPlan, d_model: int) -> int:
    """Weights and biases of the four projections of one layer."""
    bias_widths = {
        "query": layer.query_width,
        "key": layer.key_width,
        "value": layer.value_width,
        "output": d_model,
    }
    return layer_weights(layer, d_model) + sum(bias_widths[side] for side in layer.biases)


def ffn_params(shape: ModelShape, width: int) -> int:
    """Weights and biases of an MLP with `width` neurons."""
    if not width:
        return 0
    biases = width * (2 if shape.ffn_gated else 1) + shape.d_model if shape.ffn_biases else 0
    return _ffn_weights(shape, width) + biases


def outside_params(shape: ModelShape) -> int:
    """The number of parameters outside attention projections and MLPs."""
    d = shape.d_model
    norm = d * (2 if shape.norm_biases else 1)
    embeddings = shape.vocab_size * d * (2 if shape.lm_head and not shape.tied_embeddings else 1)
    final = norm if shape.final_norm else 0
    return (
        embeddings
        + shape.learned_positions * d
        + shape.n_layers * shape.norms_per_layer * norm
        + final
        + shape.other_params
    )


def unit_cost(
    plan: Plan, layer_index: int, head: HeadSpec, side: Side, context: int, *, batch: int = 1
) -> dict[Resource, int]:
    """What one more dimension on one side of one head group costs, as `Cost.counted` counts.

    In a group of g query heads one dimension is g columns of the query (or output) matrix and one
    column of the key (or value) matrix, and one cached number per token.
    """
    shape, layer, g = plan.shape, plan.layers[layer_index], head.queries
    columns = {"query": g, "key": 1} if side == "qk" else {"value": 1, "output": g}
    learned = sum(n for name, n in columns.items() if name not in layer.identities)
    weights = learned * shape.d_model
    # The output bias is as wide as the model, whatever the heads.
    biases = sum(n for name, n in columns.items() if name in layer.biases and name != "output")
    tokens = reach(shape, layer_index, context)
    read = (weights + biases) * shape.weight_dtype_bytes + batch * tokens * shape.kv_dtype_bytes
    return {
        "attn_params": weights + biases,
        "ffn_params": 0,
        "block_params": weights + biases,
        "params": weights + biases,
        "kv_bytes": shape.kv_dtype_bytes if shape.causal else 0,
        "flops": 2 * weights + 2 * tokens * g,
        "traffic": read if shape.causal else 0,
    }


def neuron_cost(shape: ModelShape) -> dict[Resource, int]:
    """What one more neuron in the MLP of any layer costs, as `Cost.counted` counts."""
    params = ffn_params(shape, 2) - ffn_params(shape, 1)
    return {
        "attn_params": 0,
        "ffn_params": params,
        "block_params": params,
        "params": params,
        "kv_bytes": 0,
        "flops": 2 * _ffn_weights(shape, 1),
        "traffic": params * shape.weight_dtype_bytes if shape.causal else 0,
    }


def _ffn_weights(shape: ModelShape, width: int) -> int:
    return shape.d_model * width * (3 if shape.ffn_gated else 2)


def _outside_read(shape: ModelShape) -> int:
    """Weights outside attention and MLPs that a decoding step reads, whatever the batch.

    Tables are looked up, not read; tied embeddings are the output head, which is read.
    """
    tables = shape.learned_positions
    if not (shape.lm_head and shape.tied_embeddings):
        tables += shape.vocab_size
    return outside_params(shape) - tables * shape.d_model


def _rows_read(shape: ModelShape) -> int:
    """Rows of tables that each sequence of a batch looks up in a decoding step."""
    return bool(shape.vocab_size) + bool(shape.learned_positions)
