"""The tokenizer of the tiny models that are exported."""

from __future__ import annotations

import pytest

from headwise.data.text import read_source
from headwise.data.tokens import train_tokenizer
from tests.exporting.portable import WORDS


@pytest.fixture(scope="session")
def tokenizer():
    text = "\n".join(read_source("builtin:python", max_chars=20_000).documents)
    made = train_tokenizer([text], WORDS)
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made
