"""Recipes: the same options in Python, YAML and on the command line; wrong ones in one sentence."""

import pytest

from headwise.errors import BudgetError, HeadwiseError
from headwise.recipe import CompressRecipe, ProfileRecipe, read_recipe, write_recipe

FULL = {"model": "m", "text": "notes.txt", "attn_params": "75%", "held_out": "other.txt"}


def test_a_recipe_comes_back_from_its_file(tmp_path):
    recipe = CompressRecipe.of(**FULL, fit=0, granularity="head", traffic="80%", batch=16)
    write_recipe(tmp_path, recipe)
    assert read_recipe(tmp_path / "recipe.yaml") == recipe
    assert (tmp_path / "recipe.yaml").read_text() == (
        "format: headwise-recipe/1\n"
        "verb: compress\n"
        "model: m\n"
        "text:\n- notes.txt\n"
        "attn_params: 75%\n"
        "traffic: 80%\n"
        "batch: 16\n"
        "granularity: head\n"
        "held_out:\n- other.txt\n"
        "fit: 0\n"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("txt: notes.txt", "unknown key 'txt' in the top level. Did you mean 'text'?"),
        ("tokens: many", "tokens must be a whole number"),
        ("tokens: 0", "tokens must be at least 1, got 0"),
        ("granularity: heads", "granularity must be 'layer', 'head' or 'model', got 'heads'"),
        ("attn_params: 130%", "must be a share above 0% and up to 100%"),
        ("verb: compres", "Did you mean 'compress'?"),
        ("verb: [1]", "must name a verb"),
        ("format: headwise-recipe/9", "got 'headwise-recipe/9'"),
        ("text: a\ntext: b", "duplicate key 'text'"),
        ("text: [", "is not valid YAML"),
        ("model: !!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("model: !!bool maybe", "is not valid YAML (KeyError"),
        ("model: !!timestamp x", "is not valid YAML (AttributeError"),
        ("model: !!int ''", "is not valid YAML (IndexError"),
        ("held_out: !!map [a]", "is not valid YAML (TypeError"),
        ("text: &a [b]\nheld_out: *a", "an alias, *a, in line 5"),
        ("model: [&a [b], *a]", "an alias, *a, in line 3"),
        ('model: "\\ud800"', "text must be writable as UTF-8"),
    ],
)
def test_wrong_recipes_are_one_sentence(tmp_path, change, message):
    lines = {"format": "headwise-recipe/1", "verb": "compress", "model": "m"}
    for line in change.splitlines():
        lines.pop(line.split(":")[0], None)
    path = tmp_path / "recipe.yaml"
    path.write_text("".join(f"{k}: {v}\n" for k, v in lines.items()) + change + "\n")
    with pytest.raises(HeadwiseError) as caught:
        read_recipe(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value) or "share above" in message
    assert "\n" not in str(caught.value)


def test_python_options_are_checked_alike():
    with pytest.raises(
        HeadwiseError, match=r"unknown key 'attn_param'.*Did you mean 'attn_params'"
    ):
        CompressRecipe.of(model="m", attn_param="75%")
    with pytest.raises(BudgetError, match="must be a share"):
        CompressRecipe.of(model="m", kv_bytes="0%")
    assert CompressRecipe.of(model="m", attn_params=1200).budget.attn_params.amount == 1200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "got neither"),
        ({"attn_params": "75%", "plan": "p.json"}, "got both"),
        ({"attn_params": "75%", "verify": False, "max_ratio": 1.1}, "--max-ratio needs"),
        ({"attn_params": "75%", "images": "x", "recover": 5}, "--recover is for text models"),
        ({"attn_params": "75%", "images": "x", "held_out": "y"}, "--held-out is for text models"),
    ],
)
def test_contradictions_are_refused(options, message):
    with pytest.raises(HeadwiseError, match=message):
        CompressRecipe.of(model="m", **options).check()
    CompressRecipe.of(**FULL).check()


def test_defaults_are_those_of_the_library():
    from headwise.profiling.settings import ProfileSettings

    recipe = ProfileRecipe.of(model="m")
    assert (recipe.tokens, recipe.chunk) == (ProfileSettings().tokens, ProfileSettings().chunk)


@pytest.mark.parametrize("key", ["format", "verb", "model"])
def test_aliases_of_aliases_are_not_written_out(tmp_path, key):
    """Forty lines that stand for a trillion values, where the reader would quote them."""
    lines = ["a0: &a0 [x]\n"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)]
    path = tmp_path / "recipe.yaml"
    path.write_text("".join(lines) + f"{key}: *a39\n")
    with pytest.raises(HeadwiseError, match="an alias"):
        read_recipe(path)
