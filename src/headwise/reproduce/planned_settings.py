"""The settings of the `planned-vs-uniform` claim, and one training run in one of them.

language         Llama blocks on the built-in text
attention-only   the same without MLPs
classification   sequences with one noisy bit to tell, blocks with MLPs
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headwise.reproduce.claim import Size, Values
from headwise.reproduce.rival_plans import rival_plan

if TYPE_CHECKING:
    from headwise.plan import ModelShape

SETTINGS = ("language", "attention-only", "classification")
SHAPE: dict[Size, dict[str, int]] = {
    "quick": {"n_layers": 3, "d_model": 32, "heads": 4, "width": 8, "ffn_dim": 64},
    "full": {"n_layers": 6, "d_model": 96, "heads": 6, "width": 16, "ffn_dim": 256},
}
TEXT: dict[Size, dict[str, int]] = {
    "quick": {"characters": 150_000, "vocab_size": 300, "context": 32},
    "full": {"characters": 8_000_000, "vocab_size": 1024, "context": 128},
}
TASK: dict[Size, dict[str, Any]] = {
    "quick": {"length": 16, "vocab_size": 8, "marks": 3, "rule": "first", "noise": 0.05},
    "full": {"length": 64, "vocab_size": 16, "marks": 5, "rule": "first", "noise": 0.05},
}
COURSE: dict[Size, dict[str, dict[str, Any]]] = {
    "quick": {
        "text": {"steps": 30, "batch": 4, "lr": 1e-2, "evaluations": 10, "scored": 16},
        "task": {"steps": 30, "batch": 16, "lr": 3e-3, "evaluations": 10, "scored": 128},
    },
    "full": {
        "text": {"steps": 800, "batch": 8, "lr": 2e-3, "evaluations": 25, "scored": 128},
        "task": {"steps": 1000, "batch": 32, "lr": 1e-3, "evaluations": 25, "scored": 1024},
    },
}
COST: dict[Size, dict[str, float]] = {
    "quick": {"language": 0.6, "attention-only": 0.4, "classification": 0.4},
    "full": {"language": 120.0, "attention-only": 55.0, "classification": 180.0},
}


def trained_plan(p: Mapping[str, Any], seed: int) -> Values:
    """The curve of held-out losses, and what the plan costs."""
    from headwise.planning.cost import cost
    from headwise.reproduce import scratch_training as scratch

    shape = _shape(p)
    plan = rival_plan(p["policy"], shape, p["share"], seed)
    course = scratch.Course(**p["course"])
    if p["setting"] == "classification":
        from headwise.data.tasks import SequenceClassification
        from headwise.nn.one_layer import TaskNetwork

        task = SequenceClassification(**p["data"])
        network = TaskNetwork(plan, task, mlp=True, norm=True, seed=seed)
        learned = scratch.learned_task(network, task, course, seed)
    else:
        model = scratch.text_model(plan, seed)
        learned = scratch.learned_text(model, scratch.Source(**p["data"]), course, seed)
    spent = cost(plan, context=(shape.context + 1) // 2)  # a token attends to half on average
    return {
        **learned.finished().values(),
        "attn_params": spent.attn_params,
        "flops_per_step": 3 * spent.flops * course.batch * shape.context,  # forward, backward twice
    }


def _shape(p: Mapping[str, Any]) -> ModelShape:
    from headwise.plan import ModelShape

    sizes, data, setting = p["shape"], p["data"], p["setting"]
    return ModelShape(
        n_layers=sizes["n_layers"],
        d_model=sizes["d_model"],
        context=data["length"] if setting == "classification" else data["context"],
        n_heads=sizes["heads"],
        n_kv_heads=sizes["heads"],
        qk_dim=sizes["width"],
        vo_dim=sizes["width"],
        vocab_size=data["vocab_size"],
        ffn_dim=0 if setting == "attention-only" else sizes["ffn_dim"],
        # The classifier's head has two outputs: too little to count.
        lm_head=setting != "classification",
        ffn_gated=setting != "classification",
    )
