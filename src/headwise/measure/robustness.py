"""The loss of a language model when its input is disturbed but its labels are not.

    input   the  cat  sat  on  the          labels stay those of the clean text
                  ▼
            the  ###  sat  on  the

- noise: a share of the input tokens is replaced by random ones.
- greedy swaps: one token after another is replaced by the one that hurts most. Gradients at the
  embeddings propose, (E_v − E_token)·∂loss/∂E to first order (HotFlip, Ebrahimi et al. 2018,
  arXiv 1712.06751); of the best proposals the one that raises the true loss most is used, and none
  if none raises it. The result is a lower bound on the harm of the best possible attack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Attack:
    """Swaps per sequence, and proposals that are tried for each."""

    swaps: int
    proposals: int = 8


def noisy(
    inputs: Int[Tensor, "batch length"], share: float, vocab_size: int, seed: int
) -> Int[Tensor, "batch length"]:
    """A share of the tokens of every sequence (rounded) replaced by other, equally likely ones."""
    rng = np.random.default_rng(seed)
    made = inputs.clone()
    count = round(share * inputs.shape[1])
    for row in made:
        places = torch.from_numpy(rng.permutation(len(row))[:count])
        # A step of 1 … vocab_size − 1 around the circle never lands on the token itself.
        steps = torch.from_numpy(rng.integers(1, vocab_size, count))
        row[places] = (row[places] + steps) % vocab_size
    return made


@torch.no_grad()
def sequence_losses(
    model: Any, inputs: Int[Tensor, "batch length"], labels: Int[Tensor, "batch length"]
) -> Float[Tensor, " batch"]:
    """Mean nats per token of every sequence."""
    return _losses(model(input_ids=inputs, use_cache=False).logits, labels)


def greedily_swapped(
    model: Any,
    inputs: Int[Tensor, "batch length"],
    labels: Int[Tensor, "batch length"],
    attack: Attack,
) -> Int[Tensor, "batch length"]:
    """The inputs after the swaps; every position is swapped at most once."""
    made = inputs.clone()
    for row, target in zip(made, labels, strict=True):
        free = torch.ones(len(row), dtype=torch.bool)
        for _ in range(min(attack.swaps, len(row))):
            places, tokens = _proposals(model, row, target, free, attack.proposals)
            tried = row.repeat(len(places), 1)
            tried[torch.arange(len(places)), places] = tokens
            both = torch.cat([row[None], tried])
            losses = sequence_losses(model, both, target.expand(len(both), -1))
            best = int(losses.argmax())
            if best == 0:
                break
            row.copy_(both[best])
            free[places[best - 1]] = False
    return made


def _proposals(
    model: Any,
    row: Int[Tensor, " length"],
    target: Int[Tensor, " length"],
    free: Tensor,
    count: int,
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Places and tokens of the swaps that promise most to first order."""
    table = model.get_input_embeddings().weight.detach()
    embedded = table[row].clone().requires_grad_()
    with torch.enable_grad():
        logits = model(inputs_embeds=embedded[None], use_cache=False).logits
        loss = _losses(logits, target[None]).sum()
        (slope,) = torch.autograd.grad(loss, embedded)
    gain = slope @ table.mT - (slope * embedded.detach()).sum(-1, keepdim=True)
    gain[~free] = -torch.inf
    gain[torch.arange(len(row)), row] = -torch.inf
    chosen = gain.flatten().topk(min(count, gain.numel())).indices
    return chosen // len(table), chosen % len(table)


def _losses(
    logits: Float[Tensor, "batch length vocab"], labels: Int[Tensor, "batch length"]
) -> Float[Tensor, " batch"]:
    flat = functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), reduction="none"
    )
    return flat.view(labels.shape).mean(1)
