"""What a model reads: token numbers from a tokenizer, or pixels from its image processor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwise.data.images import PIXELS, Images
from headwise.data.pixels import ImageReader, Shape
from headwise.data.text import Text
from headwise.data.tokens import load_tokenizer
from headwise.errors import HeadwiseError
from headwise.nn.modeling_headwise import HeadwiseModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Reader = PreTrainedTokenizerBase | ImageReader


def load_reader(
    folder: str, tokenizer: str | None = None, *, trust_remote_code: bool = False
) -> Reader:
    """What turns a source into the inputs of the model in `folder`."""
    shape = _shape_in(folder, trust_remote_code=trust_remote_code)
    if shape is None:
        return load_tokenizer(tokenizer or folder, trust_remote_code=trust_remote_code)
    if tokenizer is not None:
        raise HeadwiseError(f"{folder} reads images, which need no tokenizer; leave it out.")
    return ImageReader(folder, shape, trust_remote_code)


def image_shape(config: Any) -> Shape | None:
    """Channels, height and width of the images that a config's model reads; None if it does not."""
    stock = getattr(config, "backbone", config)
    mapping = HeadwiseModel._task._model_mapping
    if type(stock) not in mapping or mapping[type(stock)].main_input_name != PIXELS:
        return None
    size = stock.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return stock.num_channels, height, width


def processor_name(config: Any) -> str | None:
    """The class that prepares images for a stock model; None if it reads none."""
    from transformers.models.auto import image_processing_auto

    if image_shape(config) is None:
        return None
    known: Any = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES  # type: ignore[attr-defined]
    found = known.get(config.model_type, {}).get("torchvision")
    return None if found is None else str(found)


def refuse_other_kind(reader: Reader, source: Text | Images) -> None:
    """Raise for text that is given to a model of images, and the other way round."""
    if isinstance(reader, ImageReader) == isinstance(source, Images):
        return
    came, wanted = ("images", "text") if isinstance(source, Images) else ("text", "images")
    raise HeadwiseError(
        f"this model reads {wanted}, but {source.source} was given as {came}; give --{wanted} "
        f"instead, where the command takes it."
    )


def _shape_in(folder: str, *, trust_remote_code: bool) -> Shape | None:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    # Many kinds; whoever loads the model next says what is wrong with it.
    except Exception:
        return None
    return image_shape(config)
