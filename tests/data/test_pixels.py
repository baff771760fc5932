"""Images become the numbers that the model's own processor makes of them."""

import json
import sys

import numpy as np
import pytest
from PIL import Image

from headwise.data.images import ImageReader, read_images
from headwise.errors import HeadwiseError

SHAPE = (3, 4, 6)


@pytest.fixture
def reader(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    settings = {"image_processor_type": "ViTImageProcessor", "size": {"height": 4, "width": 6}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return ImageReader(str(folder), SHAPE)


@pytest.fixture
def photos(tmp_path):
    (tmp_path / "photos").mkdir()
    return tmp_path / "photos"


def colours(seed=3, height=4, width=6):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def by_hand(rgb):
    """The processor's default: to −1 … 1, channels first; the right size is not resized."""
    return (rgb.transpose(2, 0, 1) / 127.5 - 1).astype(np.float16)


def test_files_become_what_the_processor_says(reader, photos):
    for i in range(19):
        Image.fromarray(colours(i)).save(photos / f"{i}.png")
    images = read_images(str(photos))
    found = reader.pixels(images)
    assert found.dtype == np.float16
    assert found.shape == (19, *SHAPE)
    for image, pixels in zip(images.images, found, strict=True):
        assert pixels == pytest.approx(by_hand(colours(int(image.file.stem))), abs=2e-3)
    assert not np.allclose(found[0], found[1], atol=0.1)
    assert np.array_equal(reader.pixels(images, 5), found[:5])


def test_grey_turned_and_large_images_are_read(reader, photos):
    grey = colours()[:, :, 0]
    Image.fromarray(grey).save(photos / "grey.png")
    assert reader.pixels(read_images(str(photos)))[0] == pytest.approx(
        by_hand(np.stack([grey] * 3, -1)), abs=2e-3
    )
    (photos / "grey.png").unlink()
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying on its side
    upright = colours()
    Image.fromarray(np.rot90(upright)).save(photos / "turned.png", exif=exif)
    assert reader.pixels(read_images(str(photos)))[0] == pytest.approx(by_hand(upright), abs=2e-3)
    Image.fromarray(colours(5, 31, 17)).save(photos / "large.png")
    assert reader.pixels(read_images(str(photos))).shape == (2, *SHAPE)


def test_what_cannot_be_prepared_is_said(reader, photos, monkeypatch):
    def message(one=reader):
        with pytest.raises(HeadwiseError) as error:
            one.pixels(read_images(str(photos)))
        return str(error.value)

    Image.fromarray(colours()).save(photos / "a.png")
    other = ImageReader(reader.folder, (3, 5, 5))
    assert "are 3 × 4 × 6 (channels, height, width) when prepared, but the model" in message(other)
    bare = ImageReader(str(photos), SHAPE)
    assert "put its preprocessor_config.json there" in message(bare)
    whole = (photos / "a.png").read_bytes()
    (photos / "a.png").write_bytes(whole[: len(whole) // 2])
    assert "a.png cannot be read as an image" in message()
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install 'headwise[images]'" in message()
