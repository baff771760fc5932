"""GPT-2 blocks with or without one of the projections: what both query-free claims train.

Pre-norm blocks with both skips, as in arXiv 2510.23912: there W_Q = I is no change of basis, it is
a smaller family of models. Identity queries are the normalised input itself, larger than what a
new W_Q would make of it, so scores start larger. Three answers to that:

    unchanged   1/√width, scores start 1/(std·√d_model) times as large as in the full model
    paper       1/(2·√width): halved, about right at d_model 768
    spread      std·√d_model/√width: as large as in the full model, at any d_model
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headwise.reproduce.claim import Size, Values

if TYPE_CHECKING:
    from headwise.plan import Plan

Side = Literal["query", "key", "value"]
Scale = Literal["unchanged", "paper", "spread"]
INIT_STD = 0.02  # of GPT-2's weights
PAPER_DECAY, USUAL_DECAY = 0.03125, 0.1

SHAPE: dict[Size, dict[str, int]] = {
    "quick": {"n_layers": 2, "d_model": 32, "heads": 4},
    "full": {"n_layers": 4, "d_model": 96, "heads": 6},
}
TEXT: dict[Size, dict[str, int]] = {
    "quick": {"characters": 150_000, "vocab_size": 260, "context": 16},
    "full": {"characters": 8_000_000, "vocab_size": 1024, "context": 128},
}

# Dropout, on by default in GPT-2, is off as in the paper's recipe; GPT-2's own GELU in one kernel.
SETTINGS: dict[str, Any] = {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "activation_function": "gelu_pytorch_tanh",
}


@dataclass(frozen=True, slots=True)
class Block:
    """Which projection is gone, how scores are scaled, how wide the MLP is."""

    identity: Side | None = None
    scale: Scale = "spread"
    ffn_ratio: float = 4.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready parameters of a trial."""
        return {"identity": self.identity, "scale": self.scale, "ffn_ratio": self.ffn_ratio}


def block_plan(block: Block, sizes: Mapping[str, int], text: Mapping[str, int]) -> Plan:
    """The plan of a model of these blocks."""
    from headwise.plan import HeadSpec, LayerPlan, ModelShape, Plan

    d, heads, context = sizes["d_model"], sizes["heads"], text["context"]
    width = d // heads
    shape = ModelShape(
        family="gpt2",
        n_layers=sizes["n_layers"],
        d_model=d,
        context=context,
        n_heads=heads,
        n_kv_heads=heads,
        qk_dim=width,
        vo_dim=width,
        vocab_size=text["vocab_size"],
        learned_positions=context,
        ffn_dim=round(block.ffn_ratio * d),
        ffn_gated=False,
        ffn_biases=True,
        norm_biases=True,
    )
    head = HeadSpec(qk_dim=width, vo_dim=width, score_scale=score_scale(block, d, width))
    sides: dict[str, Any] = {block.identity: "identity"} if block.identity else {}
    layer = LayerPlan(heads=(head,) * heads, **sides)
    return Plan(shape=shape, layers=(layer,) * shape.n_layers)


def score_scale(block: Block, d_model: int, width: int) -> float:
    """What multiplies q·k."""
    usual = 1 / math.sqrt(width)
    if block.identity not in ("query", "key") or block.scale == "unchanged":
        return usual
    return usual / 2 if block.scale == "paper" else usual * INIT_STD * math.sqrt(d_model)


def trained_block(parameters: Mapping[str, Any], seed: int) -> Values:
    """A trial of either claim: the curve of held-out losses, and the parameters."""
    from headwise.planning.cost import cost
    from headwise.reproduce import scratch_training as scratch

    plan = block_plan(Block(**parameters["block"]), parameters["shape"], parameters["text"])
    model = scratch.text_model(plan, seed, **SETTINGS)
    source, course = scratch.Source(**parameters["text"]), scratch.Course(**parameters["course"])
    learned = scratch.learned_text(model, source, course, seed)
    spent = cost(plan)
    text = scratch.corpus(source.characters, source.vocab_size)
    return {
        **learned.values(),
        "attn_params": spent.attn_params,
        "total_params": spent.total_params,
        "frequency_loss": text.frequency_loss(source.vocab_size),
    }
