"""profile, compress and recover killed 20 times each at random moments: the files are the same.

Real processes and SIGKILL; the moments come from a stated seed (`killed_chain.py`).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHAIN = Path(__file__).with_name("killed_chain.py")
KILLS, SEED = 20, 4
CALIBRATION = ("--length", "16", "--tokens", "480")
RECOVERY = ("--tokens", "1536", "--length", "16", "--batch-size", "4", "--save-every", "2")


@pytest.fixture(scope="module")
def place(tmp_path_factory, write_llama):
    """A tiny model of many layers, and its text."""
    folder = tmp_path_factory.mktemp("kills")
    write_llama(
        folder,
        characters=20_000,
        vocab_size=293,
        hidden_size=24,
        intermediate_size=31,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return folder


@pytest.fixture
def killed_and_whole(tmp_path):
    """Runs a command whole and as a chain of killed lives; returns what happened."""

    def run(words, progress):
        how = {"progress": progress, "seed": SEED, "kills": KILLS}
        asked = {"words": [str(w) for w in words], "here": str(tmp_path), "how": how}
        done = subprocess.run(
            [sys.executable, str(CHAIN), json.dumps(asked)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        story = json.loads(done.stdout)
        assert len(story["moments"]) == KILLS
        # The control: the deaths were spread over the work, not all before or after it.
        moments = {(piece, effect) for piece, effect in story["moments"]}
        assert len(moments) >= KILLS / 2, story
        assert len({piece for piece, _ in moments}) >= 3, story
        return story

    return run


def contents(folder):
    """Every file but the report page: a picture of the others, drawn when the work is done."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and "report.html" not in p.name
    }


def assert_same(tmp_path):
    """Every finished output of the killed lives is that of the whole run, and nothing is left."""
    whole, killed = contents(tmp_path / "whole" / "out"), tmp_path / "killed"
    outputs = [p for p in killed.glob("out*") if p.suffix != ".partial"]
    assert killed / "out" in outputs
    for output in outputs:
        found = contents(output)
        assert found.keys() == whole.keys()
        assert [n for n in whole if found[n] != whole[n]] == []
    assert not list(killed.glob(".*"))


def test_profile(killed_and_whole, place, tmp_path):
    text = ("--text", place / "text.txt", "--device", "cpu", *CALIBRATION, "--chunk", "1")
    killed_and_whole(
        ("profile", place / "model", *text, "-o", "out"), "out.partial/parts/*.safetensors"
    )
    assert_same(tmp_path)


@pytest.fixture(scope="module")
def cut(place, run_command):
    """The command that cuts, with its profile made."""
    words = ("compress", place / "model", "--text", place / "text.txt", *CALIBRATION)
    more = (
        "--attn-params",
        "60%",
        "--multiple-of",
        "2",
        "--no-verify",
        "--recover",
        "0",
        "--profile",
        place / "profile",
    )
    run_command(*words, *more, "-o", place / "cut")
    return (*words, *more, "-o", "out")


def test_compress(killed_and_whole, cut, tmp_path):
    killed_and_whole(cut, "out.partial/parts/layer-*.safetensors")
    assert_same(tmp_path)


def test_recover(killed_and_whole, place, cut, tmp_path):
    where = (place / "cut", "--against", place / "model", "--text", place / "text.txt")
    killed_and_whole(
        ("recover", *where, *RECOVERY, "--device", "cpu", "-o", "out"),
        "out.partial/checkpoints/step-*",
    )
    assert_same(tmp_path)

    def losses(which):
        lines = (tmp_path / f"{which}.losses").read_text().splitlines()
        return [json.loads(line) for line in lines]

    whole = {row["step"]: row for row in losses("whole")}
    assert sorted(whole) == list(range(1, 25))
    lived = losses("killed")
    # A life that ends between its checkpoint and the note of it leaves no row: a few are missing.
    assert len({row["step"] for row in lived}) > len(whole) / 2
    assert all(row == whole[row["step"]] for row in lived)
