"""Tensors that are missing, unexpected or of another shape, by every verb that reads weights."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import headwise as hw
from headwise.plan import Plan

pytestmark = pytest.mark.slow  # 240 commands
SIZES = {"hidden_size": 16, "intermediate_size": 19, "max_position_embeddings": 32}
TEXT = "--text text.txt --device cpu"
SHORT = f"{TEXT} --tokens 48 --length 16"
CUT = "--attn-params 60% --multiple-of 2"
MODEL = (  # commands that read a dense model
    f"profile trial {SHORT} -o out",
    f"compress trial {SHORT} {CUT} -o out",
    f"compress trial {SHORT} {CUT} --split 0 --profile profile --no-verify -o out",
    f"compress trial {SHORT} --plan plan.json --recover 0 --no-verify -o out",
    f"compress trial {CUT} --self-text 32 --device cpu -o out",
    f"compare trial {SHORT} --methods svd-llm,headwise --attn-params 75% -o out",
    f"eval trial {TEXT} --tokens 32",
    "generate trial --prompt The --max-new-tokens 3 --device cpu",
    f"verify cut --against trial {TEXT} --tokens 32 --repeats 0",
    f"recover cut --against trial {SHORT} -o out",
    "export trial --to padded --no-check -o out",
    "export trial --to gguf --no-check -o out.gguf",
    "export trial --to onnx --no-check -o out",
)
CUT_MODEL = (  # commands that read a cut model
    f"eval trial {TEXT} --tokens 32",
    "generate trial --prompt The --max-new-tokens 3 --device cpu",
    f"verify trial --against model {TEXT} --tokens 32 --repeats 0",
    f"recover trial --against model {SHORT} -o out",
    "export trial --to padded --no-check -o out",
    "export trial --to vllm --no-check -o out",
    "export trial --to onnx --no-check -o out",
)
WEIGHTS = (
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.embed_tokens.weight",
    "model.norm.weight",
)


def drop(state, name):
    state.pop(name)


def shorten(state, name):
    state[name] = state[name][:-1].clone()


def add(state, name):
    state[name.replace(".weight", ".other")] = torch.ones(3)


@pytest.fixture(scope="module")
def place(tmp_path_factory, write_llama):
    """A dense model with its profile, a plan and a cut; text."""
    folder = tmp_path_factory.mktemp("broken")
    write_llama(folder, characters=6_000, vocab_size=263, **SIZES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        sizes = {"tokens": 48, "length": 16, "device": "cpu"}
        shutil.copytree("model", "trial")
        hw.profile("trial", out="profile", text="text.txt", split=0.0, **sizes)
        plan = hw.fit("profile", attn_params="60%", multiple_of=2)
        (folder / "plan.json").write_text(plan.to_json())
        hw.cut("profile", plan, out="cut", model="trial")
        shutil.copy("model/tokenizer.json", "cut")
    return folder


@pytest.mark.parametrize("damage", [drop, shorten, add])
@pytest.mark.parametrize(
    ("folder", "command"), [("model", c) for c in MODEL] + [("cut", c) for c in CUT_MODEL]
)
def test_the_tensor_is_named(headwise, place, monkeypatch, folder, command, damage):
    monkeypatch.chdir(place)
    for name in WEIGHTS:
        shutil.rmtree("trial", ignore_errors=True)
        shutil.copytree(folder, "trial")
        before = {p.name for p in place.iterdir()}
        state = load_file("trial/model.safetensors")
        found = next(n for n in state if n.endswith(name))  # a cut's begin with "backbone."
        damage(state, found)
        save_file(state, "trial/model.safetensors", metadata={"format": "pt"})
        result = headwise(*command.split())
        assert result.code == 2, (name, result)
        assert (name if damage is not add else name.replace(".weight", ".other")) in result.err
        assert "Traceback" not in result.err
        assert {p.name for p in place.iterdir()} == before


@pytest.mark.parametrize("verb", ["compress", "compare"])
def test_a_model_that_is_cut_already_is_refused_at_once(headwise, place, monkeypatch, verb):
    monkeypatch.chdir(place)
    result = headwise(verb, "cut", *SHORT.split(), "--attn-params", "75%", "-o", "out")
    assert result.code == 2
    assert "cut is already a headwise model" in result.err
    assert not list(place.glob("out*"))


REFUSED = {  # beside the sizes: what is said
    "compress model --plan short.json --no-verify": "the plan has 1 layers, but",
    f"compress model --attn-params 75% --self-text {10**20}": "self-text must be at most",
}


@pytest.mark.parametrize("command", REFUSED)
def test_amounts_that_cannot_be_are_one_sentence(headwise, place, monkeypatch, tmp_path, command):
    monkeypatch.chdir(place)
    plan = Plan.from_json((place / "plan.json").read_text())
    shape = plan.shape.model_copy(update={"n_layers": 1})
    (place / "short.json").write_text(Plan(shape=shape, layers=plan.layers[:1]).to_json())
    result = headwise(*command.split(), *SHORT.split(), "-o", tmp_path / "out")
    assert result.code == 2
    assert REFUSED[command] in result.err
    assert not (tmp_path / "out").exists()


def test_a_budget_below_the_embeddings_is_out_of_reach(headwise, place, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    words = f"compare model {SHORT} --params 1 --methods magnitude --verify-tokens 32"
    result = headwise(*words.split(), "-o", tmp_path / "out")
    assert result.code == 0
    assert "magnitude cannot reach 1" in result.out
