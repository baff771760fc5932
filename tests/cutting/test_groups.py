"""Cuts that drop head groups and change their order."""

from __future__ import annotations

import pytest

from headwise.cutting.run import cut_model
from headwise.errors import PlanError
from headwise.measure.size import counted
from headwise.models.build import convert
from headwise.models.record import read_cut_record
from headwise.planning.cost import cost
from headwise.source import open_source
from tests import lanes
from tests.cutting.test_compress import load, project
from tests.tolerances import FELT, IDENTITY, difference


def shuffled(plan, *, whole_layer=True):
    """The plan with the groups of every layer in reverse, one dropped, and a layer without any."""
    layers = []
    for i, layer in enumerate(plan.layers):
        heads = [h.model_copy(update={"source": j}) for j, h in enumerate(layer.heads)][::-1]
        heads = [] if whole_layer and i == 1 else heads[: max(1, len(heads) - (i == 0))]
        layers.append(layer.model_copy(update={"heads": tuple(heads)}))
    return plan.model_copy(update={"layers": tuple(layers)})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    lanes.slow_but(
        ("llama", "gpt2", "qwen3", "olmo2"),
        ("llama", "gpt2", "gpt_neox", "qwen2", "qwen3", "gemma3_text", "olmo2", "vit", "bert_bare"),
    ),
)
def test_the_cut_is_the_projection_it_says(shared, tmp_path, name):
    """What is dropped is as good as its mean (where an output bias takes it up) or zero."""
    dense = shared(name)
    plan = shuffled(dense.plan(0.8))
    cut_model(dense.request(plan, refit=False, fit=0), tmp_path / "out")
    cut = load(tmp_path / "out", name)
    wrapped = convert(dense.model)
    for i, attention in enumerate(wrapped.attentions()):
        project(attention, dense.profile, plan, i, cut.attentions()[i])
    found = dense.outputs(cut)
    assert difference(found, dense.outputs(wrapped)) <= IDENTITY
    assert difference(found, dense.outputs(dense.model)) > FELT
    assert counted(open_source(tmp_path / "out")).attn_params == cost(plan).attn_params


@pytest.mark.slow
@pytest.mark.parametrize("name", lanes.slow_but(("gpt2",), ("llama", "gpt2")))
def test_refits_and_fits_live_with_layers_without_heads(subject, tmp_path, name):
    dense = subject(name, rows=24)
    plan = shuffled(dense.plan(0.8))
    cut_model(dense.request(plan), tmp_path / "out")
    records = read_cut_record(tmp_path / "out").layers
    assert records[1].get("fit") is None
    assert (records[1].get("refit") is None) == (name == "llama")  # GPT-2 has a bias to refit
    assert records[0]["refit"] is not None
    assert difference(dense.outputs(load(tmp_path / "out", name)), dense.outputs(dense.model)) > 0


def test_a_change_of_order_changes_nothing(shared, tmp_path):
    dense = shared("llama")
    plan = dense.plan(0.8)
    mixed = plan.model_copy(
        update={
            "layers": tuple(
                layer.model_copy(
                    update={
                        "heads": tuple(
                            h.model_copy(update={"source": j}) for j, h in enumerate(layer.heads)
                        )[::-1]
                    }
                )
                for layer in plan.layers
            )
        }
    )
    outputs = []
    for k, one in enumerate((plan, mixed)):
        cut_model(dense.request(one, refit=False, fit=0), tmp_path / str(k))
        outputs.append(dense.outputs(load(tmp_path / str(k), "llama")))
    assert difference(outputs[1], outputs[0]) <= IDENTITY


def test_a_group_that_was_never_profiled_is_refused(subject, tmp_path):
    dense = subject("llama")
    plan = dense.plan(0.8)
    first = plan.layers[0]
    heads = (first.heads[0].model_copy(update={"source": 99}), *first.heads[1:])
    wrong = plan.model_copy(
        update={"layers": (first.model_copy(update={"heads": heads}), *plan.layers[1:])}
    )
    with pytest.raises(PlanError, match="use the plan with the profile it was fitted to"):
        cut_model(dense.request(wrong), tmp_path / "out")
