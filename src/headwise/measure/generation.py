"""What a model writes: after a prompt, or on its own, as calibration text.

Sequences are drawn token by token from the model's own distribution, from the start of a text on,
many side by side. They are text the model finds ordinary, of every kind it has learned, so a cut
that is calibrated on them is not bent towards one kind.

    OUT.partial/parts/drawn-00000 …   sequences drawn together; a kill loses one part at most
    OUT/self-text.json                the documents, the model and the seed
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from headwise.data.text import Text
from headwise.data.tokens import refuse_unknown_tokens
from headwise.errors import HeadwiseError
from headwise.measure.likelihood import model_context, start_token
from headwise.progress import Progress, silent
from headwise.records import Record, read_record, write_record
from headwise.runs import drop_partial, resume
from headwise.source import Source

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


COLDEST = 0.001  # the least temperature that draws: logits ÷ less could overflow


@dataclass(frozen=True, slots=True)
class Continuation:
    """The new text and how many tokens it took."""

    text: str
    tokens: int


def continuation(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
) -> Continuation:
    """Draw a continuation, which ends with the text; colder than 0.001 is the likeliest token."""
    import torch
    from transformers import GenerationConfig

    ids = list(tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])
    start = start_token(tokenizer)
    ids = ids if start is None else [start, *ids]
    if not ids:
        raise HeadwiseError("the prompt is empty and the tokenizer has no start token; write one.")
    embeddings: Any = model.get_input_embeddings()
    refuse_unknown_tokens(np.asarray(ids), embeddings.weight.size(0))
    context = model_context(model)
    if context is not None and len(ids) + max_new_tokens > context:
        raise HeadwiseError(
            f"the prompt's {len(ids)} tokens and {max_new_tokens} new ones must fit the model's "
            f"context of {context}; shorten the prompt or lower --max-new-tokens."
        )
    drawing = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    inputs = torch.tensor([ids], device=model.device)
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        if not torch.isfinite(model(input_ids=inputs, use_cache=False).logits).all():
            raise HeadwiseError(
                "the model's predictions are not numbers (NaN or infinite) for this prompt; its "
                "weights are broken or overflow in this number format."
            )
        # A config of our own: what the options say, whatever generation_config.json adds.
        how = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=max_new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
            **(drawing if temperature >= COLDEST else {"do_sample": False}),
        )
        output: Tensor = model.generate(  # type: ignore[operator]
            inputs, attention_mask=torch.ones_like(inputs), generation_config=how
        )
    new = output[0, len(ids) :]
    return Continuation(str(tokenizer.decode(new, skip_special_tokens=True)), len(new))


SELF_TEXT_RECORD = "self-text.json"
NAME = "self-text"
TOGETHER = 16  # sequences drawn side by side
LENGTH = 512  # tokens of a sequence, or the context where that is shorter


class SelfTextRecord(Record):
    """The content of self-text.json."""

    format: Literal["headwise-self-text/2"] = "headwise-self-text/2"
    key: str
    model: str
    weights_sha256: str
    tokens: int
    seed: int
    documents: tuple[str, ...]


def write_self_text(
    source: Source, tokens: int, folder: Path, *, seed: int = 0, progress: Progress = silent
) -> Text:
    """At least `tokens` tokens of the model's own, kept in `folder`; resumed after a kill."""
    source.refuse_seeing_ahead("--self-text")
    length = min(LENGTH, source.plan.shape.context)
    together = min(TOGETHER, -(-tokens // length))
    inputs = {
        "model": source.name,
        "weights_sha256": source.weights_sha256,
        "tokens": tokens,
        "length": length,
        "seed": seed,
    }
    with resume(folder, NAME, inputs, record=SELF_TEXT_RECORD) as run:
        if not run.finished:
            model: Any = source.load("causal-lm", device="cpu", dtype="fp32")
            parts = [f"drawn-{i:05d}" for i in range(-(-tokens // (together * length)))]
            for i, name in enumerate(parts):
                progress("writing text", i, len(parts))
                if not run.has(name):
                    start = _start(source)
                    run.put(name, {"ids": _draw(model, start, (together, length), (seed, i))})
            rows = [row for name in parts for row in run.get(name)["ids"].tolist()]
            written = source.tokenizer.batch_decode(rows, skip_special_tokens=True)
            record = SelfTextRecord(
                key=run.key,
                model=source.name,
                weights_sha256=source.weights_sha256,
                tokens=len(rows) * length,
                seed=seed,
                documents=tuple(written),
            )
            with run.finish() as made:
                write_record(made / SELF_TEXT_RECORD, record)
    return read_self_text(folder)


def self_text(
    source: Source, tokens: int, folder: Path, *, seed: int = 0, progress: Progress = silent
) -> Text:
    """The text in a folder if this model wrote it, else one that is written there."""
    if not (folder / SELF_TEXT_RECORD).exists():
        return write_self_text(source, tokens, folder, seed=seed, progress=progress)
    found = read_record(folder / SELF_TEXT_RECORD, SelfTextRecord, advice=f"remove {folder}")
    if (found.model, found.seed) != (source.name, seed) or found.tokens < tokens:
        raise HeadwiseError(
            f"{folder} holds {found.tokens:,} tokens that {found.model} wrote with seed "
            f"{found.seed}, not {tokens:,} of {source.name} with seed {seed}; remove it, or give "
            "another --out."
        )
    if found.weights_sha256 != source.weights_sha256:
        raise HeadwiseError(
            f"{folder} was written by other weights than {source.name} has now; remove it, or give "
            "another --out."
        )
    drop_partial(folder)
    return read_self_text(folder)


def read_self_text(folder: Path) -> Text:
    """The documents that were written."""
    found = read_record(folder / SELF_TEXT_RECORD, SelfTextRecord, advice=f"remove {folder}")
    return Text(NAME, tuple(d for d in found.documents if d.strip()))


def _start(source: Source) -> int:
    first = start_token(source.tokenizer)
    first = source.tokenizer.eos_token_id if first is None else first
    if first is None:
        raise HeadwiseError(
            f"{source.name}'s tokenizer has no token that begins or ends a text, so the model "
            "cannot write one by itself; give --text instead of --self-text."
        )
    return int(first)


def _draw(model: Any, first: int, shape: tuple[int, int], seed: tuple[int, int]) -> Any:
    """Sequences × tokens, without the token that begins each."""
    import torch

    sequences, length = shape
    generator = torch.Generator().manual_seed(seed[0] * 1_000_003 + seed[1])
    newest, cache, drawn = torch.full((sequences, 1), first), None, []
    with torch.inference_mode():
        for _ in range(length):
            found = model(input_ids=newest, past_key_values=cache, use_cache=True)
            cache = found.past_key_values
            likely = found.logits[:, -1].float().softmax(-1)
            if not bool(torch.isfinite(likely).all()):
                raise HeadwiseError(
                    "the model's predictions are not numbers (NaN or infinite); its weights are "
                    "broken or overflow."
                )
            newest = torch.multinomial(likely, 1, generator=generator)
            drawn.append(newest)
    return torch.cat(drawn, 1).clone().to(torch.int32)
