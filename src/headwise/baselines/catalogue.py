"""What `headwise compare` compares, and how; free of torch, for the command line's help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Counts = Literal["attn_params", "params"]  # what a comparison's budgets count

OURS, RECOVERED = "headwise", "headwise+recovery"
HEADS_ONLY = "headwise-attention"
_RECOVERY = "+recovery"


def policy_method(policy: str, *, recovered: bool = False) -> str:
    """The name of our method with the widths of a policy: `headwise:uniform`."""
    name = OURS if policy == "sensitivity" else f"{OURS}:{policy}"
    return f"{name}{_RECOVERY}" if recovered else name


def policy_of(method: str) -> str | None:
    """The policy that our method takes its widths from; None for the methods of others."""
    name = method.removesuffix(_RECOVERY)
    if name in (OURS, HEADS_ONLY):
        return "sensitivity"
    ours, _, policy = name.partition(":")
    return policy if ours == OURS and policy else None


def is_recovered(method: str) -> bool:
    """Whether a method trains after the cut."""
    return method.endswith(_RECOVERY)


def leaves_mlps(method: str) -> bool:
    """Whether a method of ours leaves MLPs whole, whatever the budget counts."""
    return method.removesuffix(_RECOVERY) == HEADS_ONLY


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """How cells are made and measured."""

    max_tokens: int | None = 16384  # of each text
    window: int | None = None  # None: the context, at most 1024
    multiple_of: int = 8  # of our widths; the rivals' are as fine as they can be
    ffn_multiple_of: int = 64  # of our MLP widths
    granularity: str = "layer"  # of our widths; those of the rivals that plan are free per head


@dataclass(frozen=True, slots=True)
class Method:
    """What a method does, and where it is from."""

    what: str
    source: str


METHODS: dict[str, Method] = {
    "svd-llm": Method(
        "each projection on its own: whitened by the second moment of its input, truncated to two "
        "factors, the same share of every matrix",
        "arXiv 2403.07378, truncation-aware whitening without its later fine-tuning",
    ),
    "clover": Method(
        "plain SVD of the products W_V·W_O and W_Q·W_K of every head group, uniform widths, no "
        "data; rotary planes by the norms of their weights",
        "arXiv 2411.17426, pruning without its fine-tuning",
    ),
    "magnitude": Method(
        "rotary planes, query-key columns and value dimensions of the largest squared weights in "
        "the whole model, no data",
        "structured magnitude pruning",
    ),
    "energy": Method(
        "rotary planes and whitened directions of the largest measured energy in the whole model",
        "the energy policy of `headwise plan fit`, directions by energy too",
    ),
    "head-pruning": Method(
        "whole query heads of the least |∂loss/∂gate|, scores normalised per layer; a key/value "
        "head goes with its last query head",
        "arXiv 1905.10650, in one step",
    ),
    "uniform": Method(
        "rotary planes and whitened directions of the largest measured energy in each head, "
        "uniform widths",
        "whitened truncation without sensitivity",
    ),
    "flap": Method(
        "query heads and neurons of the least fluctuation (variance of what enters W_O and W_down, "
        "times squared weights), standardised per layer; means of what goes become biases",
        "arXiv 2312.11983, structure AL-AM, metric WIFV",
    ),
    "llm-pruner": Method(
        "head groups and neurons of the least Σ|w · ∂loss/∂w|, the same share of every layer but "
        "the first eighth and the last sixteenth",
        "arXiv 2305.11627, block-wise first-order Taylor groups without its fine-tuning",
    ),
    "modegpt": Method(
        "neurons by leverage with W_down refitted (Nyström), planes and query-key columns by "
        "norms (CR), values by whitened SVD; shares by how much a layer changes its input",
        "arXiv 2408.09632",
    ),
    HEADS_ONLY: Method(
        "ours with the MLPs left whole: what cutting attention alone costs",
        "`headwise compress --no-cut-ffn`",
    ),
    OURS: Method(
        "directions and widths by the sensitivity of the loss, layers fitted one after another",
        "`headwise compress` with its default settings",
    ),
    RECOVERED: Method(
        "the same widths and directions, folded, then what was cut trained on the dense model's "
        "predictions",
        "`headwise compress --recover`",
    ),
}

_ATTENTION = ("svd-llm", "clover", "magnitude", "energy", "head-pruning", "uniform")
_WHOLE = ("svd-llm", "flap", "llm-pruner", "modegpt", "magnitude", HEADS_ONLY)
COMPARED: dict[Counts, tuple[str, ...]] = {  # under each kind of budget
    "attn_params": (*_ATTENTION, OURS, RECOVERED),
    "params": (*_WHOLE, policy_method("uniform"), OURS, RECOVERED),
}


def described(name: str) -> Method:
    """What a method does; ours with the widths of a policy is told by its name."""
    if name in METHODS:
        return METHODS[name]
    own = METHODS[RECOVERED if is_recovered(name) else OURS]
    return Method(
        f"widths by the policy {policy_of(name)}, everything else as in {OURS}: {own.what}",
        f"{own.source} --policy {policy_of(name)}",
    )
