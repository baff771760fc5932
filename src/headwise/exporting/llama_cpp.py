"""Parity in llama.cpp: the most likely next tokens and their log-probabilities at each position.

llama.cpp returns the probabilities of tokens that it generates. It therefore generates one token
after every prefix of a text; the prefix stays in its cache, so each takes one decoding step.
The cache is in float32, as ours is.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import torch

from headwise.data.tokens import token_ids
from headwise.errors import HeadwiseError, quoted, reason_of
from headwise.exporting.parity import POSITIONS, sample_text, sample_tokens
from headwise.exporting.record import Parity
from headwise.source import Source

FIRST = 4  # tokens before the first position that is compared
LISTED = 5  # likeliest tokens that are compared at each position
# Largest difference of a log-probability in nats.
LIMITS = {"F32": 5e-3, "F16": 0.1, "BF16": 0.5, "Q8_0": 1.0}
MOST = 10.0  # of coarser formats, which change the model: only the agreement is told


def refuse_without_llama_cpp() -> None:
    """Raise if the engine that measures parity is not installed."""
    try:
        import xllamacpp  # type: ignore[import-untyped] # noqa: F401
    except ImportError as error:
        raise HeadwiseError(
            "parity is measured in llama.cpp, whose package xllamacpp is missing; install "
            "headwise[llamacpp], or give --no-check."
        ) from error


def open_server(
    file: Path, context: int, *, precise: bool = True, states: Path | None = None
) -> Any:
    """llama.cpp with a model; `precise` keeps its cache in float32, `states` is for saved ones."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_parallel = context, 1
    parameters.verbosity, parameters.warmup = -1, False
    parameters.n_ctx_checkpoints = 0  # copies of windowed layers, which a saved cache would hold
    if states is not None:
        parameters.slot_save_path = f"{states}/"
    if precise:
        f32 = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.cache_type_k = parameters.cache_type_v = f32
        off = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        parameters.flash_attn_type = off  # its sums are in 16 bits
    try:
        return xllamacpp.Server(parameters)
    except Exception as error:
        raise HeadwiseError(f"llama.cpp cannot load {file.name} ({reason_of(error)}).") from error


def likeliest(server: Any, prompt: list[int], listed: int = LISTED) -> dict[int, float]:
    """The most likely tokens after a prompt with their log-probabilities, best first."""
    answer = server.handle_completions(
        {
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": listed,
            "cache_prompt": True,
            "ignore_eos": True,
        }
    )
    if "choices" not in answer:
        raise HeadwiseError(f"llama.cpp did not answer ({quoted(answer)}).")
    content = (answer["choices"][0]["logprobs"] or {}).get("content")
    return {t["id"]: t["logprob"] for t in content[0]["top_logprobs"]} if content else {}


def tokenised(server: Any, text: str) -> list[int]:
    """A text's tokens by llama.cpp's own tokenizer."""
    found: list[int] = _asked(server, "tokenize", content=text, add_special=False)["tokens"]
    return found


def templated(server: Any, messages: list[dict[str, str]]) -> str:
    """A chat formatted by llama.cpp with the file's own template."""
    return str(_asked(server, "apply-template", messages=messages)["prompt"])


def saved_bytes(server: Any) -> int:
    """The size of the cache of everything read, saved by llama.cpp itself."""
    return int(_asked(server, "slots/0?action=save", filename="state")["n_written"])


def _asked(server: Any, path: str, **body: Any) -> Any:
    request = urllib.request.Request(  # noqa: S310  (the server is ours, on this machine)
        f"{server.listening_address}/{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        return json.load(answer)


def llama_cpp_parity(source: Source, file: Path, stored: str) -> Parity:
    """A GGUF file run by llama.cpp against our model."""
    ids = sample_tokens(source, min(FIRST + POSITIONS, source.plan.shape.context - 1))
    server = open_server(file, len(ids) + 8)
    text = sample_text(4 * POSITIONS)
    own = token_ids(source.tokenizer, text)
    if tokenised(server, text) != own:
        raise HeadwiseError(
            f"llama.cpp splits text into other tokens than the tokenizer of {source.name}; this is "
            "a bug in the export: give another target."
        )
    ends = range(min(FIRST, len(ids)), len(ids) + 1)
    found = {end: likeliest(server, ids[:end]) for end in ends}
    del server
    model = source.load(device="cpu", dtype="fp32")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    expected = logits.double().log_softmax(-1)
    # A token that ends within a character is not told, so that position is left out.
    told = {end: listed for end, listed in found.items() if listed}
    error = max(
        abs(float(expected[end - 1, token]) - value)
        for end, listed in told.items()
        for token, value in listed.items()
    )
    same = [int(expected[end - 1].argmax()) == next(iter(listed)) for end, listed in told.items()]
    return Parity(
        engine="llama.cpp",
        measure="log-probabilities",
        positions=len(same),
        error=error,
        limit=LIMITS.get(stored, MOST),
        top_agreement=sum(same) / len(same),
    )
