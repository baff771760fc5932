"""A run folder from a plan and a text.

The text is read, split, tokenised and stored as tokens in the folder once; going on after a kill
needs neither the text nor the plan again. The record (run.json) is written last, so a folder with
one is complete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.artifacts import atomic_folder, sha256, versions, write_text
from headwise.data.split import held_out_split
from headwise.data.text import read_source
from headwise.data.tokens import DEFAULT_VOCAB, load_tokenizer, token_stream, trained_tokenizer
from headwise.errors import HeadwiseError
from headwise.plan import Origin, Plan
from headwise.training.batches import WindowBatches
from headwise.training.run_folder import RunFolder
from headwise.training.settings import TrainSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKAGES = ("headwise", "numpy", "torch", "transformers", "accelerate", "tokenizers", "safetensors")
STREAMS = ("train.npy", "held-out.npy")


@dataclass(frozen=True, slots=True)
class TextChoice:
    """Which text, how much of it, and which tokenizer (None: one is trained on it)."""

    source: str
    max_chars: int | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None  # None: the plan's, or the default when the plan has none


@dataclass(frozen=True, slots=True)
class Task:
    """A run to start: a plan, a text, resolved settings, and the command for the record."""

    plan: Plan
    text: TextChoice
    settings: TrainSettings
    command: str = ""


Tick = Callable[[int, int], None]


def prepare(task: Task, folder: RunFolder, tick: Tick | None = None) -> None:
    """Make the run folder; nothing is written before text, tokenizer and model are known good."""
    text = read_source(task.text.source, task.text.max_chars)
    split = held_out_split(text.documents, task.settings.held_out)
    tokenizer, plan = fitted_tokenizer(task.plan, task.text, split.train)
    check_context(plan, task.settings)
    streams = tuple(token_stream(tokenizer, part, tick) for part in (split.train, split.held_out))
    context = task.settings.context
    assert context is not None
    WindowBatches(streams[0], context=context, batch_size=1, seed=0)  # long enough?
    tokens = special_tokens(tokenizer)
    built_model(plan, tokens, seed=task.settings.seed)
    with folder.replaced():
        _write(folder, plan, tokenizer, streams)
        folder.write_record(
            {
                "status": "running",
                "command": task.command,
                "settings": task.settings.to_dict(),
                "plan_sha256": plan_hash(task.plan),
                "text": {
                    **asdict(task.text),
                    "sha256": text.sha256,
                    "documents": len(text.documents),
                    "characters": text.characters,
                    "skipped_files": text.skipped,
                    "split": split.rule,
                    "train_tokens": len(streams[0]),
                    "held_out_tokens": len(streams[1]),
                },
                "special_tokens": tokens,
                "tokens_sha256": {name: sha256(folder.tokens / name) for name in STREAMS},
                "versions": dict(versions(PACKAGES)),
            }
        )


def _write(
    folder: RunFolder, plan: Plan, tokenizer: PreTrainedTokenizerBase, streams: tuple[Any, ...]
) -> None:
    """The files of a run that never change."""
    with atomic_folder(folder.tokenizer) as path:
        tokenizer.save_pretrained(path)
    with atomic_folder(folder.tokens) as path:
        for name, stream in zip(STREAMS, streams, strict=True):
            np.save(path / name, stream)
    write_text(folder.plan, plan.to_json())


def fitted_tokenizer(
    plan: Plan, choice: TextChoice, documents: tuple[str, ...]
) -> tuple[PreTrainedTokenizerBase, Plan]:
    """The tokenizer, given or trained, and the plan with the vocabulary size they agree on."""
    planned, asked = plan.shape.vocab_size, choice.vocab_size
    if planned and asked and planned != asked:
        raise HeadwiseError(
            f"the plan has a vocab_size of {planned}, but --vocab-size asks for {asked}; leave it "
            "out, or change the plan."
        )
    if choice.tokenizer is None:
        size = planned or asked or DEFAULT_VOCAB
        tokenizer = trained_tokenizer(documents, size)
    else:
        tokenizer = load_tokenizer(choice.tokenizer)
        size = planned or asked or len(tokenizer)
    if len(tokenizer) > size:
        raise HeadwiseError(
            f"the tokenizer has {len(tokenizer)} tokens, more than the vocab_size {size}; use a "
            "smaller tokenizer or a plan with a larger vocab_size."
        )
    shape = plan.shape.model_copy(update={"vocab_size": size})
    return tokenizer, plan.model_copy(update={"shape": shape})


def check_context(plan: Plan, settings: TrainSettings) -> None:
    """Refuse windows longer than the model's own context."""
    assert settings.context is not None
    if settings.context > plan.shape.context:
        raise HeadwiseError(
            f"context must be at most the plan's {plan.shape.context}, got {settings.context}."
        )


def plan_hash(plan: Plan) -> str:
    """What tells two plans apart, wherever they came from."""
    bare = plan.model_copy(update={"origin": Origin()})
    return hashlib.sha256(bare.to_json().encode()).hexdigest()


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """The token numbers a model's config must agree on with its tokenizer.

    A stock config's own numbers would end a generation at some letter, and a padding number keeps
    the row of that token from ever learning.
    """
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name) for name in names}


def built_model(plan: Plan, tokens: dict[str, int | None], *, seed: int) -> Any:
    """The plan's model with these special tokens, randomly initialised from the seed."""
    from headwise.nn.build import build_model

    return build_model(plan, overrides=tokens, seed=seed)
