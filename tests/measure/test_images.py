"""Two image models beside each other, against the plain definitions."""

import numpy as np
import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.measure.comparison import image_comparison
from headwise.models.build import convert
from tests import tiny

FACTS = {"source": "photos", "sha256": "", "role": "other text", "is_calibration_text": False}


@pytest.fixture
def pixels():
    return np.random.default_rng(3).normal(size=(19, *tiny.IMAGE)).astype(np.float16)


@torch.no_grad()
def test_classifiers_are_compared_by_embedding_and_classes(pixels):
    model, reference = tiny.stock("vit", seed=1), tiny.stock("vit", seed=3)
    found = image_comparison(model, reference, pixels)
    x = torch.from_numpy(pixels).float()
    a, b = (m.vit(x).last_hidden_state.double().mean(1) for m in (model, reference))
    assert found.cosines == pytest.approx(((a * b).sum(1) / a.norm(dim=1) / b.norm(dim=1)).tolist())
    q, p = (m(x).logits.double().softmax(-1) for m in (model, reference))
    assert found.agreed == tuple((q.argmax(1) == p.argmax(1)).tolist())
    assert 0 < sum(found.agreed) < 19
    assert found.divergences == pytest.approx((p * (p / q).log()).sum(1).tolist(), rel=1e-5)
    quality = found.quality(**FACTS)
    assert quality.images == 19
    assert quality.top_agreement == pytest.approx(sum(found.agreed) / 19)
    assert quality.least_cosine == min(found.cosines) < quality.cosine


def test_a_model_is_its_own_equal(pixels):
    reference = tiny.stock("vit", seed=2)
    found = image_comparison(convert(reference), reference, pixels).quality(**FACTS)
    assert found.cosine == pytest.approx(1, abs=1e-6)
    assert found.top_agreement == 1
    assert found.kl == pytest.approx(0, abs=1e-6)


def test_without_classes_there_is_the_embedding_alone(pixels):
    bare = tiny.stock("vit_bare", seed=2)
    seen = []
    found = image_comparison(convert(bare), bare, pixels, progress=lambda *at: seen.append(at))
    quality = found.quality(**FACTS)
    assert quality.top_agreement is quality.kl is None
    assert seen == [("comparing", 16, 19), ("comparing", 19, 19)]


def test_a_broken_model_is_said(pixels):
    broken = tiny.stock("vit", seed=2)
    with torch.no_grad():
        broken.vit.layernorm.weight.fill_(torch.nan)
    with pytest.raises(HeadwiseError, match="NaN or infinite"):
        image_comparison(broken, tiny.stock("vit", seed=2), pixels)
