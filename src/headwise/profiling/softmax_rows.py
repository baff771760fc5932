"""How saturated the attention is: a few rows of every head, at context lengths 4, 8, 16, …

Position t of a causal model attends to t + 1 tokens, so one sequence shows all lengths up to its
own. Only the rows asked for are computed again, in double precision, from the rotated queries and
keys: a handful of positions instead of `length`. An encoder attends to everything from everywhere,
so its rows all have one length, and the same few positions are averaged.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from headwise.models.heads_headwise import HeadClass
from headwise.theory.saturation import jacobian_norm

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
