"""Images in an order that their content decides, and a split that parts no copies."""

import hashlib
import json
import shutil
import struct
import zlib

import numpy as np
import pytest
from safetensors.numpy import save_file

from headwise.data import images
from headwise.data.images import ImageReader, held_out_images, pixel_rows, read_images
from headwise.errors import HeadwiseError


@pytest.fixture
def photos(tmp_path):
    """Thirteen files of different bytes, of which every third has two copies under other names."""
    folder = tmp_path / "photos"
    (folder / "cats").mkdir(parents=True)
    for i in range(13):
        (folder / f"{i}.png").write_bytes(bytes([i]) * 7)
        for copy in ("a", "b") if i % 3 == 0 else ():
            (folder / "cats" / f"{i}{copy}.JPG").write_bytes(bytes([i]) * 7)
    (folder / "notes.txt").write_text("no image")
    (folder / ".hidden.png").write_bytes(b"hidden")
    return folder


def saved(path, pixels):
    save_file({"pixel_values": pixels}, path)
    return str(path)


def test_a_folder_is_read_in_the_order_of_its_content(photos, tmp_path):
    found = read_images(str(photos))
    assert (len(found), found.skipped) == (13 + 2 * 5, 1)
    hashes = [image.sha256 for image in found.images]
    assert hashes == sorted(hashes)
    assert {image.file.name for image in found.images if image.sha256 == sha(bytes([3]) * 7)} == {
        "3.png",
        "3a.JPG",
        "3b.JPG",
    }
    # Other names are the same images; another image is not.
    renamed = tmp_path / "renamed"
    shutil.copytree(photos, renamed)
    (renamed / "1.png").rename(renamed / "z.webp")
    assert read_images(str(renamed)).sha256 == found.sha256
    (renamed / "z.webp").write_bytes(b"another")
    assert read_images(str(renamed)).sha256 != found.sha256


def sha(data):
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_no_copies_on_both_sides(photos, share):
    whole = read_images(str(photos))
    rest, held = held_out_images(whole, share)
    kept, apart = ({image.sha256 for image in part.images} for part in (rest, held))
    assert kept
    assert apart
    assert not kept & apart
    assert (*held.images, *rest.images) == whole.images
    assert len(held) == pytest.approx(share * len(whole), abs=2)
    assert held.source == f"{photos} (held out)"
    assert held_out_images(read_images(str(photos)), share) == (rest, held)
    # The control: a split by names does part copies.
    by_name = sorted(whole.images, key=lambda image: image.file)
    at = len(held)
    assert {i.sha256 for i in by_name[:at]} & {i.sha256 for i in by_name[at:]}


def test_copies_of_one_image_cannot_be_split(tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"the same")
    with pytest.raises(HeadwiseError, match="has one image only \\(copies count once\\)"):
        held_out_images(read_images(str(tmp_path)), 0.1)


def test_rows_are_rounded_once(tmp_path):
    pixels = np.random.default_rng(3).normal(size=(5, 3, 2, 7)).astype(np.float32)
    single = read_images(saved(tmp_path / "single.safetensors", pixels))
    half = read_images(saved(tmp_path / "half.safetensors", pixels.astype(np.float16)))
    assert single.sha256 == half.sha256
    found = pixel_rows(single.images)
    order = [image.row for image in single.images]
    assert sorted(order) == list(range(5))
    assert np.array_equal(found, pixels[order].astype(np.float16))
    assert np.array_equal(found, pixel_rows(half.images))
    assert not np.array_equal(found.astype(np.float32), pixels[order])


def test_what_is_no_image_source_is_said(photos, tmp_path):
    def message(source):
        with pytest.raises(HeadwiseError) as error:
            read_images(str(source))
        return str(error.value)

    assert "it does not exist" in message(tmp_path / "none")
    assert "it is another kind of file" in message(photos / "notes.txt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    assert "holds no image file (1 other files)" in message(tmp_path / "empty")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"short")
    assert "cannot be read as a safetensors file" in message(broken)
    save_file({"pixels": np.zeros((2, 3, 5, 7), np.float32)}, tmp_path / "name.safetensors")
    assert "must hold pixel_values, but it has pixels" in message(tmp_path / "name.safetensors")
    flat = saved(tmp_path / "flat.safetensors", np.zeros((2, 3), np.float32))
    assert "got 2 × 3 in F32" in message(flat)
    whole = saved(tmp_path / "whole.safetensors", np.zeros((2, 3, 5, 7), np.uint8))
    assert "got 2 × 3 × 5 × 7 in U8" in message(whole)
    large = np.zeros((2, 3, 5, 7), np.float32)
    large[1, 0, 0, 0] = 1e6
    assert "image 1 in" in message(saved(tmp_path / "large.safetensors", large))


def png(side):
    """A picture of so many pixels a side in a few kilobytes."""
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((1 + -(-side // 8)) * side), 9)
    chunks = b""
    for kind, data in ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b"")):
        chunks += struct.pack(">I", len(data)) + kind + data
        chunks += struct.pack(">I", zlib.crc32(kind + data))
    return b"\x89PNG\r\n\x1a\n" + chunks


def prepared(folder, size):
    """What a model that reads 3 × 6 × 8 is given of the pictures in a folder."""
    (folder / "model").mkdir(exist_ok=True)
    processor = {"image_processor_type": "ViTImageProcessor", "size": size}
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps(processor))
    return ImageReader(str(folder / "model"), (3, 6, 8)).pixels(read_images(str(folder)))


def test_a_small_file_of_many_pixels_is_refused_unpacked(tmp_path):
    right = {"height": 6, "width": 8}
    (tmp_path / "small.png").write_bytes(png(99))
    assert prepared(tmp_path, right).shape == (1, 3, 6, 8)
    (tmp_path / "bomb.png").write_bytes(png(9000))
    assert (tmp_path / "bomb.png").stat().st_size < 50_000
    with pytest.raises(HeadwiseError, match="9000 × 9000 pixels are more than"):
        prepared(tmp_path, right)


def test_few_large_images_are_in_memory_at_once(tmp_path, monkeypatch):
    """As many as MOST_PIXELS has room for; the result does not depend on it."""
    for i in range(5):
        (tmp_path / f"{i}.png").write_bytes(png(99 - i))
    right, sizes = {"height": 6, "width": 8}, []
    whole = prepared(tmp_path, right)
    taken = images._taken

    def counted(*given):
        for group in taken(*given):
            sizes.append(len(group))
            yield group

    monkeypatch.setattr(images, "_taken", counted)
    monkeypatch.setattr(images, "MOST_PIXELS", 2 * 99 * 99)
    assert (prepared(tmp_path, right) == whole).all()
    assert sizes == [3, 2]


@pytest.mark.parametrize("size", [{"shortest_edge": 8000}, {"height": 6, "width": 8000}, 8000])
def test_a_processor_that_makes_large_images_of_small_ones_is_refused(tmp_path, size):
    (tmp_path / "small.png").write_bytes(png(9))
    with pytest.raises(HeadwiseError, match="must be at most 128 pixels a side"):
        prepared(tmp_path, size)


def test_content_that_is_a_program_is_no_image(tmp_path):
    """Pillow would hand PostScript to an interpreter, whatever the file is called."""
    page = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n"
    (tmp_path / "photo.png").write_bytes(page)
    with pytest.raises(HeadwiseError, match="cannot be read as an image"):
        prepared(tmp_path, {"height": 6, "width": 8})
