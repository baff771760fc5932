"""Records the layers of a model during one forward and one backward pass.

    q_proj ─► (norm) ─► q ─┐                                q, k: before the rotary positions
    k_proj ─► (norm) ─► k ─┴─► scores ─► softmax ─┐
    v_proj ──────────────────────────────────────┴─► z ─► o_proj

Forward: second moments and sums of q, k and z, and a few rows of the softmax. Backward: the
gradients at z and q, at once contracted with z and q over the tokens of a sequence s,

    M_s = Σ_t z_tᵀ·∂L_s/∂z_t          (dim × dim per head group, its query heads added)

which gives the derivative by a gate on *any* direction: with z' = z·encode·diag(γ)·decode,
∂L_s/∂γ_i = Σ_t (z_t·encode[:, i])·(∂L_s/∂z_t·decode[i]) = (encodeᵀ·M_s·decodeᵀ)_ii. The same holds
for q with encode_q and encode_kᵀ. A rotary plane is scaled by its gate, before or after the
rotation alike, so the trace of M_s over its two columns is its derivative.

Neurons of the MLP have gates of their own, where they enter the down-projection:
∂L_s/∂γ_i = Σ_t n_ti·∂L_s/∂n_ti.

Only the gradients of activations are computed: parameters need none.

The saturation of the attention is measured on a few rows of every head, at context lengths 4, 8,
16, … Position t of a causal model attends to t + 1 tokens, so one sequence shows all lengths up to
its own. Only these rows are computed again, in double precision, from the rotated queries and
keys: a handful of positions instead of `length`. In an encoder every position attends to all
tokens, so its rows all have the same length, and the same few positions are averaged.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.models.attention_headwise import HeadwiseAttention
from headwise.models.backbones_headwise import family_of, stock_attentions
from headwise.models.build import inner
from headwise.models.heads_headwise import HeadClass
from headwise.theory.saturation import jacobian_norm

Chunk = dict[str, Tensor]
Heads = Float[Tensor, "batch length groups queries dim"]


@contextmanager
def recording(model: Any, lengths: tuple[int, ...]) -> Iterator[Chunk]:
    """While open, one forward and one backward fill the yielded chunk."""
    chunk: Chunk = {}
    wanted = [p for p in model.parameters() if p.requires_grad]
    with ExitStack() as undo:
        undo.callback(_ask, wanted, True)
        _ask(wanted, False)
        embeddings = model.get_input_embeddings()
        undo.callback(embeddings.register_forward_hook(_start_of_gradients).remove)
        stock = inner(model)
        down = family_of(stock.config.model_type).mlp.down
        for i, (owner, attention) in enumerate(stock_attentions(stock)):
            _listen(_Layer(attention, i, lengths, chunk), owner.get_submodule(down), undo)
        yield chunk


def _ask(parameters: list[Any], gradient: bool) -> None:
    for p in parameters:
        p.requires_grad_(gradient)


def _start_of_gradients(module: Any, args: Any, output: Tensor) -> Tensor:
    return output.detach().requires_grad_()


class _Layer:
    """What is written down about one layer."""

    batch: int  # sequences, as the attention has seen them

    def __init__(
        self, attention: HeadwiseAttention, index: int, lengths: tuple[int, ...], chunk: Chunk
    ) -> None:
        self.attention, self.prefix, self.lengths, self.chunk = (
            attention,
            f"{index}.",
            lengths,
            chunk,
        )
        if len(attention.classes) != 1:
            raise HeadwiseError(
                f"layer {index} has heads of different kinds, but a profile needs layers whose "
                "heads are alike; profile the dense model."
            )
        self.heads: HeadClass = attention.classes[0]

    def apart(self, x: Tensor, dim: int) -> Heads:
        """Head groups and their query heads on axes of their own, in float32 or better."""
        wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        return wide.reshape(*x.shape[:2], self.heads.n_heads, -1, dim)

    def moments(self, name: str, x: Heads) -> None:
        """Sums over the chunk's tokens: of x, and of xᵀx with the group's query heads added."""
        rows = x.permute(2, 0, 1, 3, 4).flatten(1, 3)
        self.chunk[f"{self.prefix}{name}_moment"] = rows.mT @ rows
        self.chunk[f"{self.prefix}{name}_sum"] = x.sum((0, 1)).flatten(0, 1)

    def score(self, module: Any, args: Any, output: Tensor, *, name: str) -> None:
        """Hook on the last module before the rotary positions."""
        x = self.apart(output, self.heads.qk_dim)
        self.moments(name, x)
        if name == "q":
            output.register_hook(partial(self.score_gradient, x))

    def score_gradient(self, q: Heads, gradient: Tensor) -> None:
        """∂L_s/∂gate of every plane, and M_s of the columns without positions."""
        rotary = self.heads.rotary_dim
        g = self.apart(gradient, self.heads.qk_dim)
        if rotary:
            columns = (q[..., :rotary] * g[..., :rotary]).sum((1, 3))
            planes = columns.unflatten(-1, (2, rotary // 2)).sum(-2)
            self.chunk[f"{self.prefix}plane_gradient"] = planes
        if rotary < self.heads.qk_dim:
            self.chunk[f"{self.prefix}free_gradient"] = _contracted(
                q[..., rotary:], g[..., rotary:]
            )

    def output(self, module: Any, args: tuple[Tensor]) -> None:
        """Hook before the output projection, where z enters."""
        self.batch = len(args[0])
        z = self.apart(args[0], self.heads.vo_dim)
        self.moments("z", z)
        args[0].register_hook(partial(self.output_gradient, z))

    def output_gradient(self, z: Heads, gradient: Tensor) -> None:
        """M_s of z, and Σ_t ∂L_s/∂z_t per query head, which centring z needs."""
        g = self.apart(gradient, self.heads.vo_dim)
        self.chunk[f"{self.prefix}vo_gradient"] = _contracted(z, g)
        self.chunk[f"{self.prefix}vo_gradient_sum"] = g.sum(1).flatten(1, 2)

    def neurons(self, module: Any, args: tuple[Tensor]) -> None:
        """Hook before the down-projection, where the neurons enter."""
        n = self.by_sequence(args[0])
        self.chunk[f"{self.prefix}ffn_power"] = n.square().sum((0, 1))
        self.chunk[f"{self.prefix}ffn_sum"] = n.sum((0, 1))
        args[0].register_hook(partial(self.neuron_gradient, n))

    def neuron_gradient(self, n: Tensor, gradient: Tensor) -> None:
        """∂L_s/∂gate of every neuron."""
        self.chunk[f"{self.prefix}ffn_gradient"] = (n * self.by_sequence(gradient)).sum(1)

    def by_sequence(self, x: Tensor) -> Tensor:
        """Sequences on an axis of their own, which some MLPs (OPT) have laid side by side."""
        wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        return wide.reshape(self.batch, -1, x.shape[-1])

    def attended(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        """In place of the heads' own method: a look at some rows, then the method itself."""
        with torch.no_grad():
            window = self.attention.sliding_window
            rows = row_statistics(self.heads, query, key, self.lengths, window)
        for name, sums in rows.items():
            self.chunk[f"{self.prefix}{name}"] = sums
        return HeadClass.forward(self.heads, query, key, *args, **kwargs)


def _contracted(x: Heads, g: Heads) -> Float[Tensor, "batch groups dim dim"]:
    x, g = (y.permute(0, 2, 1, 3, 4).flatten(2, 3) for y in (x, g))
    return x.mT @ g


def _listen(layer: _Layer, down: Any, undo: ExitStack) -> None:
    attention: Any = layer.attention
    for name in ("q", "k"):
        last = getattr(attention, f"{name}_norm", None) or getattr(attention, f"{name}_proj")
        undo.callback(last.register_forward_hook(partial(layer.score, name=name)).remove)
    undo.callback(attention.o_proj.register_forward_pre_hook(layer.output).remove)
    undo.callback(down.register_forward_pre_hook(layer.neurons).remove)
    layer.heads.forward = layer.attended  # type: ignore[method-assign]
    undo.callback(delattr, layer.heads, "forward")


ROW_STATISTICS = ("entropy", "jacobian_norm", "score_spread")


def row_statistics(
    head_class: HeadClass,
    query: Float[Tensor, "batch heads length dim"],
    key: Float[Tensor, "batch groups length dim"],
    lengths: tuple[int, ...],
    window: int | None,
) -> dict[str, Float[Tensor, "lengths heads"]]:
    """Entropy (nats), ‖J‖ and the scores' standard deviation over keys, summed over the batch."""
    grouped = query.unflatten(1, (head_class.n_heads, head_class.queries))
    exact = torch.float32 if query.device.type == "mps" else torch.float64
    found: dict[str, list[Tensor]] = {name: [] for name in ROW_STATISTICS}
    for length in lengths:
        keys = key
        if head_class.is_causal:
            keys = key[:, :, max(0, length - (window or length)) : length]
        row = grouped[:, :, :, length - 1]
        scores = (row.to(exact) @ keys.to(exact).transpose(-1, -2)) * head_class.scaling
        p = scores.softmax(-1)
        found["entropy"].append(torch.special.entr(p).sum(-1))
        found["jacobian_norm"].append(jacobian_norm(p))
        found["score_spread"].append(scores.std(-1, correction=0))
    stacked = {name: torch.stack(rows).sum(1).flatten(1) for name, rows in found.items()}
    if not head_class.is_causal:
        stacked = {name: x.mean(0, keepdim=True) for name, x in stacked.items()}
    return stacked
