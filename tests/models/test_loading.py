"""The one loader: a model is whole and finite or it is not loaded, and a pickle is never opened."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwise.errors import HeadwiseError
from headwise.models.checkpoint import INDEX
from headwise.profiling.source import load_for_profiling
from headwise.source import open_source
from tests import tiny


def rewrite(folder, change):
    """Change the tensors of a single-file checkpoint."""
    file = folder / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})


@pytest.fixture
def saved(tmp_path):
    def save(name, task=None, **options):
        folder = tmp_path / name
        tiny.stock(name, task).save_pretrained(folder, **options)
        return folder

    return save


def load_everywhere(folder, task="causal-lm"):
    """Every way from a folder to weights; each must refuse the same checkpoints."""
    from headwise.data.tokens import train_tokenizer

    if not (folder / "tokenizer.json").exists() and task != "image-classification":
        train_tokenizer(["a b c"], 300).save_pretrained(folder)
    return {
        "run": lambda: open_source(folder).load(task, device="cpu"),
        "profile": lambda: load_for_profiling(open_source(folder), device="cpu"),
        "stream": lambda: open_source(folder).layers([], task=task),
    }


def refused(folder, match, task="causal-lm"):
    for load in load_everywhere(folder, task).values():
        with pytest.raises(HeadwiseError, match=match):
            load()


LACKING = [
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.2.mlp.up_proj.weight",
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize("name", LACKING)
def test_a_missing_weight_is_named(saved, name):
    folder = saved("llama")
    rewrite(folder, lambda state: state.pop(name))
    refused(folder, f"lacks {name.replace('.', '[.]')}")


def test_a_missing_tied_weight_is_not_missing_unless_both_are(tmp_path):
    config = tiny.config("llama")
    config.tie_word_embeddings = True
    from transformers import LlamaForCausalLM

    tiny.randomise(LlamaForCausalLM(config)).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    for load in load_everywhere(tmp_path).values():
        load()
    rewrite(tmp_path, lambda state: state.pop("model.embed_tokens.weight"))
    refused(tmp_path, "lacks .*embed_tokens[.]weight")


def test_a_weight_of_another_shape_is_named(saved):
    folder = saved("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda state: state.update({name: state[name][:-1].clone()}))
    refused(folder, rf"has {name} of shape \(36, 42\), but its config asks for \(37, 42\)")


def test_a_weight_that_the_config_does_not_know_is_named(saved):
    folder = saved("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    refused(folder, r"holds model[.]layers[.]2[.].* and \d+ more tensors")


HARMLESS = {
    "llama": ["model.layers.0.self_attn.rotary_emb.inv_freq", "score.weight"],
    "gpt2": ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"],
    "gpt_neox": ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.masked_bias"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(HARMLESS))
def test_what_older_files_hold_beside_the_weights_does_no_harm(saved, name):
    folder = saved(name)
    rewrite(folder, lambda state: state.update({n: torch.ones(3) for n in HARMLESS[name]}))
    for load in load_everywhere(folder).values():
        load()
    rewrite(folder, lambda state: state.update({"model.layers.0.extra.weight": torch.ones(3)}))
    refused(folder, "holds .*layers[.]0[.]extra[.]weight")  # the control


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "task", "head"),
    [
        ("bert", "masked-lm", "cls."),
        ("roberta", "masked-lm", "lm_head."),
        ("distilbert", "masked-lm", "vocab_"),
        ("vit", "image-classification", "classifier."),
    ],
)
def test_an_encoder_is_loaded_bare_from_a_checkpoint_with_another_head(saved, name, task, head):
    folder = saved(name, task)
    assert any(n.startswith(head) for n in load_file(folder / "model.safetensors"))
    loads = load_everywhere(folder, "bare" if name != "vit" else "image-classification")
    open_source(folder).load("bare", device="cpu")
    loads["stream"]()
    rewrite(folder, lambda state: state.pop(min(n for n in state if ".attention." in n)))
    with pytest.raises(HeadwiseError, match="lacks"):
        open_source(folder).load("bare", device="cpu")


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_pooler_may_be_missing(saved, name):
    folder = saved(name, "bare")
    assert any("pooler" in n for n in load_file(folder / "model.safetensors"))
    rewrite(folder, lambda state: [state.pop(n) for n in list(state) if "pooler" in n])
    first, second = (open_source(folder).load("bare", device="cpu") for _ in range(2))
    open_source(folder).layers([], task="bare")
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)  # what is drawn is drawn alike


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_named(saved, value):
    folder = saved("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda state: state[name][3, 2:3].fill_(value))
    loads = load_everywhere(folder)
    for way in ("run", "profile"):
        with pytest.raises(HeadwiseError, match=rf"{name} in .* must be finite"):
            loads[way]()
    with pytest.raises(HeadwiseError, match=rf"{name} in .* NaN or infinity"):
        _ = open_source(folder).weights_sha256


@pytest.mark.parametrize("where", ["beside", "absolute"])
def test_an_index_that_leads_out_of_its_folder_is_refused(saved, tmp_path, where):
    folder = saved("llama", max_shard_size="20KB")
    index = json.loads((folder / INDEX).read_text())
    name, shard = next(iter(index["weight_map"].items()))
    shutil.copytree(folder, tmp_path / "other")
    target = f"../other/{shard}" if where == "beside" else str(tmp_path / "other" / shard)
    for tensor, file in index["weight_map"].items():
        index["weight_map"][tensor] = target if file == shard else file
    (folder / INDEX).write_text(json.dumps(index))
    loads = load_everywhere(folder)
    for load in loads.values():
        with pytest.raises(HeadwiseError, match="not a file in its folder"):
            load()
    assert name


def test_an_index_that_leaves_a_tensor_out_is_refused(saved):
    folder = saved("llama", max_shard_size="20KB")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].pop("model.layers.1.mlp.up_proj.weight")
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, r"does not list 'model[.]layers[.]1[.]mlp[.]up_proj[.]weight'")


def test_a_key_that_stands_twice_in_the_config_is_refused(saved):
    folder = saved("llama")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", '{"hidden_size": 99,', 1))
    refused(folder, "hidden_size")


def cached_on_the_hub(cache, name, files):
    """A snapshot in a hub cache, laid as huggingface_hub does."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    root = cache / f"models--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(revision)
    snapshot = root / "snapshots" / revision
    shutil.copytree(files, snapshot)
    return snapshot


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """An empty hub cache."""
    from huggingface_hub import constants
    from transformers.utils import hub as theirs

    cache = tmp_path / "hub"
    for module, name in ((constants, "HF_HUB_CACHE"), (constants, "HUGGINGFACE_HUB_CACHE")):
        monkeypatch.setattr(module, name, str(cache), raising=False)
    monkeypatch.setattr(theirs, "PYTORCH_TRANSFORMERS_CACHE", str(cache), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


class Trap:
    """What a pickle can do: run code when it is opened."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was opened')",))


def test_a_pickle_on_the_hub_is_never_opened(tmp_path, hub):
    folder = tmp_path / "model"
    tiny.stock("llama").save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(SystemExit):  # the control: it is a trap
        torch.load(folder / "pytorch_model.bin", weights_only=False)
    load_everywhere(folder)
    cached_on_the_hub(hub, "someone/pickled", folder)
    for load in (
        lambda: open_source("someone/pickled").load(device="cpu"),
        lambda: load_for_profiling(open_source("someone/pickled"), device="cpu"),
        lambda: open_source("someone/pickled").layers([]),
    ):
        with pytest.raises(HeadwiseError, match=r"pickle \(pytorch_model.bin\)"):
            load()


def test_a_hub_model_with_safetensors_is_loaded(tmp_path, hub):
    folder = tmp_path / "model"
    stock = tiny.stock("llama")
    stock.save_pretrained(folder)
    load_everywhere(folder)
    torch.save({"lm_head.weight": Trap()}, folder / "pytorch_model.bin")
    cached_on_the_hub(hub, "someone/whole", folder)
    model = open_source("someone/whole").load(device="cpu")
    assert torch.equal(model.lm_head.weight, stock.lm_head.weight)
    wrapped = load_for_profiling(open_source("someone/whole"), device="cpu")
    assert torch.equal(wrapped.get_output_embeddings().weight, stock.lm_head.weight)


def test_the_fingerprint_is_of_names_formats_and_bytes_not_of_files(tmp_path):
    stock = tiny.stock("llama")
    stock.save_pretrained(tmp_path / "one")
    stock.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    one, many = (open_source(tmp_path / n).weights_sha256 for n in ("one", "many"))
    assert one == many
    stock.to(torch.bfloat16).save_pretrained(tmp_path / "short")
    assert open_source(tmp_path / "short").weights_sha256 != one
    rewrite(tmp_path / "one", lambda state: state["model.norm.weight"][:2].copy_(torch.ones(2)))
    assert open_source(tmp_path / "one").weights_sha256 != one
