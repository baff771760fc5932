"""Images by name, and as the numbers a model is called with.

A folder of image files, or one file of images that are ready for a model:

    photos/               every image file below it
    pixels.safetensors    `pixel_values`: images × channels × height × width, as a model reads them

Images are sorted by the SHA-256 of their content. A folder sorted by class would begin
with one class; in this order the first few are a fair sample, whatever the files are called, and
copies of one image are adjacent, so a split between two different images never separates copies.
Only names and hashes are kept: an image is read again when it is needed.

The model's own image processor runs on Pillow and NumPy, whether torchvision is installed or not:
the two resize a little differently, and a profile should not depend on what else is installed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float16
from safetensors import SafetensorError, safe_open

from headwise.errors import HeadwiseError, quoted, reason_of
from headwise.inputs import check_file, user_path

PIXELS = "pixel_values"
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"})
MOST_IMAGE = 2**30  # bytes of one image file
# Pillow goes by the content, and would run an interpreter for what is PostScript.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_NUMBERS = ("F16", "F32", "F64")


@dataclass(frozen=True, slots=True)
class Image:
    """One image: a file, or a row of the `pixel_values` in a file."""

    sha256: str
    file: Path
    row: int | None = None


@dataclass(frozen=True, slots=True)
class Images:
    """Images in the order of their hashes; `skipped` counts a folder's other files."""

    source: str
    images: tuple[Image, ...]
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.images)

    @property
    def sha256(self) -> str:
        """A hash of all images."""
        return hashlib.sha256("".join(i.sha256 for i in self.images).encode()).hexdigest()


def read_images(source: str) -> Images:
    """The images named `source`."""
    path = user_path(source)
    skipped = 0
    if path.is_dir():
        found, skipped = _folder(path)
    elif path.suffix == ".safetensors" and path.is_file():
        found = _rows(path)
    else:
        came = "it is another kind of file" if path.exists() else "it does not exist"
        raise HeadwiseError(
            f"images are a folder of image files, or a .safetensors file with {PIXELS}, but "
            f"{source} is neither ({came}); give one of them."
        )
    ordered = sorted(found, key=lambda image: (image.sha256, image.file.as_posix(), image.row or 0))
    return Images(source, tuple(ordered), skipped)


def held_out_images(images: Images, share: float) -> tuple[Images, Images]:
    """The images to calibrate on, and about `share` of them held out; copies stay together."""
    hashes = [image.sha256 for image in images.images]
    starts = [i for i in range(1, len(hashes)) if hashes[i] != hashes[i - 1]]
    if not starts:
        raise HeadwiseError(
            f"{images.source} has one image only (copies count once), but calibration and "
            "verification need at least one each; give more images."
        )
    at = min(starts, key=lambda i: abs(i - share * len(hashes)))
    held, rest = images.images[:at], images.images[at:]
    return Images(images.source, rest), Images(f"{images.source} (held out)", held)


def pixel_rows(images: Sequence[Image]) -> Float16[np.ndarray, "images channels height width"]:
    """The stored pixel values of images that are rows of files, rounded to float16."""
    rows = []
    for image in images:
        assert image.row is not None
        with safe_open(image.file, framework="np") as file:
            rows.append(_half(file.get_slice(PIXELS)[image.row]))
    return np.stack(rows)


def _folder(root: Path) -> tuple[list[Image], int]:
    """Every image file below `root`; hidden ones are not looked at."""
    found, skipped = [], 0
    for file in root.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
        if hidden or not file.is_file():
            continue
        if file.suffix.lower() not in SUFFIXES:
            skipped += 1
            continue
        check_file(file, most=MOST_IMAGE, advice="remove it, or give another folder")
        try:
            with file.open("rb") as stream:
                found.append(Image(hashlib.file_digest(stream, "sha256").hexdigest(), file))
        except OSError as error:
            raise HeadwiseError(f"{file} cannot be read ({error.strerror or error}).") from error
    if not found:
        raise HeadwiseError(
            f"{root} holds no image file ({skipped} other files); give a folder with "
            f"{', '.join(sorted(s.removeprefix('.') for s in SUFFIXES))} files."
        )
    return found, skipped


def _rows(path: Path) -> list[Image]:
    try:
        with safe_open(path, framework="np") as file:
            if PIXELS not in file.keys():  # noqa: SIM118 (it is no mapping)
                raise HeadwiseError(
                    f"{path} must hold {PIXELS}, but it has {', '.join(file.keys()) or 'nothing'}; "
                    "save them under that name."
                )
            stored = file.get_slice(PIXELS)
            shape, numbers = stored.get_shape(), stored.get_dtype()
            if len(shape) != 4 or not shape[0] or numbers not in _NUMBERS:
                raise HeadwiseError(
                    f"{PIXELS} in {path} must be images × channels × height × width in float16 or "
                    f"float32, got {' × '.join(map(str, shape))} in {numbers}; save them so."
                )
            return [Image(_checked(path, i, _half(stored[i])), path, i) for i in range(shape[0])]
    except (OSError, SafetensorError) as error:
        raise HeadwiseError(
            f"{path} cannot be read as a safetensors file ({error}); make it again."
        ) from error


def _checked(path: Path, row: int, pixels: np.ndarray) -> str:
    """The hash of one image's pixel values, which must be finite."""
    if not np.isfinite(pixels).all():
        raise HeadwiseError(
            f"image {row} in {path} must have finite numbers that fit float16, got others; "
            "prepare it as the model's image processor does."
        )
    return hashlib.sha256(pixels.tobytes()).hexdigest()


def _half(pixels: np.ndarray) -> np.ndarray:
    """Rounded once, here: whoever reads an image afterwards sees the same numbers."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(pixels, dtype=np.float16)


AT_ONCE = 16  # images in memory as they were taken, unless they are large
# Of one image, and about of all in memory: 200 MB. A file of some kilobytes can stand for more.
MOST_PIXELS = 2**26
# An image is made to the size that the model reads, perhaps by way of a larger one that is cropped:
# never so many times as large, and never of so many pixels a side.
MOST_TIMES, MOST_SIDE = 16, 2**13
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # of Pillow, by channels
Shape = tuple[int, int, int]  # channels, height, width


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Prepares images for one model; prepared images need no processor."""

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
            self.folder, self.shape, trust_remote_code=self.trust_remote_code
        )
        mode = _MODES.get(self.shape[0], "RGB")
        for taken in _taken(images, mode):
            try:
                made = processor(images=taken, return_tensors="np")["pixel_values"]
            # Settings of a wrong kind show where they are used, as any kind of error.
            except Exception as error:
                raise HeadwiseError(
                    f"the images cannot be prepared as {self.folder} asks ({reason_of(error)}); "
                    "fix its preprocessor_config.json."
                ) from error
            yield np.asarray(made).astype(np.float16)


def _taken(images: Sequence[Image], mode: str) -> Iterator[list[Any]]:
    """The images as they were taken, as many together as memory has room for."""
    taken, pixels = [], 0
    for image in images:
        taken.append(_opened(image.file, mode))
        pixels += taken[-1].width * taken[-1].height
        if len(taken) == AT_ONCE or pixels >= MOST_PIXELS:
            yield taken
            taken, pixels = [], 0
    if taken:
        yield taken


def _opened(file: Path, mode: str) -> Any:
    """One image, upright, with the model's channels."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    try:
        with Pillow.open(file, formats=FORMATS) as image:
            _refuse_many_pixels(image)
            return ImageOps.exif_transpose(image).convert(mode)
    # What a decoder stumbles over comes as many kinds, SyntaxError (PNG) among them.
    except Exception as error:
        raise HeadwiseError(
            f"{file} cannot be read as an image ({reason_of(error)}); repair or remove it."
        ) from error


def _refuse_many_pixels(image: Any) -> None:
    """Before they are unpacked."""
    if image.width * image.height > MOST_PIXELS:
        raise ValueError(f"{image.width} × {image.height} pixels are more than {MOST_PIXELS:,}")


def _processor(folder: str, shape: Shape, *, trust_remote_code: bool) -> Any:
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
    most = min(MOST_SIDE, MOST_TIMES * max(shape[1:]))
    for name in ("size", "crop_size", "pad_size"):
        wanted: Any = getattr(found, name, None)
        # transformers has a class of its own for sizes, which is no Mapping.
        sides = dict(wanted).values() if hasattr(wanted, "get") else (wanted,)
        if any(isinstance(side, int | float) and side > most for side in sides):
            raise HeadwiseError(
                f"{name} in the preprocessor_config.json of {folder} must be at most {most} pixels "
                f"a side for a model that reads {shape[1]} × {shape[2]}, got {quoted(wanted)}; "
                "fix it."
            )
    return found
