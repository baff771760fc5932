"""The public API alone: what people write after `import headwise as hw`."""

import doctest
import json
import re
import subprocess
import sys
from inspect import isfunction, signature
from pathlib import Path

import pytest

import headwise as hw
from headwise.recipe import (
    RECIPES,
    EvaluateRecipe,
    FitRecipe,
    NewPlanRecipe,
    ProfileRecipe,
    VerifyRecipe,
)
from headwise.verbs import verb_of
from tests import tiny

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 41,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with ./model, notes.txt and held-out.txt."""
    tiny.write_llama(tmp_path, characters=20_000, vocab_size=293, **SIZES)
    text = (tmp_path / "text.txt").read_text()
    (tmp_path / "notes.txt").write_text(text)
    (tmp_path / "held-out.txt").write_text(text[::-1][:3000])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_is_cut_through_the_public_api(place):
    options = {"text": "notes.txt", "tokens": 480, "length": 16}
    amounts = {"recover": 64, "verify_tokens": 64}
    result = hw.compress("model", attn_params="75%", out="small", **amounts, **options)
    assert result.cost.attn_params <= 0.75 * result.dense_cost.attn_params
    assert result.verification.texts[0].ratio > 0
    profile = hw.profile("model", **options)
    plan = hw.fit(profile, attn_params="75%", kv_bytes="80%", multiple_of=2)
    small = hw.cut(profile, plan, out="again")
    found = hw.verify(small, against="model", text="held-out.txt", tokens=64, repeats=2)
    assert found.size.attn_params.cut == found.size.attn_params.cut_plan
    assert found.speed.decode.ratio > 0
    assert hw.load("again").config.model_type == "headwise"


@pytest.mark.slow
def test_a_live_model_is_cut_and_left_as_it_was(place):
    """As with PEFT: the model and its tokenizer are in hand."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("model")
    tokenizer = AutoTokenizer.from_pretrained("model")
    before = {n: p.clone() for n, p in model.named_parameters()}
    options = {"text": "notes.txt", "tokens": 480, "length": 16, "attn_params": "75%"}
    options |= {"verify_tokens": 64, "recover": 64}
    live = hw.compress(model, tokenizer=tokenizer, out="live", **options)
    files = hw.compress("model", out="files", **options)
    assert live.verification.texts[0].ratio == pytest.approx(files.verification.texts[0].ratio)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    one, other = hw.load("live").state_dict(), hw.load("files").state_dict()
    assert all(torch.equal(one[n], other[n]) for n in other)


@pytest.mark.slow
def test_a_compared_live_model_is_never_written_to(place):
    """The rivals' cuts are measured in other tensors: the user's model is whole at every moment."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained("model").train()
    before = {n: (t, t.clone()) for n, t in model.state_dict().items()}
    how = {n: p.requires_grad for n, p in model.named_parameters()}
    config, looked = model.config.to_dict(), []

    def whole(stage, done, total):
        state = model.state_dict()
        assert state.keys() == before.keys()
        for name, (own, value) in before.items():
            assert state[name].data_ptr() == own.data_ptr()
            assert torch.equal(state[name], value), f"{name} while {stage}"
        looked.append(stage)

    options = {"text": "notes.txt", "tokens": 480, "length": 16, "multiple_of": 2}
    options |= {"attn_params": "60%", "verify_tokens": 64, "progress": whole}
    tokenizer = AutoTokenizer.from_pretrained("model")
    found = hw.compare(model, tokenizer=tokenizer, out="compared", **options)
    whole("at the end", 1, 1)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == how
    assert model.training
    assert model.config.to_dict() == config
    # The model was looked at while every rival's cut was scored.
    assert len({cell.texts[0].nll for cell in found.measured}) >= 5
    for cell in found.measured:
        assert any(f"{cell.method} at 60%: scoring" in stage for stage in looked)


@pytest.mark.slow
def test_a_recipe_gives_the_same_files_again(place):
    options = {"text": "notes.txt", "tokens": 480, "length": 16, "attn_params": "75%"}
    options |= {"recover": 64}
    hw.compress("model", out="first", verify=False, **options)
    hw.run("first/recipe.yaml", out="second")
    first, second = ({p.name: p for p in (place / n).iterdir()} for n in ("first", "second"))
    assert first.keys() == second.keys()
    for name in first.keys() - {"README.md", "report.html", "headwise.json"}:  # they say their name
        assert first[name].read_bytes() == second[name].read_bytes(), name


def files(folder, *, without):
    """The bytes of every file without times; the files `without` name their own folder."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    paths = {str(path.relative_to(folder)): path for path in found}
    timeless = re.compile(rb'"seconds": [\d.]+|clip\d+')  # a process counts its clip paths
    contents = {name: path.read_bytes() for name, path in paths.items() if name not in without}
    return {name: timeless.sub(b"", content) for name, content in contents.items()}


def test_the_same_profile_gives_the_same_plan_and_the_same_bytes(place):
    options = {"text": "notes.txt", "tokens": 480, "length": 16}
    profile = hw.profile("model", out="p", **options)
    budget = {"attn_params": "75%", "multiple_of": 2}
    plan = hw.fit(profile, **budget)
    assert hw.fit(hw.Profile.read(place / "p"), **budget).to_json() == plan.to_json()
    cuts = [hw.cut(profile, plan, out=name) for name in ("one", "two")]
    named = {"README.md", "headwise.json"}  # they say the name of their folder
    one, two = (files(cut.out, without=named) for cut in cuts)
    assert one == two
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= one.keys()
    # The control: another budget is another plan, and other bytes.
    other = hw.fit(profile, attn_params="60%", multiple_of=2)
    assert other.layers != plan.layers
    assert files(hw.cut(profile, other, out="other").out, without=named) != one


TOKENIZER = """
import builtins, sys
from transformers import AutoTokenizer
def asked(*_):
    raise SystemExit("asked to run code")
builtins.input = asked
words = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)
assert words("abc")["input_ids"], words
assert "headwise" not in sys.modules
print(type(words).__name__)
"""


@pytest.mark.slow
def test_the_tokenizer_of_a_cut_folder_needs_no_code(place):
    from transformers import AutoTokenizer

    def read(folder):
        line = [sys.executable, "-c", TOKENIZER, folder]
        return subprocess.run(line, capture_output=True, text=True, check=False)

    profile = hw.profile("model", text="notes.txt", tokens=480, length=16)
    hw.cut(profile, hw.fit(profile, attn_params="75%", multiple_of=2), out="small")
    done = read("small")
    assert done.returncode == 0, done.stderr
    assert type(AutoTokenizer.from_pretrained("small")).__name__ == done.stdout.strip()
    # The control: a folder whose tokenizer has code of its own.
    path = place / "small" / "tokenizer_config.json"
    code = {"auto_map": {"AutoTokenizer": ["odd.Odd", None]}, "tokenizer_class": "Odd"}
    path.write_text(json.dumps(json.loads(path.read_text()) | code))
    refused = read("small")
    assert refused.returncode
    assert "trust_remote_code" in refused.stderr


@pytest.mark.slow
def test_the_recipe_of_a_profile_and_of_a_comparison_gives_the_same_files_again(place):
    options = {"text": "notes.txt", "tokens": 480, "length": 16}
    hw.profile("model", out="p", **options)
    hw.compare("model", out="c", methods="headwise,energy", attn_params="75%", **options)
    for made, same in (("p", "p2"), ("c", "c2")):
        hw.run(f"{made}/recipe.yaml", out=same)
        named = {"report.html", "run.json"}
        one, other = (files(place / name, without=named) for name in (made, same))
        assert one == other
        assert "recipe.yaml" in one


@pytest.mark.slow
def test_the_recipe_of_a_recovery_gives_the_same_files_again(place):
    options = {"text": "notes.txt", "tokens": 480, "length": 16}
    cut = hw.compress("model", attn_params="75%", out="small", verify=False, **options)
    result = hw.recover(cut, against="model", out="one", batch_size=2, **options)
    assert result.signal == 0
    again = hw.run("one/recipe.yaml", out="other")
    assert again.loss == result.loss
    one, other = (
        files(place / n, without={"README.md", "headwise.json"}) for n in ("one", "other")
    )
    assert one == other
    assert {"recipe.yaml", "model.safetensors"} <= one.keys()


@pytest.mark.slow
def test_the_recipe_of_a_training_gives_the_same_model_again(place):
    sizes = {"layers": 2, "d_model": 64, "heads": 4, "context": 32, "vocab_size": 300}
    plan = hw.new_plan(**sizes, attn_params="75%", out="plan.json")
    options = {"text": "notes.txt", "steps": 3, "batch_size": 2}
    result = hw.train(plan, out="live", **options)
    assert (result.status, result.last.step) == ("finished", 3)
    hw.train("plan.json", out="one", **options)
    hw.run("one/recipe.yaml", out="other")
    hw.run("live/recipe.yaml", out="again")  # names the plan that the run itself holds
    runs = [files(place / n / "model", without=()) for n in ("one", "other", "live", "again")]
    assert all(run == runs[0] for run in runs)
    assert (place / "one" / "recipe.yaml").read_bytes() == (
        place / "other" / "recipe.yaml"
    ).read_bytes()
    # The control: another seed is another model.
    assert files(hw.train(plan, out="seed", seed=1, **options).model, without=()) != runs[0]
    assert hw.train(out="one", resume=True).status == "finished"
    with pytest.raises(hw.HeadwiseError, match=r"settings\.lr \(0\.0006 → 0\.1\)"):
        hw.train(out="one", resume=True, lr=0.1)


@pytest.mark.slow
def test_plans_verifications_and_scores_are_recipes_too(place):
    hw.profile("model", text="notes.txt", tokens=480, length=16, out="p")
    recipes = (
        NewPlanRecipe.of(
            layers=2, d_model=64, heads=4, context=32, kv_bytes="75%", identity="query"
        ),
        FitRecipe.of(profile="p", attn_params="75%", granularity="layer"),
        EvaluateRecipe.of(model="model", text="held-out.txt", tokens=64),
        VerifyRecipe.of(model="model", against="model", text="held-out.txt", tokens=64, repeats=0),
    )
    for recipe in recipes:
        (place / "recipe.yaml").write_text(recipe.to_yaml())
        found = hw.run("recipe.yaml", out=f"{recipe.verb}.json")
        assert (place / f"{recipe.verb}.json").is_file()
        again = hw.run(recipe)  # what it gives is returned, with or without a file
        timeless = {"update": {"seconds": 0}} if recipe.verb == "eval" else {}
        assert again.model_copy(**timeless) == found.model_copy(**timeless)
    with pytest.raises(hw.HeadwiseError, match="profile needs an output folder"):
        hw.run(ProfileRecipe.of(model="model", text="notes.txt"))


def test_wrong_arguments_are_one_sentence(place):
    with pytest.raises(hw.HeadwiseError, match=r"unknown key 'attn_param'.*Did you mean"):
        hw.compress("model", text="notes.txt", attn_param="75%", out="small")
    with pytest.raises(hw.HeadwiseError, match="got neither"):
        hw.compress("model", text="notes.txt", out="small")
    with pytest.raises(hw.HeadwiseError, match="a fit needs a budget"):
        hw.fit(hw.profile("model", text="notes.txt", tokens=480, length=16))
    assert not (place / "small").exists()


FUNCTIONS = [name for name in hw.__all__ if isfunction(getattr(hw, name))]


@pytest.mark.slow
def test_the_examples_of_the_docstrings_run(place):
    first = ("compress", "profile", "fit")  # others read what these write
    for name in (*first, *(n for n in FUNCTIONS if n not in first)):
        (test,) = doctest.DocTestFinder(recurse=False).find(getattr(hw, name), name)
        assert test.examples, name
        result = doctest.DocTestRunner().run(test)
        assert result.failed == 0, name
        assert result.attempted == len(test.examples) or name == "push"  # which needs the network


def test_every_function_is_on_the_page_of_the_api():
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
    assert re.findall(r"^### hw\.(\w+)$", page, flags=re.MULTILINE).count("push") == 1
    for name in set(hw.__all__) - {"HeadwiseError"}:
        section = page.partition(f"### hw.{name}\n")[2].partition("\n### ")[0]
        assert section, name
        assert name not in FUNCTIONS or "import headwise as hw" in section, name


def test_every_recipe_has_its_verb_and_every_verb_its_recipe():
    for verb, recipe in RECIPES.items():
        found = verb_of(recipe.model_construct(verb=verb))
        assert found is getattr(hw, found.__name__)
        assert "options" in signature(found).parameters


def test_every_public_name_is_there():
    for name in hw.__all__:
        assert getattr(hw, name) is not None
    with pytest.raises(AttributeError):
        _ = hw.compresss
