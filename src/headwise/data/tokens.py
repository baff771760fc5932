"""Documents as one stream of token ids.

    doc ─► tokens ─┐
    doc ─► tokens ─┼─► t t t ■ t t t t ■ t t ■        (■ = end of text, after each document)
    doc ─► tokens ─┘

Long documents are tokenised in pieces (cut after a line end), which keeps memory use constant;
a cut can change the tokens only around that line end.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Integer, UInt32

from headwise.errors import HeadwiseError, reason_of
from headwise.inputs import check_file, check_folder, user_path
from headwise.progress import Progress, silent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
DEFAULT_VOCAB = 4096
PIECE = 100_000  # characters of a document tokenised together
AT_ONCE = 32  # pieces handed to the tokenizer at once, which spreads them over the cores
MASK, PAD, FIRST, LAST = "[MASK]", "[PAD]", "[CLS]", "[SEP]"  # of an encoder's tokenizer
MOST_VOCAB = 2**24  # tokens; far above any tokenizer's, and lists of that length are no burden
MOST_TOKENS = 20_000  # of the text below; padding to a fixed length is less
_FIRST_TEXT = "A first text."
BYTES = 256  # tokens that every byte-level tokenizer has, beside its special ones


def train_tokenizer(
    documents: Sequence[str], vocab_size: int, *, encoder: bool = False
) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer with at most `vocab_size` tokens on `documents`.

    For an encoder it has a mask, a padding token, and a first and a last token around a text.
    """
    special = [PAD, FIRST, LAST, MASK] if encoder else [END_OF_TEXT]
    least = BYTES + len(special)
    if vocab_size < least:
        raise HeadwiseError(
            f"a byte-level tokenizer needs a vocab_size of at least {least} ({BYTES} bytes and "
            f"{', '.join(special)}), got {vocab_size}; raise it, or give --tokenizer."
        )
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        # Room is taken for as many at once, and a merge needs a byte of the text.
        vocab_size=min(vocab_size, least + 4 * sum(map(len, documents))),
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((p for d in documents for p in _pieces(d)), trainer)
    if not encoder:
        return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
        )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{FIRST} $A {LAST}",
        pair=f"{FIRST} $A {LAST} $B:1 {LAST}:1",
        special_tokens=[(token, special.index(token)) for token in (FIRST, LAST)],
    )
    # The last token also ends a document, as in RoBERTa.
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        mask_token=MASK,
        cls_token=FIRST,
        sep_token=LAST,
        eos_token=LAST,
    )


def load_tokenizer(
    path: str, *, config: Any = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face folder, a tokenizer.json or a hub name.

    `config` is the model's config, if it has already been read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    refuse_absent_path(path, "a tokenizer (a Hugging Face folder or a tokenizer.json)")
    if Path(path).is_dir():
        check_folder(Path(path))
    elif Path(path).exists():
        check_file(Path(path))
    try:
        with tokenizing():
            if Path(path).is_file():
                found: PreTrainedTokenizerBase = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
                    tokenizer_file=path
                )
                if found.eos_token is None and END_OF_TEXT in found.get_vocab():
                    found.eos_token = END_OF_TEXT
            else:
                found = AutoTokenizer.from_pretrained(
                    path, config=config, trust_remote_code=trust_remote_code
                )
            _forget_words(found)
            _try(found)
    except HeadwiseError as error:
        raise HeadwiseError(
            f"{path} holds no tokenizer that can be loaded ({str(error).rstrip('.')}); "
            "put its tokenizer.json there, or, where a command takes it, give --tokenizer a "
            "Hugging Face folder or a tokenizer.json."
        ) from error
    return found


@contextlib.contextmanager
def tokenizing() -> Iterator[None]:
    """Whatever a tokenizer stumbles over, as an error of ours.

    transformers and tokenizers raise many kinds, plain Exception among them. Where tokenizers gives
    up, it panics, as Rust does: that is no Exception.
    """
    try:
        yield
    except HeadwiseError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise HeadwiseError(f"the tokenizer fails: {reason_of(error)}.") from error


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text, without any that begin or end it."""
    with tokenizing():
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _try(tokenizer: PreTrainedTokenizerBase) -> None:
    """Settings of a wrong kind show when it is used, absurd ones in how much it makes."""
    made = len(tokenizer(_FIRST_TEXT, verbose=False)["input_ids"])
    if made > MOST_TOKENS:
        raise HeadwiseError(f"it makes {made:,} tokens of {_FIRST_TEXT!r}.")
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= MOST_VOCAB:
        raise HeadwiseError(f"it has a token with the number {highest:,}.")


def _forget_words(tokenizer: PreTrainedTokenizerBase) -> None:
    """Turn off a tokenizer's word cache.

    tokenizers keeps it per thread and does not free it with the tokenizer (0.23.3), so a process
    that opens many models would grow by megabytes with each. Other versions lack the switch.
    """
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    resize = getattr(model, "_resize_cache", None)
    if resize is not None:
        resize(0)


def refuse_absent_path(name: str, advice: str) -> None:
    """Raise if a name can only be a path and does not exist, before the hub is tried."""
    path = user_path(name)
    looks_like_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if not path.exists() and (looks_like_path or path.suffix in {".json", ".model"}):
        raise HeadwiseError(f"{name} does not exist; give {advice}.")


def token_stream(
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    progress: Progress = silent,
    most: int | None = None,
    vocab_size: int | None = None,
) -> UInt32[np.ndarray, " n"]:
    """The documents' tokens, or the first `most` of them, with an end of text after each document.

    Without an end-of-text token the documents are joined directly. A token id of `vocab_size` (the
    model's vocabulary) or more is an error.
    """
    total, done, made = sum(map(len, documents)), 0, 0
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts = [np.zeros(0, dtype=np.uint32)]
    pieces = ((p, last) for d in documents for p, last in _marked_pieces(d))
    while some := list(itertools.islice(pieces, AT_ONCE)):
        texts = [piece for piece, _ in some]
        with tokenizing():
            encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for ids, (_, last) in zip(encoded, some, strict=True):
            parts.append(np.asarray(ids + end if last else ids, dtype=np.uint32))
            made += len(parts[-1])
        done += sum(map(len, texts))
        progress("tokenising (characters)", done, total)
        if most is not None and made >= most:
            break
    stream = np.concatenate(parts)[:most]
    if vocab_size is not None:
        refuse_unknown_tokens(stream, vocab_size)
    return stream


def refuse_unknown_tokens(stream: Integer[np.ndarray, ...], vocab_size: int) -> None:
    """Raise if a token id of the stream is beyond the model's vocabulary."""
    highest = int(stream.max(initial=0))
    if highest >= vocab_size:
        raise HeadwiseError(
            f"the tokenizer gives token id {highest}, but the model's vocabulary has {vocab_size} "
            "tokens; give the tokenizer that belongs to the model."
        )


def _marked_pieces(document: str) -> Iterator[tuple[str, bool]]:
    """The pieces of a document, and whether each is its last."""
    pieces = list(_pieces(document)) or [""]
    return zip(pieces, [False] * (len(pieces) - 1) + [True], strict=True)


def _pieces(document: str) -> Iterator[str]:
    """`document` in pieces of about PIECE characters, cut after a line end where one is near."""
    start = 0
    while start < len(document):
        end = start + PIECE
        if end < len(document):
            line_end = document.rfind("\n", start + PIECE // 2, end)
            end = line_end + 1 if line_end >= 0 else end
        yield document[start:end]
        start = end
