"""What `headwise compare` compares, and how; free of torch, for the command line's help."""

from __future__ import annotations

from dataclasses import dataclass

OURS, RECOVERED = "headwise", "headwise+recovery"


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """How cells are made and measured."""

    max_tokens: int | None = 16384  # of each text
    window: int | None = None  # None: the context, at most 1024
    multiple_of: int = 8  # of our widths; the rivals' are as fine as they can be
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
    OURS: Method(
        "directions and widths by the sensitivity of the loss, layers fitted one after another",
        "`headwise compress` with its default settings",
    ),
    RECOVERED: Method(
        "the same, then the attention trained on the dense model's predictions",
        "`headwise compress --recover`",
    ),
}
