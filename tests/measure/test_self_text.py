"""Text that a model writes itself: drawn from its distribution, the same after a kill."""

import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.measure import generation as module
from headwise.measure.generation import SELF_TEXT_RECORD, self_text, write_self_text
from headwise.source import open_source
from tests import tiny


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("self-text")
    tiny.write_llama(folder, characters=20_000, vocab_size=293)
    return folder


@pytest.fixture
def source(place):
    return open_source(place / "model")


@pytest.mark.slow
def test_the_seed_decides_the_text(source, tmp_path):
    one, same, other = (
        self_text(source, 200, tmp_path / name, seed=seed)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert one == same
    assert one.sha256 != other.sha256
    again = self_text(source, 200, tmp_path / "a")
    assert again == one
    with pytest.raises(HeadwiseError, match=r"with seed 0, not 200 of .* with seed 3"):
        self_text(source, 200, tmp_path / "a", seed=3)


def test_text_of_other_weights_is_refused(place, tmp_path):
    shutil.copytree(place / "model", tmp_path / "model")
    self_text(open_source(tmp_path / "model"), 60, tmp_path / "a")
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    save_file({n: 1.5 * t for n, t in tensors.items()}, weights, {"format": "pt"})
    with pytest.raises(HeadwiseError, match="was written by other weights than"):
        self_text(open_source(tmp_path / "model"), 60, tmp_path / "a")


@pytest.mark.slow
def test_a_killed_writing_ends_in_the_same_text(source, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LENGTH", 16)
    monkeypatch.setattr(module, "TOGETHER", 2)
    whole = write_self_text(source, 100, tmp_path / "whole")

    def killed(what, done, total):
        if done == 2:
            raise MemoryError

    with pytest.raises(MemoryError):
        write_self_text(source, 100, tmp_path / "killed", progress=killed)
    assert not (tmp_path / "killed").exists()
    drawn = []
    draw = module._draw
    monkeypatch.setattr(module, "_draw", lambda *a: drawn.append(a) or draw(*a))
    assert write_self_text(source, 100, tmp_path / "killed") == whole
    assert len(drawn) == 2  # of four parts two were there
    files = [(tmp_path / n / SELF_TEXT_RECORD).read_bytes() for n in ("whole", "killed")]
    assert files[0] == files[1]


def test_tokens_are_drawn_as_the_model_predicts_them(source):
    """First tokens against the exact distribution; uniform drawing is the negative control."""
    model = source.load("causal-lm", device="cpu", dtype="fp32")
    with torch.no_grad():
        first = model(input_ids=torch.tensor([[5]])).logits[0, -1]
        model.lm_head.weight.mul_(20 / first.std())
        exact = model(input_ids=torch.tensor([[5]])).logits[0, -1].double().softmax(-1)
    n = 4000
    counts = torch.bincount(module._draw(model, 5, (n, 1), (0, 0))[:, 0], minlength=len(exact)) / n
    uniform = torch.full_like(exact, 1 / len(exact))
    assert float((counts - exact).abs().sum()) < 5 / math.sqrt(n) * float(exact.sqrt().sum())
    assert float((counts - exact).abs().sum()) < 0.2 * float((uniform - exact).abs().sum())


@pytest.mark.slow
def test_a_cut_needs_no_other_text(place, tmp_path):
    options = {"tokens": 160, "length": 16, "attn_params": "75%", "multiple_of": 2}
    out = tmp_path / "small"
    made = hw.compress(place / "model", self_text=400, out=out, verify_tokens=32, **options)
    assert made.record.calibration.source == "self-text"
    assert [t.source for t in made.verification.texts] == ["self-text (held out)"]
    assert (tmp_path / "small.self-text" / SELF_TEXT_RECORD).exists()
