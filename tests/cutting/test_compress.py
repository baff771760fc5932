"""Cut checkpoints: the identity at full rank, the projection they say, nothing else touched."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageClassification

from headwise.cutting.run import cut_model
from headwise.errors import HeadwiseError, OutputError
from headwise.measure.size import counted
from headwise.models.attention_headwise import NORMS
from headwise.models.norms_headwise import KeptNorm, epsilon
from headwise.planning.cost import cost
from headwise.profiling.worth import kept_directions
from headwise.source import open_source
from tests import lanes
from tests.tolerances import FELT, IDENTITY, difference


def load(folder, name):
    auto = AutoModelForImageClassification if name == "vit" else AutoModelForCausalLM
    if name.endswith("_bare"):
        auto = AutoModel
    return auto.from_pretrained(folder).eval()


def test_a_full_rank_cut_is_the_identity(shared, any_family, tmp_path):
    dense = shared(any_family)
    cut_model(dense.request(dense.plan(1.0)), tmp_path / "out")
    before, after = dense.outputs(dense.model), dense.outputs(load(tmp_path / "out", any_family))
    assert difference(after, before) <= IDENTITY


def test_a_cut_has_the_counted_size_and_is_no_identity(shared, any_family, tmp_path):
    dense = shared(any_family)
    plan = dense.plan(0.8)
    cut_model(dense.request(plan), tmp_path / "out")
    found = counted(open_source(tmp_path / "out"))
    assert found.attn_params == cost(plan).attn_params
    assert found.attn_params <= 0.8 * counted(open_source(dense.path)).attn_params
    before, after = dense.outputs(dense.model), dense.outputs(load(tmp_path / "out", any_family))
    assert difference(after, before) > FELT


@pytest.mark.parametrize(
    "name",
    lanes.slow_but(
        ("llama", "gpt2", "gpt_neox"), ("llama", "gpt2", "gpt_neox", "qwen2", "vit", "vit_bare")
    ),
)
def test_without_refit_the_cut_is_the_projection_it_says(shared, tmp_path, name):
    """The folded weights do what projecting z (and q, k) in the dense model does."""
    dense = shared(name)
    plan = dense.plan(0.8)
    cut_model(dense.request(plan, refit=False), tmp_path / "out")
    cut = load(tmp_path / "out", name)
    from headwise.models.build import convert

    wrapped = convert(dense.model)
    handles = []
    for i, attention in enumerate(wrapped.attentions()):
        handles += project(attention, dense.profile, plan, i)
    expected, found = dense.outputs(wrapped), dense.outputs(cut)
    if name == "qwen2":  # a value bias without an output bias is cut with its head
        assert torch.isfinite(found).all()
    assert difference(found, expected) <= IDENTITY


def project(attention, profile, plan, layer, cut=None):
    """Hooks that drop, in the dense model, what a plan does not keep.

    Norms divide by what the norms of `cut`, the cut layer, hold the mean of all squares to be.
    """
    heads = attention.classes[0]
    kept = [kept_directions(profile, plan, layer, j) for j in range(heads.n_heads)]

    def value(module, args):
        z = args[0].unflatten(-1, (heads.n_heads, heads.queries, heads.vo_dim)).double().clone()
        mean = torch.zeros(z.shape[2:], dtype=torch.float64)
        if profile.record.centred:
            mean = torch.from_numpy(profile.get(layer, "z_mean")).reshape(z.shape[2:])
        for j, parts in enumerate(kept):
            encode, decode = (torch.from_numpy(m) for m in profile.value_directions(layer, j))
            vo = list(parts.vo)
            z[:, :, j] = (z[:, :, j] - mean[j]) @ encode[:, vo] @ decode[vo] + mean[j]
        return (z.flatten(2).to(args[0]),)

    def query(module, args, out):
        q = out.unflatten(-1, (heads.n_heads, heads.queries, heads.qk_dim)).double().clone()
        rotary, half = heads.rotary_dim, heads.rotary_dim // 2
        for j, parts in enumerate(kept):
            gone = sorted(set(range(half)) - set(parts.planes))
            q[:, :, j][..., gone] = 0
            q[:, :, j][..., [half + p for p in gone]] = 0
            if rotary < heads.qk_dim:
                pair = profile.score_directions(layer, j)
                encode_q, encode_k = (torch.from_numpy(np.ascontiguousarray(m)) for m in pair)
                free = list(parts.free)
                q[:, :, j][..., rotary:] = (
                    q[:, :, j][..., rotary:] @ encode_q[:, free] @ encode_k[:, free].T
                )
        return q.flatten(2).to(out)

    hooks = [attention.o_proj.register_forward_pre_hook(value)]
    if not hasattr(attention, "q_norm"):
        return [*hooks, attention.q_proj.register_forward_hook(query)]
    for side, norm in (("query", attention.q_norm), ("key", attention.k_norm)):
        changed = partial(normed, plan.layers[layer], heads, attention.norm_over, cut, side)
        hooks.append(norm.register_forward_hook(changed))
    return hooks


def normed(plan, heads, norm_over, cut, side, module, args, out):
    """What a norm over the kept planes gives, zeros for the rest, from a norm over all."""
    own = getattr(cut, NORMS[side], None)
    if not isinstance(own, KeptNorm):
        return None
    times = heads.queries if side == "query" else 1
    apart = (*out.shape[:2], heads.n_heads, times, heads.qk_dim)
    x, n = args[0].reshape(apart).double(), out.reshape(apart).double()
    half, stays = heads.rotary_dim // 2, torch.zeros(heads.n_heads, heads.qk_dim)
    share, rest = (torch.ones(heads.n_heads, times) for _ in range(2))
    for j, (source, head) in enumerate(zip(plan.sources, plan.heads, strict=True)):
        stays[source, [*head.rotary_planes, *(half + p for p in head.rotary_planes)]] = 1
        if norm_over == "head":
            share[source] = own.share[j * times : (j + 1) * times]
            rest[source] = own.rest[j * times : (j + 1) * times]
    stays = stays[:, None].double()
    if norm_over == "head":
        full = x.square().mean(-1, keepdim=True)
        kept = (x * stays).square().sum(-1, keepdim=True) / stays.sum(-1, keepdim=True).clamp(min=1)
        estimate = kept * share[..., None] + rest[..., None]
    else:
        full = x.square().mean((2, 3, 4), keepdim=True)
        kept = (x * stays).square().sum((2, 3, 4), keepdim=True) / (times * stays.sum())
        estimate = kept * own.share + own.rest
    factor = ((full + epsilon(module)) / estimate).sqrt()
    return (n * stays * factor).reshape(out.shape).to(out)


def test_everything_but_the_attention_is_copied_bit_for_bit(subject, tmp_path):
    dense = subject("llama_tied", dtype=torch.bfloat16)
    (dense.path / "tokenizer.json").write_text("{}")
    cut_model(dense.request(dense.plan(0.7)), tmp_path / "out")
    before = load_file(dense.path / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    rest = [n for n in before if "self_attn" not in n]
    assert len(rest) > 10
    for name in rest:
        assert torch.equal(before[name], after[f"backbone.{name}"])
        assert after[f"backbone.{name}"].dtype is torch.bfloat16
    assert {t.dtype for t in after.values()} == {torch.bfloat16}
    assert not any("lm_head" in n for n in after)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_scores_of_a_cut_rotary_head_depend_on_relative_position_only(shared, tmp_path):
    dense = shared("llama")
    cut_model(dense.request(dense.plan(0.6)), tmp_path / "out")
    cut = load(tmp_path / "out", "llama")
    ids = dense.inputs["input_ids"][:, :7]
    places = torch.arange(7)[None].expand(2, -1)
    with torch.no_grad():
        here = cut(input_ids=ids, position_ids=places).logits
        there = cut(input_ids=ids, position_ids=places + 13).logits
    assert difference(there, here) <= IDENTITY


def test_the_refit_lowers_the_error_of_every_layer(shared, tmp_path):
    dense = shared("gpt2")
    record = cut_model(dense.request(dense.plan(0.5)), tmp_path / "out")  # no layer stays whole
    for layer in record.layers:
        assert layer["error"]["refitted"] < layer["error"]["folded"]


@pytest.mark.slow
def test_a_cut_that_only_folds_runs_no_text_and_gives_the_same_model(shared, tmp_path):
    dense = shared("llama")
    plan = dense.plan(0.7)
    # Too few batches to hold one aside: this one runs the text, but fits nothing either.
    run = cut_model(dense.request(plan, refit=False, fit=None), tmp_path / "run")
    folded = cut_model(dense.request(plan, refit=False, fit=0), tmp_path / "folded")
    assert all(layer["error"]["folded"] > 0 for layer in run.layers)
    assert all("error" not in layer or layer["error"] is None for layer in folded.layers)
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("run", "folded"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_killed_cut_goes_on_to_the_same_bytes(shared, tmp_path):
    dense = shared("llama")
    whole = dense.request(dense.plan(0.7))
    cut_model(whole, tmp_path / "undisturbed")

    class KilledError(Exception):
        pass

    def kill(what, done, total):
        if total:  # not at a message
            raise KilledError

    for _ in range(2):  # each run dies after one more look at a layer
        with pytest.raises(KilledError):
            cut_model(whole, tmp_path / "out", progress=kill)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").is_dir()
    cut_model(whole, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
    for file in (tmp_path / "undisturbed").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.slow
def test_another_plan_does_not_reuse_finished_layers(shared, tmp_path):
    dense = shared("llama")

    def stop(what, done, total):
        if total:  # not at a message
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_model(dense.request(dense.plan(0.5)), tmp_path / "out", progress=stop)
    with pytest.raises(OutputError, match=r"differs in plan\.layers"):
        cut_model(dense.request(dense.plan(0.9)), tmp_path / "out")
    cut_model(dense.request(dense.plan(0.9)), tmp_path / "out", force=True)
    cut_model(dense.request(dense.plan(0.9)), tmp_path / "fresh")
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "fresh"))
    assert all(torch.equal(one[n], other[n]) for n in one)


def test_a_plan_of_another_profile_is_refused(shared, tmp_path):
    dense = shared("llama")
    plan = dense.plan(0.8)
    origin = plan.origin.model_copy(update={"profile_sha256": "f" * 64})
    with pytest.raises(HeadwiseError, match="the plan was fitted to profile ffffffffffff…"):
        cut_model(dense.request(plan.model_copy(update={"origin": origin})), tmp_path / "out")


def test_an_existing_output_is_kept(shared, tmp_path):
    dense = shared("llama")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(OutputError, match="exists already"):
        cut_model(dense.request(dense.plan(0.8)), tmp_path / "out")
    assert (tmp_path / "out" / "precious").exists()


def test_the_record_names_the_calibration_text(shared, tmp_path):
    dense = shared("llama")
    cut_model(dense.request(dense.plan(0.8)), tmp_path / "out")
    record = json.loads((tmp_path / "out" / "headwise.json").read_text())
    assert record["calibration"]["sha256"] == "0" * 64
    assert record["profile_sha256"] == dense.profile.sha256


def test_a_classifier_keeps_its_classes(subject, tmp_path):
    """The head is the source's, and the whole folder loads with and without it."""
    dense = subject("vit")
    (dense.path / "preprocessor_config.json").write_text("{}")
    cut_model(dense.request(dense.plan(0.7)), tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    for kind in ("weight", "bias"):
        assert torch.equal(
            after[f"backbone.classifier.{kind}"], getattr(dense.model.classifier, kind)
        )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["HeadwiseForImageClassification"]
    assert dense.outputs(load(tmp_path / "out", "vit")).shape == (2, 7)
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == "{}"
    record = json.loads((tmp_path / "out" / "headwise.json").read_text())
    assert record["calibration"] == {
        "source": "made up",
        "sha256": "0" * 64,
        "parts_sha256": None,
        "images": 6,
        "tokens": 6 * 13,
    }


@pytest.mark.slow
def test_the_layer_fit_is_tried_on_images_and_kept_only_where_it_pays(subject, tmp_path):
    dense = subject("vit", rows=36)  # 12 batches, one of them kept aside
    record = cut_model(dense.request(dense.plan(0.6)), tmp_path / "out")
    for layer in record.layers:
        assert layer["fit"]["steps"] == 11
        assert layer["error"]["refitted"] < layer["error"]["folded"]
    # Random images leave little to fit after a refit: without one, some layers gain.
    request = dense.request(dense.plan(0.6), refit=False, fit=60)
    fits = [layer["fit"] for layer in cut_model(request, tmp_path / "longer").layers]
    kept = [fit for fit in fits if fit["rate"] is not None]
    assert 0 < len(kept) < len(fits)
    for fit in fits:
        assert ("after" in fit["unseen_error"]) == (fit in kept)
    for fit in kept:
        assert 0 < fit["unseen_error"]["after"] < fit["unseen_error"]["before"]
