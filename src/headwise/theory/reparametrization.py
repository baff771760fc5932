"""Folding W_Q (or W_K, or W_V) into what precedes it, so that it becomes the identity.

Source: arXiv 2510.23912. The stream may be written in any basis: (X, W_Q, W_K, W_V) and
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
from typing import Literal

import numpy as np
from jaxtyping import Float64

from headwise.errors import TheoryError, did_you_mean
from headwise.theory.attention_stack import AttentionStack, StackLayer

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
