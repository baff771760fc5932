"""`headwise plan design` as people run it, with proxies too small to mean anything."""

import json

import pytest

from headwise.plan import Plan
from headwise.planning.cost import cost, dense_cost
from headwise.planning.families import new_shape
from tests.training.test_train import TEXT

pytestmark = pytest.mark.slow
SIZES = "--layers 5 --d-model 48 --heads 4 --context 16 --vocab-size 512 --attn-params 60%"
QUICK = "--seeds 2 --steps 3 --batch-size 2 --proxy-layers 2 --proxy-d-model 16 --tokens 64"
PROXY = {"n_layers": 2, "d_model": 16, "n_heads": 4, "context": 16}


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_text_becomes_a_plan_with_its_evidence(headwise, tmp_path, family):
    (tmp_path / "text.txt").write_text(TEXT.documents[0])
    words = (
        *("plan", "design", *SIZES.split(), *QUICK.split(), "--family", family, "--device", "cpu"),
        *("--text", tmp_path / "text.txt", "--multiple-of", "2", "-o", tmp_path / "plan.json"),
    )
    document = json.loads(headwise(*words, "--json").out)
    assert document["evidence"]["seeds"] == 2
    assert document["evidence"]["low"] <= document["evidence"]["gain"]
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert plan.origin.policy == "proxy"
    assert cost(plan).attn_params <= 0.6 * dense_cost(plan.shape).attn_params
    assert "fitted to 2 proxies of 2 layers" in plan.origin.notes[0]
    assert "is a hypothesis" in plan.origin.notes[-1]
    weights = tmp_path / "plan.json.proxy" / "seed-0" / "model" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    # The same command again uses the proxies that are there, and gives the same plan.
    again = json.loads(headwise(*words, "--force", "--json").out)
    assert again["plan"]["layers"] == document["plan"]["layers"]
    assert weights.stat().st_mtime_ns == before
    # So does another budget; where it counts MLPs, they are planned too.
    proxy = ("--proxy", tmp_path / "plan.json.proxy", "--ffn-multiple-of", "8")
    other = [str(w) for w in words if w not in ("-o", tmp_path / "plan.json")]
    other[other.index("--attn-params")] = "--block-params"
    wide = json.loads(headwise(*other, *proxy, "-o", tmp_path / "both.json", "--json").out)
    assert weights.stat().st_mtime_ns == before
    both = Plan.from_json((tmp_path / "both.json").read_text())
    assert both.changes_ffn
    assert not plan.changes_ffn
    spent, dense = cost(both), dense_cost(both.shape)
    assert spent.block_params <= 0.6 * dense.block_params
    assert not any("ffn" in name for name in document["evidence"]["narrower"])
    assert wide["evidence"]["seeds"] == 2
    shape = Plan.from_json((weights.parents[1] / "plan.json").read_text()).shape
    assert shape.ffn_dim == 2 * new_shape(family=family, **PROXY).ffn_dim


def test_a_limit_on_mlps_needs_mlps(headwise, tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    refused = headwise(
        *("plan", "design", *SIZES.split(), "--ffn-dim", "0", "--ffn-params", "50%"),
        *("--text", tmp_path / "text.txt", "-o", tmp_path / "plan.json"),
    )
    assert refused.code == 2
    assert "the model has none" in refused.err


def test_a_design_stays_within_an_engine(headwise, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT.documents[0])
    words = ("plan", "design", *SIZES.split(), *QUICK.split(), "--text", tmp_path / "text.txt")
    words = (*words, "--multiple-of", "2", "--for", "stock")
    done = headwise(*words, "-o", tmp_path / "plan.json")
    assert done.code == 0, done.err
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert len({(h.qk_dim, h.vo_dim) for layer in plan.layers for h in layer.heads}) == 1
    # What no width changes is refused before anything is trained.
    refused = headwise(*words, "--family", "bert", "-o", tmp_path / "other.json")
    assert refused.code == 2
    assert "bert is an encoder" in refused.err
    assert not (tmp_path / "other.json.proxy").exists()


def test_proxies_never_mix_with_other_files(headwise, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT.documents[0])
    (tmp_path / "album").mkdir()
    (tmp_path / "album" / "cat.png").write_text("cat")
    refused = headwise(
        *("plan", "design", *SIZES.split(), *QUICK.split(), "--text", tmp_path / "text.txt"),
        *("--proxy", tmp_path / "album", "--multiple-of", "2", "-o", tmp_path / "plan.json"),
    )
    assert refused.code == 2
    assert "headwise did not write it (it contains cat.png)" in refused.err
    assert [p.name for p in (tmp_path / "album").iterdir()] == ["cat.png"]


def test_images_are_refused(headwise, tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    refused = headwise(
        *("plan", "design", "--layers", "2", "--d-model", "16", "--heads", "2", "--context", "5"),
        *("--family", "vit", "--text", tmp_path / "text.txt", "-o", tmp_path / "plan.json"),
    )
    assert refused.code == 2
    assert "a vit model reads images" in refused.err
