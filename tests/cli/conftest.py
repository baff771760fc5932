"""The command in a process of its own, and the small model that commands are tried on."""

import subprocess
import sys

import pytest

from headwise.data.text import read_source
from headwise.data.tokens import trained_tokenizer


@pytest.fixture
def headwise_process():
    """Run a command line in a process of its own."""

    def run(*words: str, **options) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "headwise", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)

    return run


@pytest.fixture(scope="session")
def write_llama():
    """Writes text.txt and a random Llama with a tokenizer of that text into a folder."""

    def write(folder, *, characters, vocab_size, shard="1GB", **sizes):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        text = "\n\n".join(read_source("builtin:python", max_chars=characters).documents)
        (folder / "text.txt").write_text(text)
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes))
        model.save_pretrained(folder / "model", max_shard_size=shard)
        trained_tokenizer([text], vocab_size).save_pretrained(folder / "model")

    return write
