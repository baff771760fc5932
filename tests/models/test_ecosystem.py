"""The tools people use on Hugging Face models take ours."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from headwise.models.build import build_model, convert, plan_of, stock_plan
from headwise.plan import HeadSpec, LayerPlan, Plan
from tests import tiny
from tests.tolerances import REORDERED, SAME, SEEN


def _ragged(name="llama"):
    config = tiny.config(name)
    shape = stock_plan(config).shape
    heads = (HeadSpec(qk_dim=6, vo_dim=7, queries=4), HeadSpec(qk_dim=10, vo_dim=3, queries=2))
    layer = LayerPlan(heads=heads, biases=shape.attention_biases)
    return build_model(Plan(shape=shape, layers=(layer,) * 3), config=config, seed=5)


@pytest.fixture(params=["llama", "gpt2"])
def model(request):
    return _ragged(request.param)


@pytest.mark.slow
def test_trainer_learns_saves_and_resumes(model, tmp_path):
    ids = torch.arange(3, 14)
    data = [{"input_ids": ids, "labels": ids} for _ in range(24)]

    def trainer(trained, steps):
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            save_steps=6,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        return Trainer(model=trained, args=arguments, train_dataset=data)

    running = trainer(model, 6)
    running.train()
    losses = [entry["loss"] for entry in running.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    loaded = type(model).from_pretrained(tmp_path / "checkpoint-6")
    assert torch.equal(loaded(ids[None]).logits, model.eval()(ids[None]).logits)
    resumed = trainer(_ragged(model.config.backbone.model_type), 8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert resumed.state.global_step == 8


def test_lora_attaches_trains_and_merges(model):
    from peft import LoraConfig, get_peft_model

    tiny.randomise(model)
    ids = tiny.inputs("llama")["input_ids"]
    expected = model(ids).logits.detach()
    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(model, settings)
    torch.testing.assert_close(adapted(input_ids=ids).logits, expected)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    adapted.eval()
    trained = adapted(input_ids=ids).logits.detach()
    assert (trained - expected).abs().max() > SEEN
    made = adapted.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, trained, **REORDERED)
    assert torch.equal(merged.generate(ids, max_new_tokens=3, do_sample=False), made)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "gpt_neox"])
def test_gradient_checkpointing_gives_the_same_gradients(name):
    model = convert(tiny.stock(name)).eval()
    ids = tiny.inputs("llama")["input_ids"]

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    model.train()  # checkpointing works in training only; the tiny models' dropout must be off
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "output_dropout"):
            module.dropout = module.output_dropout = 0.0
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    made = gradients()
    assert made.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(made[key], value, **SAME)


def _tokenizer(vocab):
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = {w: i for i, w in enumerate(special + [f"w{i}" for i in range(4, vocab)])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:lm_eval")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:sacrebleu")
def test_lm_eval_takes_the_model_object(model):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tiny.randomise(model)
    judge = HFLM(pretrained=model, tokenizer=_tokenizer(tiny.VOCAB), batch_size=2, device="cpu")
    pairs = [("w5 w7 w11", " w13 w17"), ("w19", " w23")]
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=0) for pair in pairs
    ]
    answers = judge.loglikelihood(requests, disable_tqdm=True)
    for (context, continuation), (value, _) in zip(pairs, answers, strict=True):
        ids = [int(w[1:]) for w in (context + continuation).split()]
        known = len(context.split())
        with torch.no_grad():
            logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        by_hand = sum(logp[i - 1, ids[i]] for i in range(known, len(ids)))
        assert value == pytest.approx(by_hand.item(), abs=1e-4)


def test_configs_copy_pickle_and_pass_settings_on(model):
    config = model.config
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other.to_dict() == config.to_dict()
        assert other.vocab_size == 101
    config.use_cache = False
    assert config.backbone.use_cache is False
    config.pad_token_id = 4
    assert config.backbone.pad_token_id == 4
    config.num_labels = 7
    assert config.backbone.num_labels == 7
    config.own_setting = 3
    assert not hasattr(config.backbone, "own_setting")
    with pytest.raises(AttributeError):
        _ = config.no_such_setting
    assert config.get_text_config() is config.backbone


def test_models_copy_and_pickle(model):
    ids = tiny.inputs("llama")["input_ids"]
    model.eval()
    expected = model(ids).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(ids).logits, expected)


def test_embeddings_resize(model):
    model.resize_token_embeddings(107, mean_resizing=False)
    assert model.config.vocab_size == 107
    assert model.get_input_embeddings().weight.shape[0] == 107
    assert model(tiny.inputs("llama")["input_ids"]).logits.shape[-1] == 107


def test_training_with_dropout_is_random_and_evaluation_is_not():
    config = tiny.config("gpt2")
    assert config.attn_pdrop == config.resid_pdrop == 0.1
    model = build_model(stock_plan(config), config=config, seed=1)
    assert {(a.dropout, a.output_dropout) for a in model.attentions()} == {(0.1, 0.1)}
    ids = tiny.inputs("llama")["input_ids"]
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_the_plan_survives_as_a_plan(model):
    plan = plan_of(model)
    assert Plan.from_json(plan.to_json()) == plan
    assert all(h.score_scale is not None for layer in plan.layers for h in layer.heads)


def test_a_config_without_scales_is_refused(model):
    broken = copy.deepcopy(model.config)
    del broken.plan["layers"][0]["heads"][0]["score_scale"]
    with pytest.raises(ValueError, match="must state its score_scale"):
        type(model)(broken)


def test_meta_device_and_double_precision():
    config = tiny.config("llama")
    plan = stock_plan(config)
    with torch.device("meta"):
        model = build_model(plan, config=config)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert build_model(plan, config=config, dtype=torch.float64).dtype == torch.float64


@pytest.mark.slow
def test_settings_of_loading_reach_the_backbone(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.backbone._attn_implementation == "eager"
    for name, buffer in loaded.named_buffers():
        assert buffer.dtype == torch.float32, name  # rotary frequencies are never rounded
        assert torch.equal(buffer, model.get_buffer(name))
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    assert classifier(tiny.inputs("llama")["input_ids"]).logits.shape == (2, 5)
    assert model._no_split_modules  # layers are kept whole when a model is spread over devices
