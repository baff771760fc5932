"""Two processes into one output: the second gets a sentence, and nothing is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.plan import Plan
from tests import tiny

pytestmark = pytest.mark.slow  # the first process
SCRIPT = Path(__file__).with_name("paused_runs.py")
SIZES = {"hidden_size": 16, "intermediate_size": 19, "max_position_embeddings": 32}
SHORT = "--text text.txt --tokens 48 --length 16 --device cpu"
CUT = "--attn-params 60% --multiple-of 2"
VERBS = {  # in an order in which each finds what it needs
    "profile": f"profile model {SHORT} -o prof",
    "compress": f"compress model {SHORT} {CUT} --no-verify --recover 0 -o cut",
    "compress and recover": f"compress model {SHORT} {CUT} --recover 32 --verify-tokens 32 -o out",
    "self-text": f"compress model {CUT} --self-text 64 --tokens 32 --length 16 --recover 0 "
    "--verify-tokens 32 --device cpu -o own",
    "recover": f"recover cut --against model {SHORT} -o recovered",
    "train": "train plan.json --text text.txt --steps 2 --batch-size 2 --device cpu -o run",
    "compare": f"compare model {SHORT} --methods svd-llm --attn-params 75% --verify-tokens 32 "
    "-o compared",
    "export": "export model --to padded --no-check -o padded",
    "design": "plan design --layers 2 --d-model 16 --heads 2 --context 16 --seeds 1 --steps 1 "
    "--proxy-layers 1 --proxy-d-model 8 --text text.txt --tokens 32 --batch-size 2 "
    "--attn-params 75% --multiple-of 2 --device cpu -o designed.json",
    "reproduce": "reproduce bound-curve --quick --workers 1 -o reproduced",
    "export to a file": "export model --to gguf --no-check -o model.gguf",
}


@pytest.fixture(scope="module")
def first(tmp_path_factory, write_llama):
    """The first process, in a folder with a model, a text and a plan."""
    folder = tmp_path_factory.mktemp("two")
    write_llama(folder, characters=6_000, vocab_size=263, **SIZES)
    (folder / "plan.json").write_text(Plan.uniform(tiny.SHAPE).to_json())
    with (
        (folder / "said.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=folder,
        ) as process,
    ):
        process.folder = folder
        yield process
        process.stdin.close()


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "said.log"
    }


@pytest.mark.parametrize("verb", VERBS)
def test_the_second_gets_a_sentence(headwise, first, monkeypatch, verb):
    """It comes whenever the first has just taken hold of a folder, so no clock is in it."""
    monkeypatch.chdir(first.folder)
    words = VERBS[verb].split()
    print(json.dumps(words), file=first.stdin, flush=True)
    holds = 0
    while (said := first.stdout.readline()).startswith("held"):
        before = contents(first.folder)
        second = headwise(*words)
        assert second.code == 2, (said, second)
        assert "another run is using" in second.err, said
        assert second.err.count("Error") == 1
        assert contents(first.folder) == before
        holds += 1
        print(file=first.stdin, flush=True)
    assert said == "ended 0\n", (first.folder / "said.log").read_text()
    assert holds
    assert Path(words[-1]).exists()
    assert not list(first.folder.glob("*.partial"))
