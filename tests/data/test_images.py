"""Images in an order that their content decides, and a split that parts no copies."""

import hashlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from headwise.data.images import held_out_images, pixel_rows, read_images
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
