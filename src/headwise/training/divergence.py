"""The loss of recovery, a few tokens at a time.

    logits of both models ─► rows ─► divergence + share · next-token loss, and their gradient

The logits of one window are tokens × vocabulary: for a small model with a large vocabulary, ten
copies of them in float32 (two log-softmaxes, their exponentials, the gradients) take longer than
the model itself. Here the gradient is computed with the loss, for as many rows as a processor's
cache holds, and kept in the logits' own format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Numbers of one piece in float32: what a cache holds on a CPU; a GPU wants larger pieces.
ON_CPU, ON_ACCELERATOR = 2**19, 2**26


def divergence(
    logits: Tensor, targets: Tensor, labels: Tensor, *, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(targets ‖ logits) + share · next-token loss, and both terms, each a mean over tokens.

    `logits` and `targets` (the teacher's logits) are tokens × vocabulary (any axes before the
    last), `labels` the next tokens. Only the first result has a gradient, and only to `logits`.
    """
    size = logits.size(-1)
    loss, kl, nll = _Divergence.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, size), targets.reshape(-1, size), labels.reshape(-1), share
    )
    return loss, kl, nll


class _Divergence(torch.autograd.Function):
    """Forward computes the gradient too, so that the rows are read once."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, wanted: Tensor, labels: Tensor, share: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, size = given.shape
        wants_gradient = ctx.needs_input_grad[0]
        gradient = torch.empty_like(given) if wants_gradient else None
        kl = torch.zeros((), device=given.device)
        nll = torch.zeros((), device=given.device)
        rows = max(1, (ON_CPU if given.device.type == "cpu" else ON_ACCELERATOR) // size)
        rows = min(rows, tokens)
        # Reused: fresh memory costs more than the sums.
        pieces = torch.empty(4, rows, size, dtype=torch.float32, device=given.device)
        for i in range(0, tokens, rows):
            here = slice(i, min(i + rows, tokens))
            raw, target, logs, chance = pieces[:, : here.stop - here.start]
            torch.log_softmax(raw.copy_(wanted[here]), -1, out=target)
            torch.log_softmax(raw.copy_(given[here]), -1, out=logs)
            torch.exp(target, out=chance)
            label = labels[here, None]
            nll -= logs.gather(1, label).sum()
            kl += target.sub_(logs).mul_(chance).sum()
            if gradient is not None:
                slope = logs.exp_().mul_(1 + share).sub_(chance)
                slope.scatter_add_(1, label, slope.new_full(label.shape, -share))
                gradient[here] = slope.mul_(1 / tokens)
        kl, nll = kl / tokens, nll / tokens
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(kl, nll)
        return kl + share * nll, kl, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(gradients[0]), None, None, None  # in place: it is used once
