"""A tokenizer as the metadata of a GGUF file.

    byte-level BPE              tokens, merges, and the name of the rule that splits text into words
    BPE that falls back to      tokens with scores (the later a merge, the lower), bytes as <0x0A>
    bytes (SentencePiece's)

llama.cpp has its own code for each rule and selects it by name. A tokenizer with an unknown rule is
refused, because its tokens would silently differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.data.tokens import tokenizing
from headwise.errors import HeadwiseError, quoted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The splitting expressions of tokenizer.json files by llama.cpp's name.
_EXPRESSIONS = {
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _CONTRACTIONS + r"\p{N}" + _REST: "qwen2",
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer's metadata in a GGUF file."""

    model: str  # gpt2 or llama
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    special: Mapping[str, int] | None = None  # bos, eos, unknown and padding token numbers
    add_bos: bool = False
    add_space_prefix: bool = False
    chat_template: str | None = None


def vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Vocabulary:
    """The tokenizer in llama.cpp's terms; vocabulary entries without a token are unused."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _unknown("it has no tokenizer.json")
    stated = json.loads(backend.to_str())
    model = stated["model"]
    if model["type"] != "BPE":
        raise _unknown(f"its model is {quoted(model['type'])} and not BPE")
    tokens = [f"[UNUSED{i}]" for i in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, number in model["vocab"].items():
        _put(tokens, types, number, token, NORMAL)
    for one in stated["added_tokens"]:
        kind = CONTROL if one["special"] else USER_DEFINED
        _put(tokens, types, one["id"], one["content"], kind)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    special = {
        name: number
        for name, number in (
            ("bos", tokenizer.bos_token_id),
            ("eos", tokenizer.eos_token_id),
            ("unknown", tokenizer.unk_token_id),
            ("padding", tokenizer.pad_token_id),
        )
        if isinstance(number, int)
    }
    with tokenizing():
        first = tokenizer("a", verbose=False)["input_ids"][:1]
    template = tokenizer.chat_template
    common: dict[str, Any] = {
        "special": special,
        "add_bos": bool(first) and first[0] == special.get("bos"),
        "chat_template": template if isinstance(template, str) else None,
    }
    if model.get("byte_fallback"):
        return _with_scores(tokens, types, merges, stated, common)
    pre = _splitting_rule(stated["normalizer"], stated["pre_tokenizer"])
    return Vocabulary("gpt2", pre, tuple(tokens), tuple(types), merges=tuple(merges), **common)


def _put(tokens: list[str], types: list[int], number: int, token: str, kind: int) -> None:
    if number >= len(tokens):
        raise _unknown(f"its token {quoted(token)} has number {number}, beyond the model's")
    tokens[number], types[number] = token, kind


def _splitting_rule(normalizer: Any, pre_tokenizer: Any) -> str:
    """llama.cpp's name of the rule by which a byte-level tokenizer splits text."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    kinds = [step["type"] for step in steps if step]
    last = steps[-1] if kinds else {}
    plain = normalizer is None or normalizer == {"type": "NFC"}
    if plain and kinds and kinds[-1] == "ByteLevel" and not last.get("add_prefix_space"):
        if kinds == ["ByteLevel"] and last.get("use_regex", True):
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True):
            expression = steps[0]["pattern"].get("Regex", "")
            if expression in _EXPRESSIONS:
                return _EXPRESSIONS[expression]
    raise _unknown(f"it splits text by {quoted(kinds)} with other options")


def _with_scores(
    tokens: Sequence[str],
    types: Sequence[int],
    merges: Sequence[str],
    stated: Mapping[str, Any],
    common: Mapping[str, Any],
) -> Vocabulary:
    """SentencePiece's BPE: the best merge is the token of the highest score."""
    rank = {m.replace(" ", "", 1): i for i, m in reversed(list(enumerate(merges)))}
    kinds = list(types)
    for i, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kinds[i] = BYTE
    unknown = (common["special"] or {}).get("unknown")
    if unknown is not None:
        kinds[unknown] = UNKNOWN
    scores = tuple(-float(rank.get(token, 0)) for token in tokens)
    return Vocabulary(
        "llama",
        "default",
        tuple(tokens),
        tuple(kinds),
        scores=scores,
        add_space_prefix=_adds_space(stated),
        **common,
    )


def _adds_space(stated: Mapping[str, Any]) -> bool:
    """Whether a text is read as if a space stood before it; other rules are refused."""
    normalizer, split = stated["normalizer"], stated["pre_tokenizer"]
    steps = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    said = [(s["type"], s.get("prepend") or s.get("content")) for s in steps]
    if split is None and said in (
        [("Prepend", "▁"), ("Replace", "▁")],
        [("Replace", "▁")],
    ):
        return len(said) == 2
    if not said and split is not None and split["type"] == "Metaspace" and not split.get("split"):
        return bool(split.get("prepend_scheme", "always") != "never")
    raise _unknown(f"it prepares text by {quoted(said)} and {quoted(split)}")


def _unknown(why: str) -> HeadwiseError:
    return HeadwiseError(
        f"llama.cpp has no rule for this tokenizer: {why}; give a model with another tokenizer."
    )
