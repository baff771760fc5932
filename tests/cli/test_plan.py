import json

import numpy as np
import pytest

from headwise.plan import Plan

ADVISE = ["--d-model", "8", "--heads", "2", "--head-dim", "4", "--context", "9"]
NEW = ["plan", "new", "--layers", "12", "--d-model", "768", "--heads", "12", "--context", "1024"]


def test_a_plan_is_written_shown_and_counted(headwise, tmp_path):
    path = tmp_path / "plan.json"
    made = headwise(*NEW, "--attn-params", "75%", "--kv-bytes", "50%", "-o", path)
    assert made.code == 0, made.err
    plan = Plan.from_json(path.read_text())
    assert plan.origin.command.startswith("headwise plan new --layers 12")
    assert dict(plan.origin.versions).keys() >= {"headwise", "python", "numpy"}
    assert plan.origin.policy == "uniform"
    shown = headwise("plan", "show", path)
    assert "12 × 32/32" in shown.out
    assert "50.0%" in shown.out
    counted = json.loads(headwise("plan", "cost", path, "--json").out)
    assert counted["share"]["kv_bytes"] == 0.5
    assert counted["cost"]["kv_bytes"] == 18_432


@pytest.mark.parametrize(
    "policy", ["theory --token-dim 32", "uniform", "more-heads-late", "early-few-late-many"]
)
def test_json_is_one_document(headwise, policy):
    result = headwise(*NEW, "--attn-params", "75%", "--policy", *policy.split(), "--json")
    document = json.loads(result.out)
    policy = policy.split()[0]
    assert document["share"]["attn_params"] <= 0.75
    assert Plan.from_dict(document["plan"]).origin.policy == policy


@pytest.mark.parametrize(
    ("words", "widths"),
    [
        ("--policy uniform --for stock --for gguf", {(56, 56)}),
        ("--policy uniform --for vllm-cpu", {(32, 32)}),
        ("--policy uniform --for gguf-cuda", {(40, 40)}),
        ("--policy narrower-late --for vllm-cpu", {(64, 64), (32, 32)}),
        ("--policy theory --token-dim 128 --for vllm-cpu", {(128, 128), (80, 80)}),
    ],
)
def test_what_a_target_needs_is_tied(headwise, words, widths):
    share = "90%" if "stock" in words else "63%"
    document = json.loads(headwise(*NEW, "--kv-bytes", share, *words.split(), "--json").out)
    plan = Plan.from_dict(document["plan"])
    found = {(h.qk_dim, h.vo_dim) for layer in plan.layers for h in layer.heads}
    assert found <= widths
    runs = {one["target"]: one["runs"] for one in document["runs_in"]}
    assert all(runs[target] for target in words.split("--for ")[1:] for target in target.split())
    if "theory" in words:  # the control: keys and values of other widths where nothing asks
        free = headwise(*NEW, "--kv-bytes", share, *words.split()[:-2], "--json")
        heads = [h for x in Plan.from_dict(json.loads(free.out)["plan"]).layers for h in x.heads]
        assert any(h.qk_dim != h.vo_dim for h in heads)


def test_context_changes_flops_only(headwise, tmp_path):
    path = tmp_path / "plan.json"
    headwise(*NEW, "-o", path)
    near = json.loads(headwise("plan", "cost", path, "--context", "1", "--json").out)["cost"]
    far = json.loads(headwise("plan", "cost", path, "--context", "4096", "--json").out)["cost"]
    assert near["flops"] < far["flops"]
    assert near["attn_params"] == far["attn_params"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--policy narrower-late --kv-bytes 50% --for stock",
            "policy narrower-late makes a plan that stock does not run: layer",
        ),
        ("--for tensorrt", "must be 'stock', 'gguf', 'gguf-cuda'"),
        ("--attn-params 130%", "--attn-params must be a share above 0% and up to 100%"),
        ("--attn-params 0.75", "write 0.75 as 75%"),
        ("--attn-params 75% --attn-params 50%", "got 75% and 50%, which contradict each other"),
        ("--attn-params 1%", "smallest allowed plan costs"),
        ("--kv-bytes 50% --min-dim 64", "smallest allowed plan costs"),
        ("--policy theorie", "Did you mean 'theory'?"),
        ("--family gtp2", "Did you mean 'gpt2'?"),
        ("--identity querry", "must be 'query', 'key' or 'value', got 'querry'"),
        ("--kv-heads 5", "kv-heads must divide the number of heads 12, got 5"),
        ("--token-dim 8", "--token-dim is for --policy theory, got 'uniform'"),
        ("--policy theory", "theory needs the width that tokens fill"),
        ("--policy theory --token-dim 0", "token"),
        ("--policy theory --vectors none.npy", "none.npy does not exist"),
        ("--policy theory --vectors none.npy --token-dim 8", "give only one of them"),
        ("--family vit --context 1024", "context of a vit model must be a square plus 1"),
        (
            "--policy theory --token-dim 8 --kernel a,b",
            "expected numbers separated by commas",
        ),
        ("--ffn-dim -3", "ffn_dim"),
        ("--multiple-of 0", "--multiple-of must be at least 1"),
        ("--min-dim 9999", "must be at most the head width 64, got 9999"),
        ("--multiple-of 1000000", "must be at most the head width 64"),
        ("--layers 1000000", "a plan has at most 1000 layers"),
        ("--ffn-dim x", "got 'x'"),
        ("--layers 0", "layers must be a whole number of at least 1"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(headwise, words, message):
    result = headwise(*NEW, *words.split())
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("Error: ")
    assert result.err.count("\n") == 1
    assert message in result.err


def test_an_existing_plan_is_kept(headwise, tmp_path):
    path = tmp_path / "plan.json"
    assert headwise(*NEW, "-o", path).code == 0
    precious = path.read_text()
    refused = headwise(*NEW, "--attn-params", "50%", "-o", path)
    assert refused.code == 2
    assert "exists already" in refused.err
    assert path.read_text() == precious
    failed = headwise(*NEW, "--attn-params", "1%", "-o", path, "--force")
    assert failed.code == 2
    assert path.read_text() == precious
    assert headwise(*NEW, "--attn-params", "50%", "-o", path, "--force").code == 0
    assert path.read_text() != precious
    assert Plan.from_json(path.read_text())


def test_a_file_that_is_no_plan_is_kept_even_with_force(headwise, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("precious")
    refused = headwise(*NEW, "-o", path, "--force")
    assert refused.code == 2
    assert "not a kind of file that headwise writes" in refused.err
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist; give a plan file"),
        ("{", "invalid JSON at line 1"),
        ("{}", "must be a JSON object with format 'headwise-plan/2'"),
        ('{"format": "headwise-plan/1", "shpae": {}}', "Did you mean 'shape'?"),
        (b"\xff\xfe\x00", "cannot be read (it is not UTF-8 text); give a plan file"),
    ],
)
def test_bad_plan_files(headwise, tmp_path, text, message):
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for verb in ("show", "cost"):
        result = headwise("plan", verb, path)
        assert result.code == 2
        assert message in result.err
        assert result.err.count("\n") == 1


@pytest.mark.slow
def test_a_real_process_agrees(headwise_process, tmp_path):
    done = headwise_process(*NEW, "--attn-params", "75%", "-o", tmp_path / "p.json", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["share"]["attn_params"] == 0.75
    broken = headwise_process(*NEW, "--attn-params", "130%")
    assert broken.returncode == 2
    assert "Traceback" not in broken.stderr


def test_notes_are_not_markup(headwise, tmp_path):
    headwise(*NEW, "-o", tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    data["origin"]["notes"] = ["[bold]x[/nope]"]
    (tmp_path / "odd.json").write_text(json.dumps(data))
    assert "[bold]x[/nope]" in headwise("plan", "show", tmp_path / "odd.json").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "show", ""), "an argument must not be empty"),
        ((*NEW, "-o", ""), "-o must not be empty"),
        ((*NEW, "-o", "x" * 5000), "File name too long"),
        (("plan", "show", "\udcff"), "is not valid UTF-8"),
        (("theory", "bound", "--width", "1e5"), "got '1e5'"),
        (("theory", "advise", *ADVISE, "--eps", "1e-300"), "eps below 1e-6"),
        (("eval", "x", "--text", ""), "--text must not be empty"),
        (
            ("train", __file__, "--text", "builtin:python", "-o", __file__),
            "holds invalid JSON at line 1",
        ),
    ],
)
def test_nasty_words(headwise, words, message):
    result = headwise(*words)
    assert result.code == 2
    assert message in result.err
    assert result.err.count("\n") == 1


@pytest.mark.slow
def test_a_full_stdout_is_one_sentence(headwise_process):
    import subprocess
    import sys

    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "headwise", *NEW],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert "No space left" in done.stderr
    assert done.returncode == 2


@pytest.mark.slow
def test_a_terminal_without_unicode_gets_its_table(headwise_process):
    import os

    done = headwise_process(*NEW, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr


def test_an_unwritable_place_is_one_sentence(headwise, tmp_path):
    (tmp_path / "file").touch()
    result = headwise(*NEW, "-o", tmp_path / "file" / "plan.json")
    assert result.code == 2
    assert result.err.count("\n") == 1


def test_the_theory_measures_tokens_and_lags(headwise, tmp_path):
    rng = np.random.default_rng(3)
    tokens = rng.standard_normal((4000, 11)).astype(np.float32)
    tokens[2:] += tokens[:-2]  # the next token depends on the one before this
    np.save(tmp_path / "tokens.npy", tokens)
    words = (*NEW, "--policy", "theory", "--vectors", tmp_path / "tokens.npy", "--json")
    plan = Plan.from_dict(json.loads(headwise(*words, "--lags", "2").out)["plan"])
    assert {h.qk_dim for h in plan.layers[0].heads} == {16}  # the first multiple of 8 that holds 11
    assert "at the corner" in plan.origin.notes[0]
    assert "is a hypothesis" in plan.origin.notes[-1]
    assumed = headwise(*words, "--kernel", "1,1")
    assert "heads" in assumed.out
