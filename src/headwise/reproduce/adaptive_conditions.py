"""The plans and the conditions of the `adaptive` claim.

All plans of a size have equal parameters; they differ in how many heads share a layer's width, and
in which layer has more of it. A condition is a kind of data at a length; a step sees the same
number of tokens in every condition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headwise.reproduce.claim import Size

if TYPE_CHECKING:
    from headwise.data.tasks import Task
    from headwise.plan import Plan

# Heads and head width by layer; every layer pair has the same sum of heads × width.
PLANS: dict[Size, dict[str, list[list[int]]]] = {
    "quick": {
        "2 × 16": [[2, 16], [2, 16]],
        "8 × 4": [[8, 4], [8, 4]],
        "wide first": [[4, 12], [4, 4]],
    },
    "full": {
        "2 × 32": [[2, 32], [2, 32]],
        "4 × 16": [[4, 16], [4, 16]],
        "8 × 8": [[8, 8], [8, 8]],
        "16 × 4": [[16, 4], [16, 4]],
        "wide first": [[8, 12], [8, 4]],
        "wide last": [[8, 4], [8, 12]],
    },
}
D_MODEL: dict[Size, int] = {"quick": 32, "full": 64}
_TEXT: dict[Size, dict[str, Any]] = {
    "quick": {"kind": "text", "characters": 150_000, "vocab_size": 300},
    "full": {"kind": "text", "characters": 8_000_000, "vocab_size": 1024},
}
CONDITIONS: dict[Size, dict[str, dict[str, Any]]] = {
    "quick": {
        "text, 8 tokens": {**_TEXT["quick"], "context": 8},
        "text, 32 tokens": {**_TEXT["quick"], "context": 32},
        "4-gram": {"kind": "4-gram", "length": 8},
        "classification": {"kind": "classification", "length": 16, "vocab_size": 8, "marks": 3},
    },
    "full": {
        "text, 16 tokens": {**_TEXT["full"], "context": 16},
        "text, 256 tokens": {**_TEXT["full"], "context": 256},
        "induction, 15 tokens": {"kind": "induction", "length": 15, "vocab_size": 64, "prefix": 8},
        "induction, 63 tokens": {"kind": "induction", "length": 63, "vocab_size": 64, "prefix": 32},
        "4-gram": {"kind": "4-gram", "length": 32},
        "classification": {"kind": "classification", "length": 64, "vocab_size": 16, "marks": 5},
    },
}
TOKENS_PER_STEP: dict[Size, int] = {"quick": 128, "full": 1024}
# By condition, or else by kind: a step sees few long sequences, so the long task takes more steps.
COURSE: dict[Size, dict[str, dict[str, Any]]] = {
    "quick": {
        "text": {"steps": 30, "lr": 1e-2, "evaluations": 5, "scored": 16},
        "task": {"steps": 30, "lr": 3e-3, "evaluations": 5, "scored": 128},
    },
    "full": {
        "text": {"steps": 800, "lr": 3e-3, "evaluations": 1, "scored": 256},
        "task": {"steps": 1000, "lr": 2e-3, "evaluations": 1, "scored": 1024},
        "induction, 63 tokens": {"steps": 2500, "lr": 2e-3, "evaluations": 1, "scored": 1024},
    },
}
COST: dict[Size, dict[str, float]] = {
    "quick": {"text": 0.4, "task": 0.4},
    "full": {"text": 40.0, "task": 12.0, "induction, 63 tokens": 60.0},
}


def condition_plan(p: Mapping[str, Any], context: int, vocab_size: int) -> Plan:
    """The trial's layers; a language model has MLPs, a task network none."""
    from headwise.plan import HeadSpec, LayerPlan, ModelShape, Plan

    layers = tuple(
        LayerPlan(heads=(HeadSpec(qk_dim=width, vo_dim=width),) * heads)
        for heads, width in p["layers"]
    )
    width = max(w for _, w in p["layers"])
    heads = p["d_model"] // width if p["d_model"] % width == 0 else 1
    shape = ModelShape(
        n_layers=len(layers),
        d_model=p["d_model"],
        context=context,
        n_heads=heads,
        n_kv_heads=heads,
        qk_dim=width,
        vo_dim=width,
        vocab_size=vocab_size,
        ffn_dim=3 * p["d_model"] if vocab_size else 0,
    )
    return Plan(shape=shape, layers=layers)


def condition_task(data: Mapping[str, Any], seed: int) -> Task:
    """The task of a condition; the seed draws the weights of an n-gram."""
    from headwise.data.tasks import InductionHead, NGram, SequenceClassification

    sizes = {name: value for name, value in data.items() if name != "kind"}
    if data["kind"] == "4-gram":
        return NGram.random(4, 8, sizes["length"], seed=seed)
    if data["kind"] == "induction":
        return InductionHead(**sizes)
    return SequenceClassification(**sizes, rule="first", noise=0.05)
