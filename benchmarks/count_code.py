"""Counts of the code: lines and files of each room, and what one command has to execute.

    python benchmarks/count_code.py

The walk of a command is the set of headwise's files that a tiny run of it imports.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "headwise"
CLIENTS = ("cli", "papers")

RUN = """
import json, sys
from headwise.cli import main
sys.argv = ["headwise", *json.loads(sys.argv[1])]
try:
    main.main()
finally:
    found = [n for n in sys.modules if n.split(".")[0] == "headwise"]
    print(len(found), file=sys.stderr)
"""
MODEL = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from headwise.data.tokens import train_tokenizer
sizes = {"hidden_size": 32, "intermediate_size": 41, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=300, num_hidden_layers=2, max_position_embeddings=64, **sizes)
LlamaForCausalLM(config).save_pretrained("model")
train_tokenizer([Path("text.txt").read_text()], 300).save_pretrained("model")
"""
SIZES = "--layers 2 --d-model 32 --heads 4 --context 32 --vocab-size 300"
WALKS = {
    "plan new": f"plan new {SIZES} --attn-params 100% -o plan.json",
    "train": "train plan.json --text text.txt --steps 2 --batch-size 2 -o run",
    "eval": "eval model --text text.txt --tokens 64",
    "profile": "profile model --text text.txt --tokens 64 --length 16 -o model.profile",
    "compress": "compress model --text text.txt --tokens 64 --length 16 --attn-params 75% "
    "--multiple-of 2 --fit 2 --recover 0 --verify-tokens 64 -o small",
    "export": "export small --to padded -o served",
}


def python(code: str, folder: Path, *words: str) -> str:
    """What a program says on stderr, at its end."""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stderr


def walks() -> dict[str, int]:
    """How many of headwise's files each command imports."""
    with tempfile.TemporaryDirectory() as place:
        folder, found = Path(place), {}
        (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 400)
        for name, words in WALKS.items():
            if name == "eval":
                python(MODEL, folder)
            said = python(RUN, folder, json.dumps(words.split()))
            found[name] = int(said.split()[-1])
    return found


def rooms() -> dict[str, tuple[int, int]]:
    """Files and lines of every room; a file at the top is a room of its own."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0]
        files[room] += 1
        lines[room] += len(path.read_text().splitlines())
    return {room: (files[room], lines[room]) for room in sorted(files)}


def main() -> None:
    found = rooms()
    texts = [path.read_text() for path in SOURCE.rglob("*.py")]
    classes = Counter(name for text in texts for name in re.findall(r"^class (\w+)", text, re.M))
    core = [counts for room, counts in found.items() if room not in CLIENTS]
    report = {
        "rooms": {room: {"files": f, "lines": n} for room, (f, n) in found.items()},
        "files": sum(f for f, _ in found.values()),
        "core_lines": sum(n for _, n in core),
        "papers_lines": found["papers"][1],
        "cli_lines": found["cli"][1],
        "dict[str, Any]": sum(text.count("dict[str, Any]") for text in texts),
        "public classes defined twice": sorted(
            name for name, n in classes.items() if n > 1 and not name.startswith("_")
        ),
        "walks": walks(),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
