"""What the sensitivities are sensitivities of: one number per sequence, by the kind of model.

    next-token    L_s = Σ_t −log p(token t+1)                     n_s = predicted tokens
    masked-token  L_s = Σ −log p(token) over 15% masked tokens    n_s = masked tokens
    label         L_s = −log p(label), label ~ p                  n_s = 1
    embedding     L_s = r_s · e_s, r_s ~ N(0, I)                  n_s = 1
                  e_s = the mean of the last hidden states, of length 1

With g = ∂L_s/∂gate, the mean over sequences of g²/n_s is a diagonal Fisher: for the two losses,
whose token gradients are uncorrelated at the data's own distribution, it stands for the second
derivative of the mean loss per token. A classifier needs no true labels: with labels drawn from its
own answer, E[g²] is the Fisher itself, and half the sum over dropped gates predicts the divergence
of the answers. A model without a head has no loss. There E_r[g²] is
‖∂e/∂gate‖², so half the sum over dropped gates predicts ½‖Δe‖², which for vectors of length 1 is
1 − cosine: again "what is lost", in the unit encoders are judged by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional

Objective = Literal["next-token", "masked-token", "label", "embedding"]
MASKED_SHARE = 0.15
_IGNORED = -100

# The L_s of a batch that was run, and the n_s.
Losses = Callable[[Any], tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]]


@dataclass(frozen=True, slots=True)
class Probe:
    """A batch for the model, and how its answer becomes one number per sequence."""

    inputs: Shaped[Tensor, "batch ..."]
    losses: Losses


def probe(
    objective: Objective,
    inputs: Shaped[Tensor, "batch ..."],
    numbers: tuple[int, ...],
    seed: int,
    mask_token: int | None = None,
) -> Probe:
    """The batch of sequences (or images) that have these `numbers` in the text.

    Masks, labels and random directions depend on the seed and the sequence's number only, never on
    which sequences run together.
    """
    if objective == "next-token":
        return Probe(inputs, lambda out: _token_losses(out.logits[:, :-1], inputs[:, 1:]))
    if objective == "masked-token":
        assert mask_token is not None
        labels = _labels(inputs, numbers, seed)
        masked = torch.where(labels == _IGNORED, inputs, mask_token)
        return Probe(masked, lambda out: _token_losses(out.logits, labels))
    if objective == "label":
        return Probe(inputs, lambda out: _label_losses(out.logits, numbers, seed))
    return Probe(inputs, lambda out: _projections(out.last_hidden_state, numbers, seed))


def _token_losses(
    logits: Float[Tensor, "batch length vocab"], targets: Int[Tensor, "batch length"]
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    targets = targets.to(logits.device)
    # The softmax of low-precision logits is taken in float32.
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = functional.cross_entropy(
        wide.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=_IGNORED
    )
    return losses.view_as(targets).sum(1), (targets != _IGNORED).sum(1).to(wide.dtype)


def _labels(
    ids: Int[Tensor, "batch length"], numbers: tuple[int, ...], seed: int
) -> Int[Tensor, "batch length"]:
    """The tokens to be predicted; the first and the last, which encoders reserve, never are."""
    labels = torch.full_like(ids, _IGNORED)
    inside = ids.shape[1] - 2
    count = max(1, round(MASKED_SHARE * inside))
    for row, number in enumerate(numbers):
        chosen = torch.randperm(inside, generator=_generator(seed, number))[:count] + 1
        labels[row, chosen] = ids[row, chosen]
    return labels


def _label_losses(
    logits: Float[Tensor, "batch labels"], numbers: tuple[int, ...], seed: int
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    answers = wide.detach().softmax(-1).cpu()
    drawn = [
        torch.multinomial(p, 1, generator=_generator(seed, n))
        for p, n in zip(answers, numbers, strict=True)
    ]
    losses = functional.cross_entropy(wide, torch.cat(drawn).to(wide.device), reduction="none")
    return losses, torch.ones_like(losses)


def _projections(
    hidden: Float[Tensor, "batch length d"], numbers: tuple[int, ...], seed: int
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    embedding = functional.normalize(wide.mean(1), dim=-1)
    rows = [torch.randn(hidden.shape[-1], generator=_generator(seed, n)) for n in numbers]
    directions = torch.stack(rows).to(embedding)
    return (embedding * directions).sum(1), torch.ones_like(embedding[:, 0])


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + number)
