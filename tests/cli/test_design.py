"""`headwise plan design` as people run it, with proxies too small to mean anything."""

import json

import pytest

from headwise.plan import Plan
from headwise.planning.cost import cost, dense_cost
from tests.training.test_train import TEXT

pytestmark = pytest.mark.slow
SIZES = "--layers 5 --d-model 48 --heads 4 --context 16 --vocab-size 512 --attn-params 60%"
QUICK = "--seeds 2 --steps 3 --batch-size 2 --proxy-layers 2 --proxy-d-model 16 --tokens 64"


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


def test_proxies_never_mix_with_other_files(headwise, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT.documents[0])
    (tmp_path / "album").mkdir()
    (tmp_path / "album" / "cat.png").write_text("cat")
    refused = headwise(
        *("plan", "design", *SIZES.split(), *QUICK.split(), "--text", tmp_path / "text.txt"),
        *("--proxy", tmp_path / "album", "-o", tmp_path / "plan.json"),
    )
    assert refused.code == 2
    assert "headwise did not write it (it holds cat.png)" in refused.err
    assert [p.name for p in (tmp_path / "album").iterdir()] == ["cat.png"]


def test_images_are_refused(headwise, tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    refused = headwise(
        *("plan", "design", "--layers", "2", "--d-model", "16", "--heads", "2", "--context", "5"),
        *("--family", "vit", "--text", tmp_path / "text.txt", "-o", tmp_path / "plan.json"),
    )
    assert refused.code == 2
    assert "a vit model reads images" in refused.err
