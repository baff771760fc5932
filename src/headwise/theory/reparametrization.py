"""Folding W_Q (or W_K, or W_V) into what precedes it, so that it becomes the identity.

The stack: plain float64 attention, the smallest thing on which exact rewritings can be shown.
Rows are tokens and weights act from the right, as in `X·W_Q`. One layer, with its two skips:

    X ─┬─ norm ─ attention(W_Q, W_K, W_V)·W_O ─ + ─┬─ norm ─ relu(·W_up)·W_down ─ + ─► next layer
       └────────── skip (attention) ────────────┘  └──────── skip (mlp) ──────────┘

Token and position embeddings come before the first layer, an untied unembedding after the last.
There are no biases. The query/key width and the value width need not equal d_model.

The folding (arXiv 2510.23912): the stream may be written in any basis: (X, W_Q, W_K, W_V) and
(XΘ, Θ⁻¹W_Q, Θ⁻¹W_K, Θ⁻¹W_V) give the same queries, keys and values, and Θ = W_Q leaves W_Q = I.

All cases are one mechanism. Every point of the stream has a basis: B_l where layer l reads, M_l
between its attention and its MLP, B_{l+1} behind it.

    E·B_0 ─► [B_0⁻¹W_QKV … W_O·M_0] ─► [M_0⁻¹W_up … W_down·B_1] ─► … ─► B_L⁻¹·U

Folding asks for B_l = W_Q of layer l. A skip carries the stream unchanged, so it asks for equal
bases at its two ends: around attention B_l = M_l, around the MLP M_l = B_{l+1}. Hence

  * one layer: any arrangement of skips;
  * a skip around only the attention (or only the MLP, or none): any number of layers;
  * both skips: all bases are one, so the W_Q of all layers must be equal (shared weights).

A norm commutes with no general Θ, so there must be none. Any element-wise activation will do, as
no basis is changed inside the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64, Int

from headwise.errors import TheoryError, did_you_mean

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


def attention_scores(
    layer: StackLayer, X: Float64[np.ndarray, "*batch n d"], heads: int
) -> Float64[np.ndarray, "*batch heads n n"]:
    """The logits of every head's softmax, without a mask: X·W_Q·W_Kᵀ·Xᵀ/√width.

    They are bilinear in W_Q and W_K, so quadratic in the weights; with W_Q = I they are linear.
    """
    q, k = _by_head(X @ layer.W_Q, heads), _by_head(X @ layer.W_K, heads)
    return np.asarray(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))


def _by_head(Y: np.ndarray, heads: int) -> np.ndarray:
    """(*batch, n, width) as (*batch, heads, n, width/heads)."""
    return np.asarray(Y.reshape(*Y.shape[:-1], heads, -1).swapaxes(-2, -3))


def _attention(
    layer: StackLayer, X: Float64[np.ndarray, "*batch n d"], heads: int, causal: bool
) -> Float64[np.ndarray, "*batch n d"]:
    n = X.shape[-2]
    scores = attention_scores(layer, X, heads)
    if causal:
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    z = (weights @ _by_head(X @ layer.W_V, heads)).swapaxes(-2, -3)
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


Which = Literal["query", "key", "value"]

# Folding multiplies rounding errors by about the condition number of Θ: 1e-16 · 1e5 leaves the
# outputs equal to better than 1e-10.
CONDITION_LIMIT = 1e5


@dataclass(frozen=True, slots=True, eq=False)
class StreamBases:
    """The basis at each point of the stream: before layer l, inside it, and behind the last."""

    entries: tuple[Float64[np.ndarray, "d d"], ...]
    middles: tuple[Float64[np.ndarray, "d d"], ...]


@dataclass(frozen=True, slots=True)
class SavedShare:
    """The part of the parameters that an identity saves, in attention and in the whole blocks."""

    attention: float
    block: float


def fold(stack: AttentionStack, which: Which = "query") -> AttentionStack:
    """An equal stack in which the chosen projection of every layer is the identity.

    Raises TheoryError, with the reason, where the arrangement or the weights do not allow it.
    """
    name = _field(which)
    if stack.norm != "none":
        raise TheoryError(
            f"Folding {name} needs a stack without normalisation, got norm={stack.norm!r}, which "
            f"does not commute with a change of basis; remove the norm, or train with {name} = I."
        )
    bases = _wished_bases(stack, name)
    for index in range(len(stack.layers) - 1):
        here, behind = bases.entries[index], bases.entries[index + 1]
        if stack.skip == "both" and not np.array_equal(here, behind):
            raise TheoryError(
                f"Folding {name} with skips around both attention and MLP needs one {name} for "
                f"all layers, got different ones in layers {index} and {index + 1}; share the "
                "weights, remove one of the skips, or fold a stack of a single layer."
            )
    return _folded(stack, name, bases)


def forced_fold(stack: AttentionStack, which: Which = "query") -> AttentionStack:
    """What folding gives where it is not allowed: each layer gets its own basis regardless.

    It exists to show how wrong that is; where `fold` is allowed the two agree.
    """
    name = _field(which)
    return _folded(stack, name, _wished_bases(stack, name))


def rebased(stack: AttentionStack, bases: StreamBases) -> AttentionStack:
    """The stack with its stream written in other bases.

    Equal to the given one if there is no norm and each skip has the same basis at both ends.
    """
    entries, middles = bases.entries, bases.middles
    if (len(entries), len(middles)) != (len(stack.layers) + 1, len(stack.layers)):
        raise TheoryError(
            f"Expected {len(stack.layers) + 1} bases at the entries and {len(stack.layers)} in "
            f"the middles, got {len(entries)} and {len(middles)}; give one basis per point."
        )
    layers = tuple(
        _rebased_layer(layer, entry, middle, behind)
        for layer, entry, middle, behind in zip(
            stack.layers, entries[:-1], middles, entries[1:], strict=True
        )
    )
    return replace(
        stack,
        embedding=stack.embedding @ entries[0],
        positions=stack.positions @ entries[0],
        layers=layers,
        unembedding=np.linalg.solve(entries[-1], stack.unembedding),
    )


def saved_share(stack: AttentionStack, which: Which = "query") -> SavedShare:
    """The share of weights that disappears when the chosen projection becomes the identity.

    Counted per use of a layer; embeddings are not part of a block.
    """
    name = _field(which)
    saved = sum(getattr(layer, name).size for layer in stack.layers)
    attention = sum(
        W.size for layer in stack.layers for W in (layer.W_Q, layer.W_K, layer.W_V, layer.W_O)
    )
    mlp = sum(layer.W_up.size + layer.W_down.size for layer in stack.layers)
    return SavedShare(attention=saved / attention, block=saved / (attention + mlp))


def _field(which: str) -> str:
    names = {"query": "W_Q", "key": "W_K", "value": "W_V"}
    if which not in names:
        raise TheoryError(
            f"Expected one of query, key, value, got {which!r}; {did_you_mean(which, names)}"
        )
    return names[which]


def _wished_bases(stack: AttentionStack, name: str) -> StreamBases:
    """Each layer's own weight as its basis; if any bases satisfy all wishes and skips, these do.

    The point behind the last layer is free: it repeats the last basis, so that layers which
    share their weights still share them after folding.
    """
    own = tuple(_basis(getattr(layer, name), name, i) for i, layer in enumerate(stack.layers))
    entries = (*own, own[-1])
    if stack.skip in ("both", "attention"):
        return StreamBases(entries, entries[:-1])
    if stack.skip == "mlp":
        return StreamBases(entries, entries[1:])
    return StreamBases(entries, (np.eye(own[0].shape[0]),) * len(own))


def _basis(
    W: Float64[np.ndarray, "d width"], name: str, index: int
) -> Float64[np.ndarray, "d width"]:
    rows, columns = W.shape
    if rows != columns:
        raise TheoryError(
            f"Folding {name} needs it square with all heads side by side, got {rows} × {columns} "
            f"in layer {index}; use heads whose widths sum to d_model, or fold another projection."
        )
    if not np.isfinite(W).all():
        raise TheoryError(
            f"Expected finite weights in {name} of layer {index}, got nan or infinity; "
            "check where the weights come from."
        )
    condition = float(np.linalg.cond(W))
    if not condition <= CONDITION_LIMIT:
        raise TheoryError(
            f"Folding {name} needs it invertible with a condition number up to "
            f"{CONDITION_LIMIT:.0e}, got {condition:.1e} in layer {index}; fold another "
            "projection, or leave this one as it is."
        )
    return W


def _rebased_layer(
    layer: StackLayer,
    entry: Float64[np.ndarray, "d d"],
    middle: Float64[np.ndarray, "d d"],
    behind: Float64[np.ndarray, "d d"],
) -> StackLayer:
    return StackLayer(
        W_Q=np.linalg.solve(entry, layer.W_Q),
        W_K=np.linalg.solve(entry, layer.W_K),
        W_V=np.linalg.solve(entry, layer.W_V),
        W_O=layer.W_O @ middle,
        W_up=np.linalg.solve(middle, layer.W_up),
        W_down=layer.W_down @ behind,
    )


def _folded(stack: AttentionStack, name: str, bases: StreamBases) -> AttentionStack:
    """The rebased stack, its folded weight being exactly I where solving gives I up to rounding."""
    new = rebased(stack, bases)
    identity = np.eye(new.embedding.shape[1])
    return replace(new, layers=tuple(replace(layer, **{name: identity}) for layer in new.layers))
