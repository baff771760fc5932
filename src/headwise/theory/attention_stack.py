"""A plain float64 attention stack: the smallest thing on which exact rewritings can be shown.

Rows are tokens and weights act from the right, as in `X·W_Q`. One layer, with its two skips:

    X ─┬─ norm ─ attention(W_Q, W_K, W_V)·W_O ─ + ─┬─ norm ─ relu(·W_up)·W_down ─ + ─► next layer
       └────────── skip (attention) ────────────┘  └──────── skip (mlp) ──────────┘

Token and position embeddings come before the first layer, an untied unembedding after the last.
There are no biases. The query/key width and the value width need not equal d_model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64, Int

from headwise.errors import TheoryError

Skip = Literal["both", "attention", "mlp", "none"]
Norm = Literal["none", "rms"]


@dataclass(frozen=True, slots=True, eq=False)
class StackLayer:
    """The weights of one block; the heads lie side by side in the columns of W_Q, W_K and W_V."""

    W_Q: Float64[np.ndarray, "d_model qk_width"]
    W_K: Float64[np.ndarray, "d_model qk_width"]
    W_V: Float64[np.ndarray, "d_model vo_width"]
    W_O: Float64[np.ndarray, "vo_width d_model"]
    W_up: Float64[np.ndarray, "d_model hidden"]
    W_down: Float64[np.ndarray, "hidden d_model"]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionStack:
    """Embeddings, layers and unembedding, with the arrangement of skips and norms between them."""

    embedding: Float64[np.ndarray, "vocab d_model"]
    positions: Float64[np.ndarray, "context d_model"]
    layers: tuple[StackLayer, ...]
    unembedding: Float64[np.ndarray, "d_model out"]
    heads: int
    skip: Skip = "both"
    norm: Norm = "none"
    causal: bool = True

    def __post_init__(self) -> None:
        _check_arrangement(self.skip, self.norm)
        if not self.layers:
            raise TheoryError("Expected at least one layer, got none; give the stack a layer.")
        for index, layer in enumerate(self.layers):
            _check_layer(index, layer, self.embedding.shape[1], self.heads)


def _check_arrangement(skip: str, norm: str) -> None:
    if skip not in get_args(Skip) or norm not in get_args(Norm):
        raise TheoryError(
            f"Expected skip among {', '.join(get_args(Skip))} and norm among "
            f"{', '.join(get_args(Norm))}, got skip={skip!r} and norm={norm!r}; choose one of each."
        )


def _check_layer(index: int, layer: StackLayer, d_model: int, heads: int) -> None:
    qk_width, vo_width, hidden = layer.W_Q.shape[1], layer.W_V.shape[1], layer.W_up.shape[1]
    expected = {
        "W_Q": (d_model, qk_width),
        "W_K": (d_model, qk_width),
        "W_V": (d_model, vo_width),
        "W_O": (vo_width, d_model),
        "W_up": (d_model, hidden),
        "W_down": (hidden, d_model),
    }
    for name, shape in expected.items():
        came = getattr(layer, name).shape
        if came != shape:
            raise TheoryError(
                f"Expected {name} of layer {index} to have shape {shape}, got {came}; "
                "make its shape fit its neighbours."
            )
    if heads < 1 or qk_width % heads or vo_width % heads:
        raise TheoryError(
            f"Expected a number of heads that divides the query width {qk_width} and the value "
            f"width {vo_width} of layer {index}, got {heads}; change the heads or the widths."
        )


def logits(
    stack: AttentionStack, tokens: Int[np.ndarray, "*batch n"]
) -> Float64[np.ndarray, "*batch n out"]:
    """The stack's output for every token; all the rewritings of this package must keep it."""
    n, context = tokens.shape[-1], stack.positions.shape[0]
    if n > context:
        raise TheoryError(
            f"Expected at most {context} tokens, the rows of the position table, got {n}; "
            "shorten the sequence or enlarge the table."
        )
    X = stack.embedding[tokens] + stack.positions[:n]
    for layer in stack.layers:
        mixed = _attention(layer, _normed(X, stack.norm), stack.heads, stack.causal)
        X = mixed + X if stack.skip in ("both", "attention") else mixed
        mlp = np.maximum(_normed(X, stack.norm) @ layer.W_up, 0.0) @ layer.W_down
        X = mlp + X if stack.skip in ("both", "mlp") else mlp
    return np.asarray(_normed(X, stack.norm) @ stack.unembedding)


def _normed(X: Float64[np.ndarray, "*rows d"], norm: Norm) -> Float64[np.ndarray, "*rows d"]:
    """Root-mean-square norm; its gain is left out, as it could be part of the next weights."""
    if norm == "none":
        return X
    return np.asarray(X / np.sqrt(np.mean(X**2, axis=-1, keepdims=True) + 1e-6))


def _attention(
    layer: StackLayer, X: Float64[np.ndarray, "*batch n d"], heads: int, causal: bool
) -> Float64[np.ndarray, "*batch n d"]:
    n = X.shape[-2]

    def split(W: np.ndarray) -> np.ndarray:  # (*batch, n, width) -> (*batch, heads, n, width/heads)
        return np.asarray((X @ W).reshape(*X.shape[:-1], heads, -1).swapaxes(-2, -3))

    q, k, v = split(layer.W_Q), split(layer.W_K), split(layer.W_V)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    z = (weights @ v).swapaxes(-2, -3)
    return np.asarray(z.reshape(*X.shape[:-1], -1) @ layer.W_O)


def random_stack(
    seed: int,
    *,
    d_model: int = 15,
    heads: int = 3,
    n_layers: int = 2,
    hidden: int = 60,
    vocab: int = 13,
    context: int = 11,
    skip: Skip = "both",
    norm: Norm = "none",
    causal: bool = True,
    shared: bool = False,
) -> AttentionStack:
    """A stack of Gaussian weights of variance 1/rows; `shared` uses one layer's weights for all."""
    rng = np.random.default_rng(seed)

    def draw(rows: int, columns: int) -> np.ndarray:
        return np.asarray(rng.standard_normal((rows, columns)) / np.sqrt(rows))

    def draw_layer() -> StackLayer:
        W_Q, W_K, W_V, W_O = (draw(d_model, d_model) for _ in range(4))
        return StackLayer(W_Q, W_K, W_V, W_O, draw(d_model, hidden), draw(hidden, d_model))

    layers = (draw_layer(),) * n_layers if shared else tuple(draw_layer() for _ in range(n_layers))
    return AttentionStack(
        embedding=rng.standard_normal((vocab, d_model)),
        positions=rng.standard_normal((context, d_model)),
        layers=layers,
        unembedding=draw(d_model, vocab),
        heads=heads,
        skip=skip,
        norm=norm,
        causal=causal,
    )
