"""Every verb killed before each of its writes: the same command ends in the same files.

Of a long chain every second to eleventh write is tried. HEADWISE_KILLS_FROM=1 tries those one
further on; from 0 to 10 they are all of them.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.plan import Plan
from tests import tiny

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("killed_before.py")
PICTURES = ("report.html", "README.md", "index.html", "table.md")  # of other files, with times
TIMES = re.compile(r'"(seconds|tokens_per_second|median|low|high|ratio)": [-+.e0-9]+')


SIZES = "--tokens 96 --length 16"
CUT = f"{SIZES} --attn-params 60% --multiple-of 2"
MODEL = "{place}/model --text {place}/text.txt"
AGAINST = "{place}/cut --against {place}/model --text {place}/text.txt"
# The command line, every how many of its writes are tried, and how many it has at least.
RUNS = {
    "train": (
        "train {place}/plan.json --text {place}/text.txt --steps 4 --save-every 1 --eval-every 2 "
        "--batch-size 2 --device cpu -o run",
        2,
        40,
    ),
    "recover": (
        f"recover {AGAINST} {SIZES} --batch-size 2 --save-every 1 --device cpu -o out",
        1,
        40,
    ),
    "profile": (f"profile {MODEL} {SIZES} --chunk 2 --device cpu -o out", 1, 30),
    "compress": (f"compress {MODEL} {CUT} --recover 0 --verify-tokens 64 -o out", 3, 60),
    "a profile, a cut and a recovery": (
        f"compress {MODEL} {CUT} --device cpu --recover 64 --verify-tokens 64 -o out",
        5,
        100,
    ),
    "compare": (
        f"compare {MODEL} {SIZES} --attn-params 75% --verify-tokens 64 "
        "--methods svd-llm,headwise --multiple-of 2 -o out",
        4,
        60,
    ),
    "reproduce": ("reproduce allocation-256 --quick --workers 1 -o out", 2, 15),
    "an export to a folder": ("export {place}/model --to padded --no-check -o out", 3, 20),
    "an export to a file": ("export {place}/model --to gguf --no-check -o out.gguf", 3, 20),
    "a training run and a profile of each proxy": (
        "plan design --layers 2 --d-model 16 --heads 2 --context 16 --seeds 1 --steps 1 "
        "--proxy-layers 1 --proxy-d-model 8 --text {place}/text.txt --tokens 32 --batch-size 2 "
        "--attn-params 75% --multiple-of 2 --device cpu -o plan.json",
        8,
        40,
    ),
    "text that the model writes itself": (
        "compress {place}/model --self-text 64 --tokens 32 --length 16 --attn-params 60% "
        "--multiple-of 2 --device cpu --recover 0 --fit 0 --no-verify -o out",
        11,
        100,
    ),
    # Of a file beside the model: the card is renewed, too.
    "verify": (f"verify {AGAINST} --tokens 64 --repeats 1 -o verify.json", 1, 2),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory, write_llama, run_command):
    """A tiny model, its cut, a text and a plan."""
    folder = tmp_path_factory.mktemp("writes")
    write_llama(
        folder,
        characters=6_000,
        vocab_size=263,
        hidden_size=16,
        intermediate_size=19,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    (folder / "plan.json").write_text(Plan.uniform(tiny.SHAPE).to_json())
    budget = "--length 16 --tokens 160 --attn-params 60% --multiple-of 2 --recover 0 --no-verify"
    run_command(*f"compress {MODEL} {budget} -o {{place}}/cut".format(place=folder).split())
    return folder


def contents(folder):
    """Every file, its times left out; reports and tables are pictures of the others."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in PICTURES:
            data = path.read_bytes()
            if path.suffix in {".json", ".jsonl"}:
                data = TIMES.sub("", data.decode()).encode()
            found[path.relative_to(folder).as_posix()] = data
        elif path.is_file():
            found[path.relative_to(folder).as_posix()] = b""
    return found


@pytest.fixture
def killed_before_each(tmp_path):
    def run(*words, every):
        first = int(os.environ.get("HEADWISE_KILLS_FROM", "0")) % every
        asked = {"words": words, "here": str(tmp_path)}
        asked |= {"every": every, "first": first}
        done = subprocess.run(
            [sys.executable, str(SCRIPT), json.dumps(asked)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert done.returncode == 0, done.stderr
        whole = contents(tmp_path / "whole")
        folders = [p for p in tmp_path.iterdir() if p.is_dir() and p.name != "whole"]
        for folder in folders:
            found = contents(folder)
            assert found.keys() == whole.keys(), folder.name
            assert [n for n in whole if found[n] != whole[n]] == [], folder.name
        return int(done.stdout), len(folders)

    return run


@pytest.mark.parametrize("name", RUNS)
def test_the_same_command_ends_in_the_same_files(killed_before_each, place, name):
    line, every, least = RUNS[name]
    effects, lives = killed_before_each(*line.format(place=place).split(), every=every)
    assert lives >= effects // every
    assert effects > least
