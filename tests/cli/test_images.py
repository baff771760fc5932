"""Image models through profile, compress and verify, as a user runs them."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file
from safetensors.torch import load_file
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
)

from headwise.data.images import ImageReader, read_images
from tests import tiny

TEXT = "The quick brown fox jumps over the lazy dog.\n" * 9
TOKENS = tiny.LENGTH


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A classifier, a bare model, a text model; a folder of photos and the same as pixels."""
    folder = tmp_path_factory.mktemp("images")
    processor = {"size": {"height": 6, "width": 8}}  # as older ones: the family says the rest
    for name, family in (("classes", "vit"), ("bare", "vit_bare")):
        tiny.stock(family).save_pretrained(folder / name)
        (folder / name / "preprocessor_config.json").write_text(json.dumps(processor))
    rng = np.random.default_rng(3)
    (folder / "photos").mkdir()
    for i in range(29):
        photo = rng.integers(0, 256, (11 + i % 3, 17, 3), dtype=np.uint8)
        Image.fromarray(photo).save(folder / "photos" / f"{i}.png")
    reader = ImageReader(str(folder / "classes"), tiny.IMAGE)
    pixels = reader.pixels(read_images(str(folder / "photos")))
    save_file({"pixel_values": pixels}, folder / "pixels.safetensors")
    tiny.write_llama(folder, text=TEXT)
    return folder


@pytest.mark.slow
def test_a_folder_of_photos_cuts_and_proves_a_classifier(headwise, place, tmp_path):
    out = tmp_path / "small"
    words = ("--images", place / "photos", "--attn-params", "75%", "--multiple-of", 2, "-o", out)
    done = headwise("compress", place / "classes", *words, "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["share"]["attn_params"] <= 0.75
    verified = document["verify"]
    assert verified == json.loads((out / "verify.json").read_text())
    assert verified["kind"] == "image"
    (found,) = verified["texts"]
    assert found["images"] == 3  # a tenth of 29
    assert found["is_calibration_text"] is False
    assert 0 < found["least_cosine"] <= found["cosine"] < 1 - 1e-6
    assert found["top_agreement"] in {0, 1 / 3, 2 / 3, 1}
    assert found["kl"] > 0
    assert verified["size"].pop("kv_bytes") is None
    for size in verified["size"].values():
        assert size["cut"] == size["cut_plan"]
        assert size["dense"] == size["dense_plan"]
    (point,) = verified["speed"]["points"]  # a model that writes nothing is only timed reading
    assert (point["point"], point["context"]) == ("prefill", TOKENS)
    assert verified["warnings"] == []
    calibration = document["cut"]["calibration"]
    assert (calibration["images"], calibration["tokens"]) == (26, 26 * TOKENS)
    model = AutoModelForImageClassification.from_pretrained(out)
    assert model(pixel_values=torch.zeros(2, *tiny.IMAGE)).logits.shape == (2, 7)
    processor = AutoImageProcessor.from_pretrained(out, backend="pil")
    assert (processor.size.height, processor.size.width) == tiny.IMAGE[1:]
    card = (out / "README.md").read_text()
    for words in (
        "pipeline_tag: image-classification",
        "Calibrated on 26 images of `photos`",
        "AutoImageProcessor.from_pretrained",
        "AutoModelForImageClassification.from_pretrained",
        "top class agrees",
    ):
        assert words in card, words
    assert "okenizer" not in card
    page = (out / "report.html").read_text()
    assert "calibrated on 26 images of photos" in page
    assert "Same top class" in page
    assert "divergence of the classes, nats per image" in page
    fitted = headwise("plan", "fit", f"{out}.profile", "--attn-params", "80%", "--multiple-of", 2)
    assert "nats per image." in fitted.out


@pytest.mark.slow
def test_pixels_are_the_photos_prepared(headwise, place, tmp_path):
    """Read from either source, a profile has the same numbers."""
    for source in ("photos", "pixels.safetensors"):
        out = tmp_path / source
        where = (place / "bare", "--images", place / source, "-o", f"{out}.profile")
        done = headwise("profile", *where, "--json")
        assert done.code == 0, done.err
        document = json.loads(done.out)
        assert document["objective"] == "embedding"
        assert (document["sequences"], document["tokens"]) == (29, 29 * TOKENS)
        assert document["lengths"] == [TOKENS]
    # The order is by content, and files and rows have other hashes: the images are the same ones.
    stored = [
        load_file(tmp_path / f"{source}.profile" / "profile.safetensors")
        for source in ("photos", "pixels.safetensors")
    ]
    rows = [sorted(x.flatten().tolist() for x in one["pixel_values"]) for one in stored]
    assert rows[0] == rows[1]
    moments = [one["layers.1.z_moment"] for one in stored]
    torch.testing.assert_close(moments[0], moments[1], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_pixels_cut_a_bare_model_and_verify_asks_for_targets(headwise, place, tmp_path):
    out, pixels = tmp_path / "small", place / "pixels.safetensors"
    words = (
        "--images",
        pixels,
        "--attn-params",
        "70%",
        "--multiple-of",
        2,
        "-o",
        out,
        "--no-verify",
    )
    done = headwise("compress", place / "bare", *words)
    assert done.code == 0, done.err
    assert "pipeline_tag: image-feature-extraction" in (out / "README.md").read_text()
    check = ("verify", out, "--against", place / "bare", "--images", pixels, "--repeats", 0)
    found = headwise(*check, "--min-cosine", "0.999999", "--json")
    assert found.code == 1
    assert "Missed: --min-cosine must be at least" in found.err
    (text,) = json.loads(found.out)["texts"]
    assert text["images"] == 29
    assert text["top_agreement"] is None
    few = headwise(*check, "--tokens", 5 * TOKENS + 1, "--json")
    assert json.loads(few.out)["texts"][0]["images"] == 5
    refused = headwise(*check, "--max-ratio", "2")
    assert refused.code == 2
    assert "--max-ratio is not a target for image models" in refused.err
    against = ("--against", place / "model", "--images", pixels)
    other = headwise("verify", out, *against)
    assert "an image model and a causal model cannot be compared" in other.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("profile", "bare"), "--text or, if it reads images, on --images, got neither"),
        (("profile", "bare", "--text", "text.txt", "--images", "photos"), "got both"),
        (("profile", "bare", "--text", "text.txt"), "reads images, but"),
        (("profile", "model", "--images", "photos"), "reads text, but"),
        (("profile", "bare", "--images", "photos", "--length", 7), "an image is 13 tokens"),
        (("profile", "bare", "--images", "photos", "--tokens", 12), "tokens for at least one"),
        (("profile", "bare", "--images", "photos", "--tokenizer", "model"), "need no tokenizer"),
        (("profile", "bare", "--images", "none"), "it does not exist"),
        (("compress", "bare", "--attn-params", "75%"), "got neither"),
        (
            ("compress", "bare", "--attn-params", "75%", "--images", "photos", "--recover", 9),
            "--recover is for text models",
        ),
        (
            (
                "compress",
                "bare",
                "--attn-params",
                "75%",
                "--images",
                "photos",
                "--max-ratio",
                "1.1",
            ),
            "--max-ratio is for text models",
        ),
        (
            (
                "compress",
                "bare",
                "--attn-params",
                "75%",
                "--images",
                "photos",
                "--held-out",
                "text.txt",
            ),
            "--held-out is for text models",
        ),
    ],
)
def test_bad_input_is_one_sentence(headwise, place, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(place)
    result = headwise(*words, "-o", tmp_path / "out")
    assert result.code == 2
    assert message in result.err
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.profile").exists()
