"""The lines of docs/serve.md run as they stand, on a tiny model in the folder they name.

Not run here: lines that need a profile, the network, a program that is no Python package
(`llama-server`; its library reads the same file in the check of `export`) or vLLM.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.exporting import llama_cpp
from tests.exporting.portable import WORDS, portable, with_tokenizer

PAGE = Path(__file__).parents[2] / "docs/serve.md"
ELSEWHERE = (
    "headwise plan fit",
    "headwise compress",
    "headwise push",
    "llama-server",
    "vllm serve",
)
pytestmark = pytest.mark.slow  # engines, and a process of its own


def blocks() -> list[tuple[str, str]]:
    """The language and text of every block but shown output, in order."""
    found = re.findall(r"```(\w*)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return [(kind, text) for kind, text in found if kind in ("", "python")]


def test_its_lines_run_as_written(tmp_path, monkeypatch, headwise, tokenizer):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llama_cpp, "POSITIONS", 24)
    sizes = {"vocab_size": WORDS, "max_position_embeddings": 128}
    with_tokenizer(portable("llama", (0, 2, 3), 6, **sizes), tokenizer, tmp_path / "smaller")
    ran = []
    for kind, block in blocks():
        for line in [block] if kind == "python" else block.strip().splitlines():
            if line.startswith(ELSEWHERE):
                continue
            program, *words = ["", ""] if kind == "python" else shlex.split(line)
            if program == "headwise":
                done = headwise(*words)
                assert done.code == 0, f"{line}\n{done.err}"
            else:
                words = ["-c", line] if kind == "python" else words
                run = [sys.executable, *words]
                ended = subprocess.run(run, capture_output=True, text=True, check=False)
                assert ended.returncode == 0, f"{line}\n{ended.stderr}"
            ran.append(program or line.splitlines()[0])
    assert ran.count("headwise") == 4
    assert len(ran) == 7  # transformers without headwise, ONNX Runtime, onnxruntime-genai
