"""Every family: the uniform plan is the stock model."""

from __future__ import annotations

import pytest
import torch
import transformers

from headwise.errors import PlanError
from headwise.models.build import convert, plan_of, stock_plan
from headwise.models.shapes import stock_class
from headwise.plan import Plan
from headwise.planning.cost import cost
from tests import lanes, tiny
from tests.tolerances import BFLOAT16, BFLOAT16_OPT, FELT, REORDERED, STOCK, difference


def _logits(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


def test_logits_parameters_and_cost(every_family):
    stock, inputs = tiny.stock(every_family), tiny.inputs(every_family)
    model = convert(stock)
    expected = _logits(stock, inputs)
    torch.testing.assert_close(_logits(model, inputs), expected, **STOCK)
    counted = sum(p.numel() for p in model.parameters())
    assert counted == sum(p.numel() for p in stock.parameters())
    assert counted == cost(plan_of(model)).params
    projections = [
        p.numel()
        for attention in model.attentions()
        for name, p in attention.named_parameters()
        if "_norm" not in name
    ]
    assert sum(projections) == cost(plan_of(model)).attn_params
    # The control: one weight of one head moved is seen.
    with torch.no_grad():
        model.attentions()[1].k_proj.weight[1].add_(0.5)
    assert difference(_logits(model, inputs), expected) > FELT


def test_bfloat16(any_family):
    stock, inputs = tiny.stock(any_family), tiny.inputs(any_family)
    stock = stock.to(torch.bfloat16)
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
    expected = _logits(stock, inputs).float()
    model = convert(stock)
    assert model.dtype == torch.bfloat16
    allowed = BFLOAT16_OPT if any_family == "opt" else BFLOAT16
    assert difference(_logits(model, inputs).float(), expected) <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("beams", lanes.slow_but((1,), (1, 3)))
def test_generations(causal_family, beams):
    stock = tiny.stock(causal_family)
    model = convert(stock)
    for inputs in (tiny.inputs(causal_family), tiny.padded()):
        for cached in (True, False):
            options = {
                "max_new_tokens": 7,
                "do_sample": False,
                "num_beams": beams,
                "use_cache": cached,
            }
            expected = stock.generate(**inputs, **options)
            assert torch.equal(model.generate(**inputs, **options), expected)


@pytest.mark.slow
def test_static_cache(causal_family):
    stock, inputs = tiny.stock(causal_family), tiny.padded()
    model = convert(stock)
    options = {"max_new_tokens": 7, "do_sample": False, "disable_compile": True}
    expected = stock.generate(**inputs, **options)
    made = model.generate(**inputs, **options, cache_implementation="static")
    assert torch.equal(made, expected)


def test_attention_weights_in_eager(any_family):
    stock, inputs = tiny.stock(any_family), tiny.inputs(any_family)
    model = convert(stock)
    stock.set_attn_implementation("eager")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = stock(**inputs, output_attentions=True)
        made = model(**inputs, output_attentions=True)
    assert len(made.attentions) == len(expected.attentions) == 3
    for ours, theirs in zip(made.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(ours, theirs, **STOCK)
    torch.testing.assert_close(made.logits, expected.logits, **STOCK)
    with torch.no_grad():
        as_tuple = model(**inputs, output_attentions=True, return_dict=False)
        hidden = model(**inputs, output_hidden_states=True).hidden_states
    assert isinstance(as_tuple, tuple)
    assert len(hidden) == 4


def test_saved_and_loaded(any_family, tmp_path):
    stock, inputs = tiny.stock(any_family), tiny.inputs(any_family)
    model = convert(stock)
    model.save_pretrained(tmp_path)
    auto = getattr(transformers, type(model)._auto_class)
    loaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(_logits(loaded, inputs), _logits(model, inputs))
    assert plan_of(loaded) == plan_of(model)


def test_losses_are_the_stock_losses(causal_family):
    stock, inputs = tiny.stock(causal_family), tiny.inputs(causal_family)
    labels = inputs["input_ids"]
    expected = stock(**inputs, labels=labels, num_items_in_batch=torch.tensor(31)).loss
    made = convert(stock)(**inputs, labels=labels, num_items_in_batch=torch.tensor(31)).loss
    torch.testing.assert_close(made, expected, **STOCK)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "roberta", "distilbert", "opt"])
def test_sequence_classification(name):
    config = tiny.config(name)
    config.num_labels = 5
    stock = tiny.randomise(stock_class(config, "sequence-classification")(config))
    model, inputs = convert(stock), tiny.padded()
    torch.testing.assert_close(_logits(model, inputs), _logits(stock, inputs), **STOCK)
    assert model.config.num_labels == 5


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_bare_models_load_from_task_models(name, tmp_path):
    stock, inputs = tiny.stock(name), tiny.inputs(name)
    bare_stock = tiny.stock(name, "bare")
    bare_stock.load_state_dict(stock.base_model.state_dict(), strict=False)
    convert(stock).save_pretrained(tmp_path)
    bare = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        made = bare(**inputs).last_hidden_state
        expected = bare_stock(**inputs).last_hidden_state
    torch.testing.assert_close(made, expected, **REORDERED)


def test_the_plan_of_a_config_needs_no_weights(every_family):
    plan = stock_plan(tiny.config(every_family))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.shape.family == tiny.CONFIGS[every_family].model_type


def test_windows_are_read():
    assert stock_plan(tiny.config("gemma3_text")).shape.windows == (5, None, 5)
    assert stock_plan(tiny.config("mistral")).shape.windows == (5, 5, 5)
    assert stock_plan(tiny.config("llama")).shape.windows == ()


def test_unsupported_family_is_named():
    config = transformers.T5Config(d_model=8, num_layers=1, num_heads=1)
    with pytest.raises(PlanError, match=r"one of bert, .*, vit, got 't5'.*backbones_headwise\.py"):
        stock_plan(config)


def test_unknown_stock_class_is_named():
    model = transformers.BertForNextSentencePrediction(tiny.config("bert"))
    with pytest.raises(PlanError, match="got BertForNextSentencePrediction"):
        convert(model)
