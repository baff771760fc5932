"""The two inputs of a profile: a model, ready to be listened to, and its text or its images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float16, Int

from headwise.data.images import PIXELS, Images
from headwise.data.mixture import Mixture, as_mixture, token_windows
from headwise.data.pixels import ImageReader
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
from headwise.profiling.objectives import Objective
from headwise.profiling.settings import ProfileSettings
from headwise.source import Source, refuse_other_kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headwise.source import Reader


@dataclass(frozen=True, slots=True)
class Sequences:
    """Token sequences of one length, or images, what is asked about them, where they are from."""

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
    """What the sensitivities of this model are sensitivities of."""
    if isinstance(model, HeadwiseModel):
        return "embedding"
    if isinstance(model, HeadwiseForImageClassification):
        return "label"
    return "masked-token" if isinstance(model, HeadwiseForMaskedLM) else "next-token"


def usual_length(model: HeadwisePreTrainedModel, most: int) -> int:
    """The tokens of a sequence unless said otherwise; an image has all that there are positions."""
    context = plan_of(model).shape.context
    return context if model.main_input_name == PIXELS else min(most, context)


def sequences(
    model: HeadwisePreTrainedModel,
    reader: Reader,
    source: Text | Mixture | Images,
    settings: ProfileSettings,
) -> Sequences:
    """As much of a source as `settings` ask for, as the model reads it."""
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
    """A fingerprint of a live model's weights, for a model that has no files."""
    refuse_not_finite("the model", model)
    return fingerprint(parameters(model))


def input_device(model: HeadwisePreTrainedModel) -> torch.device:
    """Where inputs go; those of a module kept elsewhere are moved by accelerate."""
    device = next(model.get_input_embeddings().parameters()).device
    return torch.device("cpu") if device.type == "meta" else device
