"""From a folder and a text to a smaller folder with its proof, by one command."""

import json
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headwise.measure.record import read_verification
from headwise.models.checkpoint import Checkpoint
from headwise.plan import Plan
from headwise.profiling.format import Profile


@pytest.fixture(scope="module")
def place(tmp_path_factory, write_llama):
    folder = tmp_path_factory.mktemp("compress")
    write_llama(
        folder,
        characters=30_000,
        vocab_size=307,
        hidden_size=48,
        intermediate_size=61,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return folder


def words(place, out, *more):
    common = ("--length", "32", "--tokens", "640", "--multiple-of", "2", "--verify-tokens", "256")
    where = (place / "model", "--text", place / "text.txt", "-o", out, "--recover", "0")
    return [str(w) for w in ("compress", *where, *common, *more)]


@pytest.mark.slow
def test_one_command_cuts_and_proves(headwise, place, tmp_path):
    out = tmp_path / "small"
    result = headwise(*words(place, out, "--attn-params", "75%", "--json"))
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert document["share"]["attn_params"] <= 0.75
    found = read_verification(out)
    assert json.loads((out / "verify.json").read_text()) == document["verify"]
    assert found.size.attn_params.cut == document["cost"]["attn_params"]
    assert found.texts[0].is_calibration_text is False
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model(input_ids=torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 307)
    assert json.loads((out / "headwise.json").read_text())["calibration"]["tokens"] == 640
    assert not (tmp_path / "small.partial").exists()


@pytest.mark.slow
def test_a_profile_is_reused_and_a_plan_can_be_given(headwise, place, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    profile = tmp_path / "profile"
    quick = ("--no-verify", "--profile", profile)
    assert headwise(*words(place, first, "--attn-params", "80%", *quick)).code == 0
    stamp = (profile / "profile.json").stat().st_mtime_ns
    plan = tmp_path / "plan.json"
    made = headwise(
        "plan", "fit", profile, "--attn-params", "80%", "--multiple-of", "2", "-o", plan
    )
    assert made.code == 0, made.err
    assert headwise(*words(place, second, "--plan", plan, *quick)).code == 0
    assert (profile / "profile.json").stat().st_mtime_ns == stamp
    assert Plan.from_json(plan.read_text()).origin.profile_sha256 == Profile.read(profile).sha256
    one, other = (load_file(p / "model.safetensors") for p in (first, second))
    assert all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.slow
@pytest.mark.parametrize(("effort", "recovered"), [("quick", 1280), ("standard", 5120)])
def test_an_effort_says_how_much_is_recovered(headwise, place, tmp_path, effort, recovered):
    out = tmp_path / "small"
    line = words(place, out, "--attn-params", "60%", "--no-verify", "--effort", effort, "--json")
    at = line.index("--recover")
    result = headwise(*line[:at], *line[at + 2 :])
    assert result.code == 0, result.err
    record = json.loads(result.out)["cut"]
    assert record["recovery"]["tokens"] == recovered
    assert record["settings"]["fit"] == 0
    assert f"effort: {effort}\n" in (out / "recipe.yaml").read_text() or effort == "standard"


@pytest.mark.slow
def test_without_recovery_an_effort_fits_the_layers(headwise, place, tmp_path):
    line = words(place, tmp_path / "a", "--attn-params", "60%", "--no-verify", "--json")
    for effort, fit in (("standard", None), ("quick", 0)):
        result = headwise(*line, "--effort", effort, "--force")
        assert result.code == 0, result.err
        record = json.loads(result.out)["cut"]
        assert record["recovery"] is None
        assert record["settings"]["fit"] == fit


@pytest.mark.slow
def test_recovery_can_follow_the_cut(headwise, place, tmp_path):
    out = tmp_path / "out"
    more = ("--attn-params", "60%", "--no-verify", "--recover", "512", "--json")
    result = headwise(*words(place, out, *more))
    assert result.code == 0, result.err
    assert json.loads(result.out)["cut"]["recovery"]["tokens"] >= 512
    one, other = (load_file(p / "model.safetensors") for p in (out, tmp_path / "out.cut"))
    assert any(not torch.equal(one[n], other[n]) for n in one)
    # Another budget must not recover the cut that is lying there.
    again = headwise(*words(place, out, "--attn-params", "80%", *more[2:], "--force"))
    assert again.code == 0, again.err
    counts = [
        sum(t.numel() for t in load_file(p / "model.safetensors").values())
        for p in (out, tmp_path / "out.cut")
    ]
    assert counts[0] == counts[1] > sum(t.numel() for t in one.values())


@pytest.mark.slow
def test_a_missed_target_is_exit_code_1(headwise, place, tmp_path):
    result = headwise(*words(place, tmp_path / "out", "--attn-params", "30%", "--max-ratio", "0.5"))
    assert result.code == 1
    assert "Missed: --max-ratio must be at most 0.5" in result.err
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "a cut needs a budget such as --attn-params 75%, or a plan, got neither"),
        (("--attn-params", "75%", "--plan", "p.json"), "got both; give one of them"),
        (("--attn-params", "130%"), "--attn-params must be a share above 0% and up to 100%"),
        (("--attn-params", "1%"), "smallest allowed plan costs"),
        (
            ("--attn-params", "75%", "--no-verify", "--max-ratio", "1"),
            "--max-ratio needs the verification",
        ),
        (("--attn-params", "75%", "--length", "160"), "at most the model's context of 128"),
        (
            ("--attn-params", "75%", "--granularity", "heads"),
            "--granularity must be 'layer', 'head' or 'model', got 'heads'",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(headwise, place, tmp_path, more, message):
    result = headwise(*words(place, tmp_path / "out", *more))
    assert result.code == 2
    assert message in result.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_profile_of_another_text_is_refused(headwise, place, tmp_path):
    quick = ("--attn-params", "80%", "--no-verify", "--profile", tmp_path / "profile")
    assert headwise(*words(place, tmp_path / "one", *quick)).code == 0
    (tmp_path / "other.txt").write_text("Another text. " * 400)
    changed = [
        str(tmp_path / "other.txt") if w == str(place / "text.txt") else w
        for w in words(place, tmp_path / "two", *quick)
    ]
    result = headwise(*changed)
    assert result.code == 2
    assert "is a profile of" in result.err


def test_broken_weights_are_named(headwise, place, tmp_path):
    import shutil

    shutil.copytree(place / "model", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    command = words(place, tmp_path / "out", "--attn-params", "75%")
    command[1] = str(tmp_path / "model")
    result = headwise(*command)
    assert result.code == 2
    assert f"{file} is not a complete safetensors file" in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "out").exists()


# Runs the command line and dies by SIGKILL as soon as the named part of the work is on disk.
DIES = """
import os, signal, sys
from headwise import runs
from headwise.cli import main
put, dies_after = runs.Run.put, sys.argv[1]
def put_and_die(self, name, *more):
    put(self, name, *more)
    if name == dies_after:
        os.kill(os.getpid(), signal.SIGKILL)
runs.Run.put = put_and_die
sys.argv = ["headwise", *sys.argv[2:]]
main.main()
"""


@pytest.mark.slow
def test_killed_processes_resume_to_the_same_files(place, tmp_path):
    """Real processes: one killed while it profiles, one while it cuts, one left to finish."""

    def run(out, dies_after):
        line = words(place, out, "--attn-params", "70%", "--no-verify", "--profile", f"{out}.prof")
        command = [sys.executable, "-c", DIES, dies_after, *line]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "Error" not in done.stderr, done.stderr
        return done.returncode

    assert run(tmp_path / "whole", "never") == 0
    assert run(tmp_path / "killed", "chunk-00002") == -signal.SIGKILL
    assert (tmp_path / "killed.prof.partial").is_dir()
    assert run(tmp_path / "killed", "layer-00001") == -signal.SIGKILL
    assert (tmp_path / "killed.partial").is_dir()
    assert run(tmp_path / "killed", "never") == 0
    a, b = (Checkpoint.open(tmp_path / n) for n in ("whole", "killed"))
    assert a.names == b.names
    assert all(torch.equal(a.tensor(n), b.tensor(n)) for n in a.names)
    assert {p.name for p in tmp_path.iterdir()} == {"whole", "whole.prof", "killed", "killed.prof"}


@pytest.mark.slow
def test_a_profile_of_the_whole_text_leaves_nothing_for_the_proof(headwise, place, tmp_path):
    """What `headwise profile` made can be cut with; the proof needs other text then."""
    made = tmp_path / "whole.profile"
    source = (str(place / "model"), "--text", str(place / "text.txt"))
    result = headwise("profile", *source, "--length", "32", "--tokens", "640", "-o", str(made))
    assert result.code == 0, result.err
    with_it = ("--attn-params", "75%", "--profile", made)
    result = headwise(*words(place, tmp_path / "small", *with_it))
    assert result.code == 2
    assert (
        "so nothing of it is left for verification; give --held-out, or --no-verify" in result.err
    )
    assert not (tmp_path / "small").exists()
    (tmp_path / "other.txt").write_text((place / "text.txt").read_text()[::-1])
    other = ("--held-out", tmp_path / "other.txt", "--json")
    result = headwise(*words(place, tmp_path / "small", *with_it, *other))
    assert result.code == 0, result.err
    assert [t["source"] for t in json.loads(result.out)["verify"]["texts"]] == [
        str(tmp_path / "other.txt")
    ]
    page = (tmp_path / "small" / "report.html").read_text(encoding="utf-8")
    assert "Sensitivity by layer" in page  # of the profile that was named
