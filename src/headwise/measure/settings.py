"""The settings of a verification; the command line's defaults are these."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.devices import Dtype


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """How to measure; the defaults take seconds for a small model."""

    window: int | None = None  # default: the context, at most 1024
    stride: int | None = None  # default: the window
    max_tokens: int | None = None
    tokenizer: str | None = None
    device: str = "auto"
    dtype: Dtype = "auto"
    trust_remote_code: bool = False
    prompt: int = 512  # tokens read at once where the speed is measured
    decode_after: int = 128  # tokens before those that one sequence decodes
    repeats: int = 5  # of the timings; 0 leaves them out
    seconds: float = 60.0  # the most that one point of the timings takes
    memory: str = "24GiB"  # in which sequences are to fit: a common graphics card's
    tasks: tuple[str, ...] = ()
    task_data: str | None = None  # a folder of .jsonl files; default: lm-eval's own data
    task_limit: int | None = None
    samples: int = 3  # prompts that both models continue
