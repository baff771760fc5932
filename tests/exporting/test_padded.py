"""Any plan, padded with zeros to its stock shape, is the same function in the stock class."""

from __future__ import annotations

import json

import pytest
import torch

import headwise as hw
from headwise.errors import HeadwiseError
from headwise.models.build import build_model, convert
from tests import lanes, tiny
from tests.exporting.portable import saved
from tests.tiny import CONFIGS

NORMED = ("qwen3", "gemma3_text", "olmo2")


@pytest.mark.parametrize("name", lanes.slow_but(("llama", "gpt2", "vit"), CONFIGS))
def test_every_family_pads_to_its_stock_class(name, tmp_path):
    task = "bare" if tiny.task_of(name) == "masked-lm" else None
    cut = tiny.narrowed(convert(tiny.stock(name, task)), scores=name not in NORMED)
    made = hw.export(saved(cut, tmp_path / "cut"), to="padded", out=tmp_path / "out")
    assert made.parity.error < 1e-5
    assert made.held
    assert made.record.architecture == cut.config.backbone.model_type
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["model_type"] == cut.config.backbone.model_type
    assert "**nothing is saved**" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("name", NORMED)
def test_norms_over_some_planes_have_no_stock_class(name, tmp_path):
    cut = saved(tiny.narrowed(convert(tiny.stock(name))), tmp_path / "cut")
    with pytest.raises(HeadwiseError, match=r"norms over some of the columns .* cut values only"):
        hw.export(cut, to="padded", out=tmp_path / "out")


def test_heads_that_are_not_there_are_zero(tmp_path):
    plan = hw.Plan(
        shape=hw.ModelShape(
            n_layers=2, d_model=24, context=67, n_heads=4, n_kv_heads=4, qk_dim=10, vo_dim=10,
            vocab_size=tiny.VOCAB, ffn_dim=37,
        ),
        layers=(
            hw.LayerPlan(heads=(hw.HeadSpec(qk_dim=6, vo_dim=10),) * 3),
            hw.LayerPlan(heads=(hw.HeadSpec(qk_dim=10, vo_dim=4),)),
        ),
    )  # fmt: skip
    model = tiny.randomise(build_model(plan, seed=1))
    assert hw.export(saved(model, tmp_path / "cut"), to="padded", out=tmp_path / "out").held
    stock = hw.load(tmp_path / "out")
    assert stock.model.layers[1].self_attn.k_proj.weight.shape == (40, 24)
    assert torch.count_nonzero(stock.model.layers[1].self_attn.k_proj.weight[10:]) == 0


def test_a_wider_mlp_than_the_shape_has_is_refused(tmp_path):
    head = hw.HeadSpec(qk_dim=8, vo_dim=8)
    plan = hw.Plan(
        shape=hw.ModelShape(
            n_layers=1, d_model=24, context=67, n_heads=1, n_kv_heads=1, qk_dim=8, vo_dim=8,
            vocab_size=tiny.VOCAB, ffn_dim=37,
        ),
        layers=(hw.LayerPlan(heads=(head,), ffn_dim=41),),
    )  # fmt: skip
    model = saved(build_model(plan, seed=1), tmp_path / "wide")
    with pytest.raises(HeadwiseError, match="MLP of 41 neurons, wider than the 37"):
        hw.export(model, to="padded", out=tmp_path / "out")


def test_a_wider_head_than_the_shape_has_is_refused(tmp_path):
    plan = hw.Plan(
        shape=hw.ModelShape(
            n_layers=1, d_model=24, context=67, n_heads=2, n_kv_heads=2, qk_dim=8, vo_dim=8,
            vocab_size=tiny.VOCAB, ffn_dim=37,
        ),
        layers=(hw.LayerPlan(heads=(hw.HeadSpec(qk_dim=8, vo_dim=12),)),),
    )  # fmt: skip
    model = saved(build_model(plan, seed=1), tmp_path / "wide")
    with pytest.raises(HeadwiseError, match="heads 8/12 wide, wider than the 8/8"):
        hw.export(model, to="padded", out=tmp_path / "out")
