import json

import numpy as np
import pytest

E128 = ("theory", "bound", "--width", "128", "--token-dim", "16")


def test_the_curve_of_128_numbers(headwise):
    result = headwise(*E128, "--heads", "1-80", "--json")
    assert result.code == 0
    document = json.loads(result.out)
    bound = dict(zip(document["heads"], document["bound"], strict=True))
    assert {h: round(bound[h], 3) for h in (1, 8, 9, 80)} == {
        1: 1.326,
        8: 0.166,
        9: 0.481,
        80: 0.965,
    }
    assert document["best"] == {"heads": 8, "bound": bound[8]}
    assert document["vacuous"][0] is True


def test_four_lags_of_256_numbers(headwise):
    words = ("theory", "allocate", "--width", "256", "--token-dim", "8", "--kernel", "1,1,1,1")
    document = json.loads(headwise(*words, "--json").out)
    assert document["lags"] == 4
    assert document["groups"] == [{"lag": m, "heads": 8, "head_dim": 8} for m in (1, 2, 3, 4)]
    assert document["slack"] == 0
    assert document["on_corner"] is True
    assert "on the corner" in headwise(*words).out


def test_advice_names_four_views(headwise):
    sizes = {"--d-model": 4096, "--heads": 32, "--head-dim": 128, "--context": 8192}
    words = ["theory", "advise", *(str(word) for pair in sizes.items() for word in pair)]
    document = json.loads(headwise(*words, "--json").out)
    names = [view["name"] for view in document["views"]]
    assert names == ["freedom", "ensemble", "johnson-lindenstrauss", "theory"]
    jl = document["views"][2]
    assert jl["verdict"] == "below floor"
    assert 289 in jl["numbers"].values()
    assert "johnson-lindenstrauss" in headwise(*words).out


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".png", ".svg", ".html"])
def test_plots(headwise, tmp_path, ending):
    path = tmp_path / f"bound{ending}"
    result = headwise(*E128, "--heads", "1-9", "--plot", path, "--json")
    assert result.code == 0
    json.loads(result.out)  # messages do not mix into the document
    assert "Wrote" in result.err
    start = {".png": b"\x89PNG", ".svg": b"<svg", ".html": b"<!doctype html>"}[ending]
    assert path.read_bytes().lstrip().startswith(start)
    if ending == ".html":
        assert 'src="http' not in path.read_text()
    again = headwise(*E128, "--heads", "1-9", "--plot", path)
    assert again.code == 2
    assert "exists already" in again.err


def test_measured_tokens_replace_the_token_width(headwise, tmp_path):
    rng = np.random.default_rng(0)
    low_rank = rng.standard_normal((400, 3)) @ rng.standard_normal((3, 16))
    np.save(tmp_path / "tokens.npy", low_rank)
    words = ("theory", "allocate", "--width", "64", "--kernel", "1", "--json")
    measured = json.loads(headwise(*words, "--vectors", tmp_path / "tokens.npy").out)
    white = json.loads(headwise(*words, "--token-dim", "16").out)
    assert measured["groups"][0]["head_dim"] == 3
    assert measured["bound"] < white["bound"]


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [("a.npz", 1.0, "not an archive"), ("a.npy", 1e300, "entries up to 1e150")],
)
def test_odd_vectors(headwise, tmp_path, name, scale, message):
    rows = scale * np.random.default_rng(0).standard_normal((11, 3))
    (np.savez if name.endswith("z") else np.save)(tmp_path / name, rows)
    result = headwise(
        "theory", "bound", "--width", "9", "--heads", "1", "--vectors", tmp_path / name
    )
    assert result.code == 2
    assert message in result.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "theory bound --width 0 --token-dim 16 --heads 1-80",
            "width must be a whole number from 1",
        ),
        ("theory bound --width x --token-dim 16 --heads 1-80", "Invalid value for '--width'"),
        ("theory bound --width 9 --token-dim 0 --heads 1-80", "token"),
        (
            "theory bound --width 9 --token-dim 3 --heads 8-1",
            "--heads must be whole numbers from 1",
        ),
        ("theory bound --width 9 --token-dim 3 --heads a", "got 'a'"),
        ("theory bound --width 9 --token-dim 3 --heads 1-9999999", "at most 10000"),
        (
            "theory bound --width 9 --token-dim 3 --heads 1 --kernel 1,b",
            "numbers separated by commas",
        ),
        (
            "theory bound --width 9 --token-dim 3 --heads 1 --kernel nan",
            "--kernel[0] must be a finite number",
        ),
        (
            "theory bound --width 9 --token-dim 3 --heads 1 --plot x.gif",
            "must end in .png, .svg, .html, got",
        ),
        ("theory bound --width 9 --heads 1", "One of --token-dim and --vectors is needed"),
        (
            "theory bound --width 9 --heads 1 --vectors nowhere.npy",
            "nowhere.npy does not exist; give a .npy file",
        ),
        ("theory bound --widht 9", "No such option: --widht"),
        ("theory bound", "Missing option"),
        ("theroy", "Did you mean 'theory'?"),
        ("theory allocate --width 9 --token-dim 3 --kernel -1", "Kernel weights must be numbers"),
        ("theory advise --d-model 8 --heads 2 --head-dim 4 --context 9 --eps 1", "0.5"),
        ("theory advise --d-model 0 --heads 2 --head-dim 4 --context 9", "d_model of at least 1"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(headwise, words, message):
    result = headwise(*words.split())
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("Error: ")
    assert result.err.count("\n") == 1
    assert message in result.err


def test_a_group_without_a_command_prints_its_help(headwise):
    result = headwise("theory")
    assert result.code == 2
    assert "allocate" in result.out + result.err
