"""What training minimises. A loss takes the model and a batch and returns a mean over tokens.

Any callable `(model, batch) -> (loss, scalars)` serves the loop; `scalars` are further numbers
for the metrics, averaged like the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headwise.training.batches import Batch


@runtime_checkable
class Loss(Protocol):
    """A mean over the batch's tokens, and further scalars to record."""

    def __call__(self, model: nn.Module, batch: Batch, /) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of `model` on `batch`."""
        ...


def next_token_loss(model: nn.Module, batch: Batch, /) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Cross-entropy of the next token; logits in fp32, whatever the model computes in."""
    from torch.nn.functional import cross_entropy

    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten()), {}
