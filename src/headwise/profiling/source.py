"""The inputs of a profile: a model, its text or images, and the objective.

The sensitivities are those of one number per sequence, by the kind of model:

    next-token    L_s = Σ_t −log p(token t+1)                     n_s = predicted tokens
    masked-token  L_s = Σ −log p(token) over 15% masked tokens    n_s = masked tokens
    label         L_s = −log p(label), label ~ p                  n_s = 1
    embedding     L_s = r_s · e_s, r_s ~ N(0, I)                  n_s = 1
                  e_s = the mean of the last hidden states, of length 1

With g = ∂L_s/∂gate, the mean over sequences of g²/n_s is a diagonal Fisher: for the two losses,
whose token gradients are uncorrelated under the data's own distribution, it approximates the second
derivative of the mean loss per token. A classifier needs no true labels: with labels sampled from
its own output, E[g²] is the Fisher itself, and half the sum over dropped gates predicts the
divergence of the outputs. A model without a head has no loss. There E_r[g²] is
‖∂e/∂gate‖², so half the sum over dropped gates predicts ½‖Δe‖², which for vectors of length 1 is
1 − cosine: again "what is lost", in the unit encoders are judged by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float16, Int, Shaped
from torch import Tensor
from torch.nn import functional

from headwise.data.images import PIXELS, ImageReader, Images
from headwise.data.mixture import Mixture, as_mixture, token_windows
from headwise.data.text import Text
from headwise.devices import Dtype
from headwise.errors import HeadwiseError
from headwise.models.build import plan_of
from headwise.models.checkpoint import fingerprint
from headwise.models.loading import parameters, refuse_not_finite
from headwise.models.modeling_headwise import (
    HeadwiseForImageClassification,
    HeadwiseForMaskedLM,
    HeadwiseModel,
    HeadwisePreTrainedModel,
)
from headwise.profiling.settings import ProfileSettings
from headwise.source import Source, refuse_other_kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headwise.source import Reader

Objective = Literal["next-token", "masked-token", "label", "embedding"]
MASKED_SHARE = 0.15
_IGNORED = -100

# The L_s of a batch that was run, and the n_s.
Losses = Callable[[Any], tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]]


@dataclass(frozen=True, slots=True)
class Probe:
    """A batch for the model, and how its output becomes one number per sequence."""

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


@dataclass(frozen=True, slots=True)
class Sequences:
    """Token sequences of one length, or images, with their objective and source."""

    inputs: (
        Int[np.ndarray, "sequences length"] | Float16[np.ndarray, "sequences channels height width"]
    )
    objective: Objective
    source: str
    sha256: str
    mask_token: int | None = None
    parts_sha256: tuple[str, ...] = ()  # of each text, where there are several

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def name(self) -> str:
        """What the model calls them."""
        return PIXELS if self.inputs.ndim == 4 else "input_ids"

    @property
    def stored(self) -> tuple[str, np.ndarray]:
        """Their name and numbers in a profile."""
        return (
            (PIXELS, self.inputs) if self.name == PIXELS else ("ids", self.inputs.astype(np.int32))
        )


def load_for_profiling(
    source: Source,
    *,
    device: str = "auto",
    dtype: Dtype = "auto",
    device_map: str | dict[str, Any] | None = None,
) -> HeadwisePreTrainedModel:
    """The model with headwise attention, in evaluation mode.

    A causal family is loaded with its head; an encoder with its masked-token head or its image
    classes where the checkpoint has them, otherwise bare.
    """
    task = "masked-lm" if source.saved_task == "masked-lm" else source.task
    model: HeadwisePreTrainedModel = source.load(
        task, headwise=True, device=device, dtype=dtype, device_map=device_map
    )
    return model


def objective_of(model: HeadwisePreTrainedModel) -> Objective:
    """The objective of this model's sensitivities."""
    if isinstance(model, HeadwiseModel):
        return "embedding"
    if isinstance(model, HeadwiseForImageClassification):
        return "label"
    return "masked-token" if isinstance(model, HeadwiseForMaskedLM) else "next-token"


def usual_length(model: HeadwisePreTrainedModel, most: int) -> int:
    """The default tokens per sequence; an image fills all positions."""
    context = plan_of(model).shape.context
    return context if model.main_input_name == PIXELS else min(most, context)


def sequences(
    model: HeadwisePreTrainedModel,
    reader: Reader,
    source: Text | Mixture | Images,
    settings: ProfileSettings,
) -> Sequences:
    """The model's inputs from a source, as many as `settings` say."""
    refuse_other_kind(reader, source)
    if isinstance(source, Images):
        assert isinstance(reader, ImageReader)
        return _images(model, reader, source, settings)
    assert not isinstance(reader, ImageReader)
    return _text(model, reader, as_mixture(source), settings)


def _images(
    model: HeadwisePreTrainedModel, reader: ImageReader, images: Images, settings: ProfileSettings
) -> Sequences:
    """The first images; each is a sequence of its patches."""
    length = plan_of(model).shape.context
    if settings.length != length:
        raise HeadwiseError(
            f"an image is {length} tokens to this model, got a length of {settings.length}; leave "
            "--length out."
        )
    pixels = reader.pixels(images, settings.tokens // length)
    return Sequences(pixels, objective_of(model), images.source, images.sha256)


def _text(
    model: HeadwisePreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Mixture,
    settings: ProfileSettings,
) -> Sequences:
    """The text in sequences of `settings.length`; tokens short of a last one are dropped.

    An encoder's sequences carry the first and last token its tokenizer puts around a text.
    """
    objective = objective_of(model)
    first, last = None, None
    if objective != "next-token":
        first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    if objective == "masked-token" and tokenizer.mask_token_id is None:
        raise HeadwiseError(
            "this model predicts masked tokens, but its tokenizer has no mask token; give the "
            "tokenizer that belongs to the model."
        )
    ends = sum(x is not None for x in (first, last))
    inside = settings.length - ends
    known = model.get_input_embeddings().weight.size(0)  # type: ignore[operator]
    windows = token_windows(
        tokenizer, text, length=inside, tokens=settings.tokens, vocab_size=known
    )
    ids, n = windows.astype(np.int64), len(windows)
    for token, side in ((first, 0), (last, 1)):
        if token is not None:
            column = np.full((n, 1), token)
            ids = np.hstack([ids, column] if side else [column, ids])
    return Sequences(
        ids, objective, text.source, text.sha256, tokenizer.mask_token_id, text.parts_sha256
    )


def weights_sha256(model: HeadwisePreTrainedModel) -> str:
    """A fingerprint of the weights of a live model."""
    refuse_not_finite("the model", model)
    return fingerprint(parameters(model))


def input_device(model: HeadwisePreTrainedModel) -> torch.device:
    """Where inputs go; those of a module kept elsewhere are moved by accelerate."""
    device = next(model.get_input_embeddings().parameters()).device
    return torch.device("cpu") if device.type == "meta" else device
