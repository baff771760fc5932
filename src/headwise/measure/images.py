"""An image model against the one it was made from, on the same images.

    cosine          between both models' embeddings, the means of the last hidden states
    top agreement   of a classifier: whether both rank the same class first
    kl              of a classifier: Σ p·log(p/q) over the classes, p the reference's

The mean is over images.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float16

from headwise.data.images import PIXELS
from headwise.errors import HeadwiseError
from headwise.measure.likelihood import Tick

if TYPE_CHECKING:
    from torch import Tensor

AT_ONCE = 16  # images run together


@dataclass(frozen=True, slots=True)
class ImageComparison:
    """What became of every image."""

    cosines: tuple[float, ...]
    agreed: tuple[bool, ...]  # on the first class; empty without classes
    divergences: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Means and the worst, JSON-ready."""
        n = len(self.cosines)
        found: dict[str, Any] = {
            "images": n,
            "cosine": math.fsum(self.cosines) / n,
            "least_cosine": min(self.cosines),
        }
        if self.agreed:
            found |= {"top_agreement": sum(self.agreed) / n, "kl": math.fsum(self.divergences) / n}
        return found


def image_comparison(
    model: Any,
    reference: Any,
    pixels: Float16[np.ndarray, "images channels height width"],
    *,
    tick: Tick | None = None,
) -> ImageComparison:
    """Both models on every image; classes are compared where the models have them."""
    import torch

    cosines: list[float] = []
    agreed: list[bool] = []
    divergences: list[float] = []
    for start in range(0, len(pixels), AT_ONCE):
        some = torch.from_numpy(pixels[start : start + AT_ONCE])
        with torch.inference_mode():
            (own, q), (other, p) = (_answer(one, some) for one in (model, reference))
            cosines += torch.nn.functional.cosine_similarity(own, other).tolist()
            if p is not None and q is not None:
                agreed += (p.argmax(-1) == q.argmax(-1)).tolist()
                divergences += (p.exp() * (p - q)).sum(-1).tolist()
        if tick is not None:
            tick(len(cosines), len(pixels))
    if not np.isfinite([*cosines, *divergences]).all():
        raise HeadwiseError(
            "a model's answers to these images are not numbers (NaN or infinity); a cut model that "
            "does this is broken, in half precision try --dtype fp32."
        )
    return ImageComparison(tuple(cosines), tuple(agreed), tuple(divergences))


def _answer(model: Any, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
    """Embeddings, and the logarithms of the classes' probabilities if the model has classes."""
    states: list[Tensor] = []
    with _last_states(model, states):
        output = model(**{PIXELS: pixels.to(model.device, model.dtype)})
    logits = output.get("logits")
    embeddings = states[0].double().mean(1).cpu()
    return embeddings, None if logits is None else logits.double().log_softmax(-1).cpu()


@contextmanager
def _last_states(model: Any, states: list[Tensor]) -> Iterator[None]:
    """Below a head, too: the states are noted as they leave the stock model's body."""
    from headwise.nn.backbones_headwise import base_of
    from headwise.nn.build import inner

    def note(module: Any, args: Any, output: Any) -> None:
        states.append(output.last_hidden_state)

    handle = base_of(inner(model)).register_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()
