"""The two inputs of a profile: a model, ready to be listened to, and its text or its images."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float16, Int

from headwise.data.images import PIXELS, Images
from headwise.data.pixels import ImageReader
from headwise.data.text import Text
from headwise.data.tokens import refuse_absent_path, token_stream
from headwise.devices import Dtype, chosen_device
from headwise.errors import HeadwiseError, reason_of
from headwise.nn.backbones_headwise import FAMILIES
from headwise.nn.build import convert, plan_of
from headwise.nn.modeling_headwise import (
    HeadwiseForImageClassification,
    HeadwiseForMaskedLM,
    HeadwiseModel,
    HeadwisePreTrainedModel,
)
from headwise.nn.reading import load_reader, refuse_other_kind
from headwise.nn.shapes import TASKS, checkpoint_task
from headwise.nn.sources import model_folder
from headwise.profile.objectives import Objective
from headwise.profile.settings import ProfileSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headwise.nn.reading import Reader


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


@dataclass(frozen=True, slots=True)
class Loading:
    """How a model is loaded; `device_map` spreads it over devices, as in transformers."""

    device: str = "auto"
    dtype: Dtype = "auto"
    trust_remote_code: bool = False
    tokenizer: str | None = None
    device_map: str | dict[str, Any] | None = None


def load_profiled(name: str, loading: Loading | None = None) -> tuple[HeadwisePreTrainedModel, Any]:
    """The model with headwise attention, in evaluation mode, and its tokenizer or image reader.

    A causal family is loaded with its head; an encoder with its masked-token head or its image
    classes where the checkpoint has them, otherwise bare.
    """
    how = loading or Loading()
    refuse_absent_path(name, "a Hugging Face folder with config.json and weights")
    folder = model_folder(name)
    reader = load_reader(folder, how.tokenizer, trust_remote_code=how.trust_remote_code)
    place = chosen_device(how.device)
    number = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(
        how.dtype, torch.float32 if place == "cpu" else "auto"
    )
    try:
        auto, trust = _auto_class(folder, how.trust_remote_code), how.trust_remote_code
        # What a checkpoint lacks (a pooler) is drawn: alike in every run, for it is fingerprinted.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            stock = auto.from_pretrained(folder, dtype=number, trust_remote_code=trust)
    # transformers raises many kinds here: OSError, ValueError, its own and safetensors'.
    except Exception as error:
        raise HeadwiseError(
            f"{name} could not be loaded as a model ({reason_of(error)}); give a "
            "Hugging Face folder with config.json and weights."
        ) from error
    model: Any = stock if isinstance(stock, HeadwisePreTrainedModel) else convert(stock)
    del stock
    placed = model.to(place) if how.device_map is None else _spread(model, how.device_map)
    return placed.eval(), reader


def _auto_class(name: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    family = FAMILIES.get(getattr(config, "backbone", config).model_type)
    if family is None or family.causal:
        return AutoModelForCausalLM
    heads = config.architectures or [""]
    if heads[0].endswith("ForMaskedLM"):
        return AutoModelForMaskedLM
    return TASKS[checkpoint_task(config)]._task


def _spread(model: Any, device_map: str | dict[str, Any]) -> Any:
    """The converted model on several devices; names are those of the stock model."""
    from accelerate import dispatch_model, infer_auto_device_map  # type: ignore[import-untyped]
    from accelerate.utils import get_balanced_memory  # type: ignore[import-untyped]

    if isinstance(device_map, dict):
        prefix = "" if "" in device_map else "backbone."
        return dispatch_model(model, {f"{prefix}{n}": d for n, d in device_map.items()})
    if device_map in {"cpu", "cuda", "mps"}:
        return model.to(device_map)
    layers = list(model.backbone._no_split_modules or [])
    memory = None
    if device_map != "sequential":
        memory = get_balanced_memory(
            model, no_split_module_classes=layers, low_zero=device_map == "balanced_low_0"
        )
    return dispatch_model(
        model, infer_auto_device_map(model, max_memory=memory, no_split_module_classes=layers)
    )


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
    source: Text | Images,
    settings: ProfileSettings,
) -> Sequences:
    """As much of a source as `settings` ask for, as the model reads it."""
    refuse_other_kind(reader, source)
    if isinstance(source, Images):
        assert isinstance(reader, ImageReader)
        return _images(model, reader, source, settings)
    assert not isinstance(reader, ImageReader)
    return _text(model, reader, source, settings)


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
    text: Text,
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
    stream = token_stream(tokenizer, text.documents, most=settings.tokens)
    n = len(stream) // inside
    if n == 0:
        raise HeadwiseError(
            f"{text.source} has {len(stream)} tokens, but one sequence needs {inside}; give more "
            "text or a smaller --length."
        )
    known = model.get_input_embeddings().weight.size(0)  # type: ignore[operator]
    if int(stream.max()) >= known:
        raise HeadwiseError(
            f"the tokenizer gives token {int(stream.max())}, but the model knows only {known}; "
            "give the tokenizer that belongs to the model."
        )
    ids = stream[: n * inside].reshape(n, inside).astype(np.int64)
    for token, side in ((first, 0), (last, 1)):
        if token is not None:
            column = np.full((n, 1), token)
            ids = np.hstack([ids, column] if side else [column, ids])
    return Sequences(ids, objective, text.source, text.sha256, tokenizer.mask_token_id)


def weights_sha256(model: HeadwisePreTrainedModel) -> str:
    """A fingerprint of the weights (names, shapes, sums), which refuses those that are broken."""
    digest = hashlib.sha256()
    for name, p in _parameters(model):
        exact = torch.float32 if p.device.type == "mps" else torch.float64
        total = float(p.detach().sum(dtype=exact))
        if not np.isfinite(total):
            raise HeadwiseError(
                f"the weights of {name.removeprefix('backbone.')} must be finite, got NaN or "
                "infinite numbers; the checkpoint is broken, fetch it again."
            )
        digest.update(f"{name} {tuple(p.shape)} {total.hex()}\n".encode())
    return digest.hexdigest()


def _parameters(model: HeadwisePreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter with its numbers, those that accelerate keeps elsewhere too."""
    from accelerate.utils import align_module_device

    for owner, module in model.named_modules():
        with align_module_device(module):
            for name, p in module.named_parameters(recurse=False):
                yield f"{owner}.{name}", p


def input_device(model: HeadwisePreTrainedModel) -> torch.device:
    """Where inputs go; those of a module kept elsewhere are moved by accelerate."""
    device = next(model.get_input_embeddings().parameters()).device
    return torch.device("cpu") if device.type == "meta" else device
