"""One opened model: read once, held once, and the same whether it lies in files or is alive."""

import copy
import json
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headwise.data.text import Text
from headwise.data.tokens import train_tokenizer
from headwise.errors import HeadwiseError, PlanError
from headwise.models.build import convert, plan_of
from headwise.models.modeling_headwise import HeadwisePreTrainedModel
from headwise.source import Source, copy_companions, open_source
from tests import tiny

TEXT = "The quick brown fox jumps over the lazy dog, 13 times. " * 40


def same(a, b):
    return torch.equal(a, b) and a.dtype == b.dtype


@pytest.fixture
def saved(tmp_path):
    def save(name="llama", task=None):
        model = tiny.stock(name, task)
        model.save_pretrained(tmp_path / name)
        return model, tmp_path / name

    return save


def test_an_open_source_is_returned_as_it_is(saved):
    _, folder = saved()
    source = open_source(folder)
    assert open_source(source) is source
    assert source.name == str(folder)
    assert open_source(str(folder)).folder == folder
    with pytest.raises(HeadwiseError, match="merge adapters"):
        open_source(torch.nn.Linear(2, 3))


def test_what_a_source_knows(saved, any_family):
    task = {"vit": "image-classification"}.get(any_family)
    encoder = any_family in ("bert", "roberta", "distilbert")
    model, folder = saved(any_family, task)
    source = open_source(folder)
    assert source.saved_task == (task or ("masked-lm" if encoder else "causal-lm"))
    assert source.task == (task or ("bare" if encoder else "causal-lm"))
    assert source.kind == ("image" if task else "encoder" if encoder else "causal")
    assert source.plan.shape.n_layers == 3
    assert not source.is_headwise
    live = open_source(model)
    assert (live.saved_task, live.task, live.kind) == (source.saved_task, source.task, source.kind)
    assert live.plan == source.plan
    assert live.weights_sha256 == source.weights_sha256


def test_a_loaded_model_is_the_stock_model(saved, any_family):
    model, folder = saved(any_family)
    source, inputs = open_source(folder), tiny.inputs(any_family)
    with torch.no_grad():
        expected = model(**inputs)[0]
        assert torch.equal(source.load(source.saved_task, device="cpu")(**inputs)[0], expected)
        wrapped = source.load(source.saved_task, headwise=True, device="cpu")
        assert isinstance(wrapped, HeadwisePreTrainedModel)
        found = wrapped(**inputs)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_headwise_folder_has_its_own_plan(tmp_path):
    made = convert(tiny.stock("llama"))
    made.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    assert source.is_headwise
    assert source.plan == plan_of(made)
    assert type(source.load(device="cpu")) is type(made)
    assert open_source(made).plan == source.plan
    assert open_source(made).task == "causal-lm"


def test_a_family_that_is_not_known_can_still_be_run(tmp_path):
    config = transformers.BloomConfig(vocab_size=53, hidden_size=12, n_layer=2, n_head=3)
    model = transformers.BloomForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    ids = torch.arange(11)[None]
    with torch.no_grad():
        assert torch.equal(source.load("causal-lm", device="cpu")(ids).logits, model(ids).logits)
    with pytest.raises(PlanError, match="backbone must be one of"):
        _ = source.plan


# --- read once, held once


@pytest.fixture
def counts(monkeypatch):
    """How often a config is read from a folder, and how many models are built."""
    found = {"configs": 0, "models": 0}
    read = transformers.PreTrainedConfig._get_config_dict.__func__

    def counting(cls, *args, **kwargs):
        found["configs"] += 1
        return read(cls, *args, **kwargs)

    monkeypatch.setattr(transformers.PreTrainedConfig, "_get_config_dict", classmethod(counting))
    build = transformers.LlamaForCausalLM.__init__

    def building(self, *args, **kwargs):
        found["models"] += 1
        build(self, *args, **kwargs)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", building)
    return found


def test_a_profile_and_a_cut_read_the_config_once(tmp_path, counts):
    from headwise.cutting.run import CutRequest, cut_model
    from headwise.cutting.settings import CutSettings
    from headwise.plan import Budget, Limit
    from headwise.planning.fit import fit
    from headwise.planning.rules import WidthRules
    from headwise.profiling.run import ProfileJob, profile_model
    from headwise.profiling.settings import ProfileSettings
    from headwise.profiling.source import load_for_profiling, sequences
    from headwise.profiling.worth import fit_problem

    tiny.write_llama(tmp_path, text=TEXT, vocab_size=270)
    counts.update(configs=0, models=0)
    source = open_source(tmp_path / "model")
    model = load_for_profiling(source, device="cpu")
    settings = ProfileSettings(length=17, tokens=170, chunk=3)
    rows = sequences(model, source.reader, Text("text", (TEXT,)), settings)
    job = ProfileJob(model, source.name, rows, settings, source.weights_sha256)
    profile = profile_model(job, tmp_path / "profile")
    plan = fit(
        fit_problem(profile, "sensitivity", WidthRules(multiple_of=2)),
        Budget(attn_params=Limit(share=0.7)),
    ).plan
    cut_model(CutRequest(source, profile, plan, CutSettings()), tmp_path / "cut")
    assert counts["configs"] == 1
    # One without memory, one loaded, one inside the headwise model, one run layer by layer, and
    # one inside the headwise model that is written.
    assert counts["models"] <= 5


@pytest.mark.slow
def test_a_whole_compression_reads_the_config_once(tmp_path, monkeypatch):
    """Profile, fit, cut, card, verification and report: all of one opened model."""
    import headwise as hw

    read, folders = transformers.PreTrainedConfig._get_config_dict.__func__, []

    def counting(cls, folder, *args, **kwargs):
        folders.append(str(folder))
        return read(cls, folder, *args, **kwargs)

    tiny.write_llama(tmp_path, text=TEXT, vocab_size=270)
    monkeypatch.setattr(transformers.PreTrainedConfig, "_get_config_dict", classmethod(counting))
    options = {"tokens": 170, "length": 17, "attn_params": "70%", "multiple_of": 2}
    where = {"text": str(tmp_path / "text.txt"), "out": tmp_path / "cut"}
    result = hw.compress(str(tmp_path / "model"), verify_tokens=32, **options, **where)
    assert result.verification.texts
    assert folders.count(str(tmp_path / "model")) == 1
    assert str(tmp_path / "cut") in folders  # the control: reading a config is counted


HELD = r"""
import re, sys, transformers
from pathlib import Path
from headwise.models.build import convert
from headwise.source import open_source

def held():  # without the pages of mapped files
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

transformers.logging.disable_progress_bar()
source = open_source(sys.argv[1])
stock = source.load(device="cpu")
before = held()
model = convert(stock, weights=sys.argv[2])
print(held() - before)
"""


@pytest.mark.slow
def test_a_converted_model_is_held_once(tmp_path):
    """Weights that are taken over or shared need no memory; the control copies them."""
    config = transformers.LlamaConfig(
        hidden_size=768, intermediate_size=96, num_hidden_layers=9, vocab_size=67
    )
    # In bf16, so that the loaded model, in fp32, has memory of its own and not the mapped file's.
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path)
    size = 2 * (tmp_path / "model.safetensors").stat().st_size / 1024

    def more(how):
        line = [sys.executable, "-c", HELD, str(tmp_path), how]
        return int(subprocess.run(line, capture_output=True, text=True, check=True).stdout)

    assert more("take") < 0.1 * size
    assert more("share") < 0.1 * size
    assert more("copy") > 0.8 * size


PROFILED = r"""
import re, sys, transformers
from pathlib import Path
import numpy as np
from headwise.profiling.run import ProfileJob, profile_model
from headwise.profiling.settings import ProfileSettings
from headwise.profiling.source import Sequences, load_for_profiling
from headwise.source import open_source

def peak():
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

transformers.logging.disable_progress_bar()
folder, out, again = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "twice"
start = peak()
source = open_source(folder)
kept = source.load(device="cpu") if again else None
model = load_for_profiling(source, device="cpu")
rows = Sequences(np.arange(4, 40).reshape(4, 9), "next-token", "made up", "0" * 64)
settings = ProfileSettings(length=9, tokens=36, chunk=1)
profile_model(ProfileJob(model, "model", rows, settings, source.weights_sha256), out)
print(peak() - start)
"""


@pytest.mark.slow
def test_a_profile_holds_one_copy_of_the_weights(tmp_path):
    """The peak of loading and profiling; the control holds the loaded stock model beside it."""
    config = transformers.LlamaConfig(
        hidden_size=640, intermediate_size=96, num_hidden_layers=8, vocab_size=67
    )
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "model")
    stored = (tmp_path / "model" / "model.safetensors").stat().st_size / 1024
    held = 2 * stored  # in fp32

    def peak(how):
        line = [
            sys.executable,
            "-c",
            PROFILED,
            *map(str, (tmp_path / "model", tmp_path / how, how)),
        ]
        return int(subprocess.run(line, capture_output=True, text=True, check=True).stdout)

    once, twice = peak("once"), peak("twice")
    assert once < stored + 1.5 * held  # the pages of the mapped file, one copy, and the work
    assert twice > once + 0.8 * held


def test_weights_that_are_taken_are_gone_from_the_stock_model(any_family):
    stock = tiny.stock(any_family)
    size = sum(p.numel() for p in stock.parameters())
    model = convert(stock, weights="take")
    attention = sum(p.numel() for p in stock.parameters() if p.is_meta)
    assert attention > 0.2 * size
    shared = {t.data_ptr() for t in stock.state_dict().values() if not t.is_meta}
    own = {t.data_ptr(): t.numel() for t in model.state_dict().values()}
    # Tying pads the bias of the output embeddings into a new one.
    assert sum(n for p, n in own.items() if p not in shared) <= attention + tiny.VOCAB


# --- a live model


def test_a_live_model_is_never_changed(any_family):
    model = tiny.stock(any_family)
    model.train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    places = {n: t.data_ptr() for n, t in model.state_dict().items()}
    source = open_source(model)
    loaded = source.load(source.saved_task)
    assert loaded is not model
    assert not loaded.training
    wrapped = source.load(source.saved_task, headwise=True)
    inputs = tiny.inputs(any_family)
    outputs = wrapped(**inputs)
    outputs[0].float().square().mean().backward()
    assert any(p.grad is not None for p in wrapped.parameters())
    short = source.load(source.saved_task, dtype="bf16")
    assert short.dtype == torch.bfloat16
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(same(t, before[n]) for n, t in model.state_dict().items())
    assert places == {n: t.data_ptr() for n, t in model.state_dict().items()}


def test_a_live_model_shares_its_weights():
    model = tiny.stock("llama")
    source = open_source(model)
    places = {t.data_ptr() for t in model.state_dict().values()}
    for made in (source.load(), source.load(headwise=True)):
        assert {t.data_ptr() for t in made.state_dict().values()} <= places


def test_a_live_model_is_read_layer_by_layer_as_its_folder_is(saved, any_family):
    model, folder = saved(any_family)
    inputs = [tiny.inputs(any_family)]
    task = open_source(folder).saved_task
    filed, live = (open_source(m).layers(inputs, task=task) for m in (folder, model))
    assert all(torch.equal(a, b) for a, b in zip(filed.first, live.first, strict=True))
    for i in filed:
        one, two = filed.load(i).state_dict(), live.load(i).state_dict()
        assert one.keys() == two.keys()
        assert all(same(one[n], two[n]) for n in one)


def test_what_belongs_to_a_live_model(tmp_path):
    words = train_tokenizer([TEXT], 270)
    source = open_source(tiny.stock("llama"), tokenizer=words)
    assert source.reader is words
    assert source.tokenizer is words
    assert source.name == "live model"
    names = source.copy_companions(tmp_path)
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= set(names)
    assert not (tmp_path / "config.json").exists()
    with pytest.raises(HeadwiseError, match="needs its tokenizer"):
        _ = open_source(tiny.stock("llama")).reader


def test_a_live_model_with_weights_kept_elsewhere_or_broken_is_refused():
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(tiny.config("llama"))
    with pytest.raises(HeadwiseError, match="must be in memory"):
        open_source(empty).names()
    broken = tiny.stock("llama")
    with torch.no_grad():
        broken.model.norm.weight[3] = float("nan")
    for ask in (lambda s: s.load(), lambda s: s.weights_sha256):
        with pytest.raises(HeadwiseError, match=r"model\.norm\.weight .*NaN"):
            ask(open_source(broken))
    with pytest.raises(HeadwiseError, match="for causal-lm, not for masked-lm"):
        open_source(tiny.stock("llama")).load("masked-lm")


# --- configs and weights that cannot be


ABSURD = [
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": -1},
    {"num_hidden_layers": "three"},
    {"vocab_size": 10**12},
    {"intermediate_size": 10**12},
    {"hidden_size": 0},
    {"head_dim": -8},
    {"num_attention_heads": 0},
    {"hidden_act": "no such"},
    {"rope_parameters": {"rope_type": "no such", "rope_theta": 1e4}},
    {"model_type": "no such"},
    {"model_type": ["llama"]},
]


@pytest.mark.parametrize("change", ABSURD, ids=lambda change: str(change)[:40])
def test_a_config_that_cannot_be_is_one_sentence(saved, change):
    _, folder = saved()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    for ask in (
        lambda s: s.load(device="cpu"),
        lambda s: s.load("causal-lm", device="cpu"),
        lambda s: s.layers([]),
    ):
        with pytest.raises(HeadwiseError) as error:
            ask(open_source(folder))
        assert len(str(error.value)) < 900


@pytest.mark.parametrize("change", [{"num_hidden_layers": 10**9}, {"layer_types": ["no such"]}])
def test_a_key_beside_the_backbone_is_checked_like_its_own(tmp_path, change):
    convert(tiny.stock("llama")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(HeadwiseError, match=next(iter(change))):
        open_source(tmp_path).load("causal-lm", device="cpu")


@pytest.mark.parametrize("kind", [torch.int8, torch.int64, torch.bool])
def test_weights_of_whole_numbers_are_refused(saved, kind):
    from safetensors.torch import save_file

    _, folder = saved()
    state = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    state[name] = torch.ones(state[name].shape, dtype=kind)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    for ask in (lambda s: s.load(device="cpu"), lambda s: s.layers([])):
        with pytest.raises(HeadwiseError, match=rf"{name} in \w+, but weights must be floating"):
            ask(open_source(folder))


HEADERS = [
    b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
    b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": 3}',
    b'{"a": []}',
    b"[" * 100_000,
    b"[]",
    b"\xff\xff",
]


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: repr(header[:60]))
def test_a_header_that_cannot_be_is_one_sentence(saved, header):
    _, folder = saved()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(HeadwiseError, match="not a complete safetensors file") as error:
        _ = open_source(folder).checkpoint
    assert len(str(error.value)) < 900


def test_a_source_can_be_copied_by_name_only(saved):
    """Two sources of one folder share nothing, so one can outlive a change of the other's files."""
    _, folder = saved()
    one, two = open_source(folder), open_source(folder)
    assert isinstance(one, Source)
    assert one.checkpoint is not two.checkpoint
    assert copy.copy(one.config) is not two.config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_labels": 10**9}, "num_labels .* at most 1,000,000"),
        ({"vision_config": {"num_layers": 10**9}}, "vision_config.num_layers .* number of tensors"),
        ({"model_type": "gpt_neo", "attention_types": [[["global"], 10**9]]}, "attention_types"),
        ({"nested": [[[{"n_layer": 10**9}]]]}, "n_layer"),
    ],
)
def test_counts_that_would_be_written_out_are_refused_before_they_are(saved, change, said):
    _, folder = saved()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(HeadwiseError, match=said):
        _ = open_source(folder).config


def test_a_config_of_absurd_length_is_refused_unread(saved):
    _, folder = saved()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [7] * 1_500_000}))
    with pytest.raises(HeadwiseError, match="more than the limit of 4,194,304"):
        _ = open_source(folder).config


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": 4},
        {"max_position_embeddings": 0},
        {"max_position_embeddings": 10**15},
        {"sliding_window": -5},
    ],
    ids=str,
)
def test_sizes_that_no_plan_has_are_one_sentence(saved, change):
    _, folder = saved()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(HeadwiseError) as error:
        _ = open_source(folder).plan
    assert "validation error" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"return_dict": False},
        {"output_hidden_states": True},
        {"auto_map": "x"},
        {"backbone": {"num_hidden_layers": 3}},
        {"backbone": "resnet50"},
    ],
    ids=str,
)
def test_keys_that_say_what_is_given_back_or_run_change_nothing(saved, tmp_path, change):
    _, folder = saved()
    ids = torch.tensor([[3, 4, 5]])
    plain = open_source(folder).load("causal-lm", device="cpu")(input_ids=ids).logits
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    source = open_source(folder)
    model = source.load("causal-lm", headwise=True, device="cpu")
    found = model(input_ids=ids)
    torch.testing.assert_close(found.logits, plain)
    assert found.hidden_states is None
    assert source.weights_sha256
    model.save_pretrained(tmp_path / "again")
    assert "x" not in json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"]


@pytest.mark.parametrize("name", ["LICENSE", "notes.txt"])
def test_companions_of_absurd_size_are_not_copied(saved, tmp_path, name):
    import os

    _, folder = saved()
    (folder / name).touch()
    os.truncate(folder / name, 2**40)
    (tmp_path / "target").mkdir()
    with pytest.raises(HeadwiseError, match=f"{name} has 1,099,511,627,776 bytes"):
        copy_companions(folder, tmp_path / "target")
