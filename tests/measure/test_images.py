"""Two image models beside each other, against the plain definitions."""

import numpy as np
import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification, ViTModel

from headwise.errors import HeadwiseError
from headwise.measure.images import image_comparison
from headwise.nn.build import convert

SIZES = {
    "hidden_size": 33,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": (6, 8),
    "patch_size": 2,
}


def made(seed, kind=ViTForImageClassification):
    torch.manual_seed(seed)
    model = kind(ViTConfig(**SIZES, num_labels=5))
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape)
            p.copy_(noise * 0.25 if p.ndim > 1 else p + noise / 5)
    return model.eval()


@pytest.fixture
def pixels():
    return np.random.default_rng(3).normal(size=(19, 3, 6, 8)).astype(np.float16)


@torch.no_grad()
def test_classifiers_are_compared_by_embedding_and_classes(pixels):
    model, reference = made(1), made(2)
    found = image_comparison(model, reference, pixels)
    x = torch.from_numpy(pixels).float()
    a, b = (m.vit(x).last_hidden_state.double().mean(1) for m in (model, reference))
    assert found.cosines == pytest.approx(((a * b).sum(1) / a.norm(dim=1) / b.norm(dim=1)).tolist())
    q, p = (m(x).logits.double().softmax(-1) for m in (model, reference))
    assert found.agreed == tuple((q.argmax(1) == p.argmax(1)).tolist())
    assert 0 < sum(found.agreed) < 19
    assert found.divergences == pytest.approx((p * (p / q).log()).sum(1).tolist(), rel=1e-5)
    document = found.to_dict()
    assert document["images"] == 19
    assert document["top_agreement"] == pytest.approx(sum(found.agreed) / 19)
    assert document["least_cosine"] == min(found.cosines) < document["cosine"]


def test_a_model_is_its_own_equal(pixels):
    reference = made(2)
    found = image_comparison(convert(reference), reference, pixels).to_dict()
    assert found["cosine"] == pytest.approx(1, abs=1e-6)
    assert found["top_agreement"] == 1
    assert found["kl"] == pytest.approx(0, abs=1e-6)


def test_without_classes_there_is_the_embedding_alone(pixels):
    bare = made(2, ViTModel)
    seen = []
    found = image_comparison(convert(bare), bare, pixels, tick=lambda *at: seen.append(at))
    assert set(found.to_dict()) == {"images", "cosine", "least_cosine"}
    assert seen == [(16, 19), (19, 19)]


def test_a_broken_model_is_said(pixels):
    broken = made(2)
    with torch.no_grad():
        broken.vit.layernorm.weight.fill_(torch.nan)
    with pytest.raises(HeadwiseError, match="are not numbers"):
        image_comparison(broken, made(2), pixels)
