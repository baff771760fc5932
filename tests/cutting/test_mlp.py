"""MLPs that are cut: which neurons stay, how W_down is refitted, and who else is changed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headwise.cutting.merging import merging
from headwise.cutting.run import cut_model
from headwise.errors import PlanError
from headwise.models.backbones_headwise import (
    Projection,
    Projections,
    family_of,
    layer_mlp,
    stock_attentions,
)
from headwise.models.build import convert, inner, plan_of
from headwise.plan import Budget, Limit
from headwise.planning.cost import cost
from headwise.planning.fit import fit
from headwise.planning.rules import WidthRules
from headwise.profiling.worth import fit_problem, kept_neurons
from headwise.source import open_source
from headwise.training.trained import choose_trained
from tests import lanes, tiny
from tests.cutting.test_compress import load
from tests.tolerances import FELT, IDENTITY, difference

RULES = WidthRules(multiple_of=2, ffn_multiple_of=8)


def plan_for(dense, **limits):
    budget = Budget(**{name: Limit.parse(text) for name, text in limits.items()})
    return fit(fit_problem(dense.profile, "sensitivity", RULES), budget).plan


def test_without_refit_the_others_give_their_mean_or_nothing(shared, any_family, tmp_path):
    """Cutting neurons is replacing them by zero, or, where there is a bias, by their mean."""
    dense = shared(any_family)
    plan = plan_for(dense, ffn_params="70%")
    assert plan.changes_ffn
    cut_model(dense.request(plan, refit=False, fit=0), tmp_path / "out")
    cut = load(tmp_path / "out", any_family)
    assert plan_of(cut).ffn_dims == plan.ffn_dims
    wrapped = convert(dense.model)
    stock = inner(wrapped)
    mlp = family_of(stock.config.model_type).mlp
    for i, (layer, _) in enumerate(stock_attentions(stock)):
        down = layer.get_submodule(mlp.down)
        gone = sorted(set(range(tiny.FFN)) - set(kept_neurons(dense.profile, plan, i)))
        mean = torch.from_numpy(dense.profile.get(i, "ffn_mean"))[gone].float()

        def close(module, args, gone=gone, mean=mean):
            x = args[0].clone()
            x[..., gone] = mean if module.bias is not None else 0.0
            return (x,)

        down.register_forward_pre_hook(close)
    assert difference(dense.outputs(cut), dense.outputs(wrapped)) <= IDENTITY
    assert difference(dense.outputs(cut), dense.outputs(dense.model)) > FELT


@pytest.mark.parametrize("name", lanes.slow_but(("phi3",), ("llama", "phi3", "gpt2")))
def test_a_budget_on_attention_leaves_mlps_bit_for_bit_and_one_on_all_cuts_both(
    shared, tmp_path, name
):
    dense = shared(name)
    before = load_file(dense.path / "model.safetensors")
    for budget in ({"attn_params": "80%"}, {"params": "80%"}):
        folder, plan = tmp_path / next(iter(budget)), plan_for(dense, **budget)
        cut_model(dense.request(plan), folder)
        after = load_file(folder / "model.safetensors")
        same = [torch.equal(t, after[f"backbone.{n}"]) for n, t in before.items() if ".mlp." in n]
        assert len(same) >= 6
        assert all(same) == ("attn_params" in budget)
        assert plan.changes_ffn == ("params" in budget)
        counted = sum(t.numel() for t in after.values())
        assert counted == cost(plan).params


def test_the_refit_of_w_down_lowers_the_error(shared, tmp_path):
    dense = shared("llama")
    plan = plan_for(dense, ffn_params="60%")
    plain = cut_model(dense.request(plan, refit=False, fit=0), tmp_path / "plain")
    refitted = cut_model(dense.request(plan, fit=0), tmp_path / "refitted")
    assert all(layer.get("mlp_refit") is None for layer in plain.layers)
    assert any(layer.get("mlp_refit") is not None for layer in refitted.layers)
    ids = torch.from_numpy(dense.profile.ids)
    errors = {}
    with torch.no_grad():
        target = dense.model(input_ids=ids).logits
        for name in ("plain", "refitted"):
            logits = load(tmp_path / name, "llama")(input_ids=ids).logits
            errors[name] = float((logits - target).square().mean())
    assert errors["refitted"] < 0.9 * errors["plain"]


HALF = tiny.FFN // 2
SCALES = torch.linspace(-1.7, 2.3, HALF)


def twinned(model):
    """Half of the neurons fire as the other half do, times a factor; one has no twin."""
    family = family_of(model.config.model_type)
    for layer, _ in stock_attentions(model):
        mlp = layer_mlp(layer, model.config).map(torch.clone)
        scales = SCALES.clone() if "gate" in mlp.by_side else torch.ones(HALF)
        sides = {}
        for side, own in mlp.items():
            weight, bias = own.weight, own.bias
            if side == "down":
                weight[:, HALF : 2 * HALF] = 0.7 * weight[:, :HALF] / scales
            else:
                factor = scales if side == "up" else torch.ones(HALF)
                weight[HALF : 2 * HALF] = factor[:, None] * weight[:HALF]
                if bias is not None:
                    bias[HALF : 2 * HALF] = factor * bias[:HALF]
            sides[side] = Projection(weight, bias)
        with torch.no_grad():
            for name, tensor in family.mlp.written(Projections(sides)).items():
                layer.get_parameter(name).copy_(tensor)


@pytest.mark.parametrize(
    ("name", "rows"),  # rows without and with batches held aside
    lanes.slow_but(
        (("gpt2", 6), ("llama", 30)),
        itertools.product(("llama", "llama_biased", "phi3", "gpt2"), (6, 30)),
    ),
)
def test_twins_merge_without_loss(subject, tmp_path, monkeypatch, name, rows):
    dense = subject(name, change=twinned, rows=rows)
    half = [x.model_copy(update={"ffn_dim": HALF + 1}) for x in dense.profile.plan.layers]
    plan = dense.profile.plan.model_copy(update={"layers": tuple(half)})
    merged = cut_model(dense.request(plan, fit=0), tmp_path / "merged")
    assert all(layer["merged_neurons"] == HALF for layer in merged.layers)
    before = dense.outputs(dense.model)
    assert difference(dense.outputs(load(tmp_path / "merged", name)), before) <= IDENTITY
    # The control: sensitivities alone keep both of some twins, and no refit brings the rest back.
    monkeypatch.setattr("headwise.cutting.sequential.COSINES", ())
    plain = cut_model(dense.request(plan, fit=0), tmp_path / "plain")
    assert all(layer.get("merged_neurons") is None for layer in plain.layers)
    assert difference(dense.outputs(load(tmp_path / "plain", name)), before) > FELT


def test_neurons_without_twins_stay_as_they_are(subject, tmp_path):
    dense = subject("llama")
    made = cut_model(dense.request(plan_for(dense, ffn_params="60%"), fit=0), tmp_path / "out")
    assert all(layer.get("merged_neurons") is None for layer in made.layers)


def test_a_merging_takes_the_most_sensitive_of_each_kind():
    rng = np.random.default_rng(3)
    a, b, c, d = rng.normal(size=(4, 500))
    rows = torch.from_numpy(np.stack([a, -2 * a, b, b + 0.02 * d, c, 0 * a], 1)).float()
    moment, sensitivity = rows.mT @ rows, np.array([3.0, 5.0, 1.0, 2.0, 0.5, 9.0])
    found = merging(moment, sensitivity, 4, 0.99)
    assert found.kept == (1, 3, 4, 5)
    assert found.merged == (0, 2)
    assert found.into == (0, 1)
    assert found.factor == pytest.approx((-0.5, 1.0), abs=0.01)
    # Where the width leaves room, twins stay, the most sensitive first.
    assert merging(moment, sensitivity, 5, 0.99).kept == (0, 1, 3, 4, 5)
    # The less alike ones are no twins when more is asked for.
    assert merging(moment, sensitivity, 4, 0.99999).kept == (1, 2, 3, 5)


def test_a_killed_cut_of_both_goes_on_to_the_same_bytes(shared, tmp_path):
    dense = shared("phi3")
    plan = plan_for(dense, params="80%")
    whole = cut_model(dense.request(plan), tmp_path / "whole")

    def stop(what, done, total):
        if what == "cutting" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut_model(dense.request(plan), tmp_path / "killed", progress=stop)
    again = cut_model(dense.request(plan), tmp_path / "killed")
    assert again.layers == whole.layers
    files = [tmp_path / name / "model.safetensors" for name in ("whole", "killed")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_plan_that_is_no_cut_is_refused(shared, tmp_path):
    dense = shared("llama")
    plan = plan_for(dense, ffn_params="60%")
    wide = [x.model_copy(update={"ffn_dim": 41}) for x in plan.layers]
    wider = plan.model_copy(update={"layers": tuple(wide)})
    with pytest.raises(PlanError, match="an MLP of 41 neurons, more than the profiled 37"):
        cut_model(dense.request(wider), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_recovery_trains_the_mlps_that_were_cut(shared, tmp_path):
    dense = shared("llama")
    plan = plan_for(dense, ffn_params="90%")
    widths = np.array(plan.ffn_dims)
    assert (widths < tiny.FFN).any()
    cut_model(dense.request(plan, refit=False, fit=0), tmp_path / "out")
    model = open_source(tmp_path / "out").load()
    choose_trained(model, "attention", seed=0)
    for i in range(tiny.LAYERS):
        trained = {n for n, p in model.named_parameters() if p.requires_grad and f".{i}." in n}
        assert any("self_attn" in n for n in trained)
        assert any(".mlp." in n for n in trained) == (widths[i] < tiny.FFN)
        assert not any("norm" in n for n in trained)
