"""Images as the numbers a model is called with, prepared by the model's own image processor.

The processor runs on Pillow and NumPy, whether torchvision is installed or not: the two resize a
little differently, and a profile should not depend on what else is installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float16

from headwise.data.images import Image, Images, pixel_rows
from headwise.errors import HeadwiseError, quoted, reason_of

AT_ONCE = 16  # images in memory as they were taken
MOST_SIDE = 2**13  # pixels that an image is made to; far above any model
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # of Pillow, by channels
Shape = tuple[int, int, int]  # channels, height, width


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Prepares images for one model; of images that are prepared already no processor is needed."""

    folder: str  # of the model, or the hub's name
    shape: Shape  # that the model reads
    trust_remote_code: bool = False
    processor: Any = None  # of a live model, in place of the folder's

    def pixels(
        self, images: Images, most: int | None = None
    ) -> Float16[np.ndarray, "images channels height width"]:
        """The first `most` images, rounded to float16."""
        chosen = images.images[:most]
        if all(image.row is not None for image in chosen):
            found = pixel_rows(chosen)
        else:
            found = np.concatenate(list(self._prepared(chosen)))
        if found.shape[1:] != self.shape:
            came, wanted = (" × ".join(map(str, s)) for s in (found.shape[1:], self.shape))
            raise HeadwiseError(
                f"the images of {images.source} are {came} (channels, height, width) when "
                f"prepared, but the model reads {wanted}; prepare them for this model, or fix "
                "the size in its preprocessor_config.json."
            )
        return found

    def _prepared(self, images: Sequence[Image]) -> Iterator[np.ndarray]:
        processor = self.processor or _processor(
            self.folder, trust_remote_code=self.trust_remote_code
        )
        mode = _MODES.get(self.shape[0], "RGB")
        for start in range(0, len(images), AT_ONCE):
            taken = [_opened(image.file, mode) for image in images[start : start + AT_ONCE]]
            try:
                made = processor(images=taken, return_tensors="np")["pixel_values"]
            # Settings of a wrong kind show where they are used, as any kind of error.
            except Exception as error:
                raise HeadwiseError(
                    f"the images cannot be prepared as {self.folder} asks ({reason_of(error)}); "
                    "mend its preprocessor_config.json."
                ) from error
            yield np.asarray(made).astype(np.float16)


def _opened(file: Path, mode: str) -> Any:
    """One image, upright, with the model's channels."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    try:
        with Pillow.open(file) as image:
            return ImageOps.exif_transpose(image).convert(mode)
    # What a decoder stumbles over comes as many kinds, SyntaxError (PNG) among them.
    except Exception as error:
        raise HeadwiseError(
            f"{file} cannot be read as an image ({reason_of(error)}); repair or remove it."
        ) from error


def _processor(folder: str, *, trust_remote_code: bool) -> Any:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise HeadwiseError(
            "reading image files needs Pillow, which is not installed; "
            "pip install 'headwise[images]', or give a .safetensors file with pixel_values."
        ) from error
    from transformers import AutoImageProcessor

    try:
        found = AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
            folder, backend="pil", trust_remote_code=trust_remote_code
        )
    # transformers raises many kinds here: OSError, ValueError, ImportError and its own.
    except Exception as error:
        raise HeadwiseError(
            f"{folder} holds no image processor that can be loaded ({reason_of(error)}); put its "
            "preprocessor_config.json there, or give a .safetensors file with pixel_values."
        ) from error
    for name in ("size", "crop_size"):
        wanted = getattr(found, name, None)
        sides = wanted.values() if isinstance(wanted, Mapping) else (wanted,)
        if any(isinstance(side, int | float) and side > MOST_SIDE for side in sides):
            raise HeadwiseError(
                f"{name} in the preprocessor_config.json of {folder} must be at most {MOST_SIDE} "
                f"pixels a side, got {quoted(wanted)}; mend it."
            )
    return found
