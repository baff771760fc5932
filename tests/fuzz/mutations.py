"""Seeded damage to files: whatever a disk, a download, an editor or an attacker can do to one.

    mutate(path, rng) ─┬─ as a file     missing, a folder, a pipe, a device, a loop, a terabyte
                       ├─ as bytes      cut, flipped, filled, doubled, inserted, random
                       └─ by format     JSON and YAML values, safetensors headers and numbers,
                                        GGUF metadata

Each returns a few words that say what was done.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    7,
    -8,
    10**9,
    10**12,
    2**63,
    10**40,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "7",
    "x" * 100_000,
    "\x1b[31m\u202e\0",
    "\ud800",
    "../../../../etc/passwd",
    "<img src=x onerror=alert(1)>",
    [],
    {},
    [[]],
    {"a": {"b": [1, "2"]}},
    [1] * 1000,
)
# Keys that other libraries would read from a file of ours, whether they stand there or not.
HEARD_OF = (
    "added_tokens_decoder",
    "attention_types",
    "attn_implementation",
    "auto_map",
    "backbone",
    "bad_words_ids",
    "cache_implementation",
    "chat_template",
    "crop_size",
    "eos_token_id",
    "image_mean",
    "layer_types",
    "max_position_embeddings",
    "n_layer",
    "num_beams",
    "num_key_value_heads",
    "num_labels",
    "output_attentions",
    "pad_size",
    "padding",
    "post_processor",
    "quantization_config",
    "repetition_penalty",
    "return_dict",
    "rope_parameters",
    "sliding_window",
    "stop_strings",
    "suppress_tokens",
    "text_config",
    "tokenizer_class",
    "torch_dtype",
    "truncation",
)
DEEP = 50_000
_BYTES = {"I8": 1, "BOOL": 1, "F8_E4M3": 1, "F16": 2, "BF16": 2, "I64": 8, "F64": 8, "C64": 8}
_FILES = ("missing", "folder", "pipe", "/dev/zero", "/dev/urandom", "/dev/null", "loop", "terabyte")


def mutate(path: Path, rng: random.Random, *, special: bool = True) -> str:
    """Damage a file; `special` allows things that are no regular file."""
    chance = rng.random()
    if special and chance < 0.06:
        return _as_file(path, rng)
    content = path.read_bytes()
    by_format = FORMATS.get(path.suffix)
    if by_format is not None and chance < 0.75:
        made, what = by_format(content, rng)
    else:
        made, what = _as_bytes(content, rng)
    path.write_bytes(made)
    return what


def _as_file(path: Path, rng: random.Random) -> str:
    kind = rng.choice(_FILES)
    if kind == "terabyte":
        os.truncate(path, 2**40)
        return kind
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind != "missing":
        path.symlink_to(kind)
    return kind


def _as_bytes(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    size = len(content)
    kind = rng.choice(("empty", "cut", "flip", "fill", "double", "insert", "random", "no text"))
    a, b = sorted(rng.randrange(size + 1) for _ in range(2))
    if kind == "empty":
        return b"", kind
    if kind == "cut":
        return content[:a], f"cut at {a} of {size}"
    if kind == "fill":
        filler = rng.choice((b"\0", b"\xff", b" ", b"9", b"["))
        return content[:a] + filler * (b - a) + content[b:], f"fill {a}…{b} with {filler!r}"
    if kind == "double":
        return content[:b] + content[a:], f"double {a}…{b}"
    if kind == "insert":
        return content[:a] + rng.randbytes(rng.randint(1, 64)) + content[a:], f"insert at {a}"
    if kind == "random":
        return rng.randbytes(rng.choice((1, 8, 100, 5000))), kind
    if kind == "no text":
        return b"\xff\xfe\0\x80" * 50, kind
    made = bytearray(content or b"\0")
    places = [rng.randrange(len(made)) for _ in range(rng.randint(1, 8))]
    for place in places:
        made[place] ^= 1 << rng.randrange(8)
    return bytes(made), f"flip bits at {places}"


def _json(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    try:
        data = json.loads(content)
    except ValueError:
        return _as_bytes(content, rng)
    made, what = change_value(data, rng)
    return (made if isinstance(made, bytes) else dumped(made)), what


def _json_lines(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    lines = content.splitlines(keepends=True)
    if not lines:
        return _as_bytes(content, rng)
    at = rng.randrange(len(lines))
    made, what = _json(lines[at], rng)
    lines[at] = made.strip() + b"\n"
    return b"".join(lines), f"line {at + 1}: {what}"


def dumped(data: Any) -> bytes:
    return json.dumps(data).encode("utf-8", "surrogatepass")


def change_value(data: Any, rng: random.Random) -> tuple[Any, str]:
    """A copy of JSON-ready data with one thing changed."""
    places = [(), *_places(data)]
    place = rng.choice(places)
    where = ".".join(map(str, place)) or "the whole"
    kind = rng.choice(("replace",) * 6 + ("remove", "unknown", "twice", "deep", "neighbour"))
    copy = json.loads(json.dumps(data))
    if kind == "deep":
        text = dumped(_with(copy, place, "DEEP"))
        deep = b"[" * DEEP + b"]" * DEEP
        return text.replace(b'"DEEP"', deep), f"{where} nested deeply"
    if kind == "twice" and isinstance(copy, dict) and copy:
        key = rng.choice(sorted(copy))
        return dumped(copy)[:-1] + b"," + dumped({key: 1})[1:], f"{key} twice"
    if kind == "unknown":
        holder = _at(copy, place)
        if isinstance(holder, dict):
            if rng.random() < 0.3:
                holder[rng.choice(("unheard_of", "", "a\n\x1b[0m", "é" * 300))] = 1
                return copy, f"an unknown key in {where}"
            key, value = rng.choice(HEARD_OF), rng.choice(HOSTILE)
            holder[key] = value
            return copy, f"{key} = {value!r:.60} in {where}"
    if kind == "remove" and place:
        holder = _at(copy, place[:-1])
        del holder[place[-1]]
        return copy, f"{where} removed"
    if kind == "neighbour" and place:
        value = _near(_at(copy, place), rng)
        return _with(copy, place, value), f"{where} = {value!r:.60}"
    value = rng.choice(HOSTILE)
    return _with(copy, place, value), f"{where} = {value!r:.60}"


def _near(value: Any, rng: random.Random) -> Any:
    """A value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice((value + 1, value - 1, -value, value * 2, value * 10**6, value / 2))
    if isinstance(value, str):
        return rng.choice((value[:-1], value + "x", value.upper(), value * 20, f" {value}"))
    if isinstance(value, list):
        return rng.choice((value[:-1], value * 2, value * 1000, value[::-1], [value]))
    return [value]


def _places(data: Any, before: tuple = ()) -> Iterator[tuple]:
    items: Any = data.items() if isinstance(data, dict) else ()
    items = enumerate(data) if isinstance(data, list) else items
    for key, value in items:
        yield (*before, key)
        yield from _places(value, (*before, key))


def _at(data: Any, place: tuple) -> Any:
    for key in place:
        data = data[key]
    return data


def _with(data: Any, place: tuple, value: Any) -> Any:
    if not place:
        return value
    _at(data, place[:-1])[place[-1]] = value
    return data


_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def _yaml(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    import yaml

    if rng.random() < 0.05:
        return (content.decode() + _BOMB).encode(), "aliases of aliases"
    if rng.random() < 0.1:
        tag = rng.choice(("!!python/object/apply:os.system [true]", "!!binary x", "2001-13-45"))
        return content + f"unheard_of: {tag}\n".encode(), f"the tag {tag}"
    made, what = change_value(yaml.safe_load(content), rng)
    if isinstance(made, bytes):
        return made, what
    text = yaml.safe_dump(made, allow_unicode=True) if "\ud800" not in str(made) else "x: '\\ud8'"
    return text.encode("utf-8", "surrogatepass"), what


def _safetensors(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    kind = rng.choice(("header", "header", "header", "length", "dtype", "numbers"))
    if kind == "length":
        told = rng.choice((0, 1, length - 1, length + 8, 2**31, 2**63, 2**64 - 1, len(content)))
        return told.to_bytes(8, "little") + header + data, f"a header of {told} bytes"
    if kind == "numbers" and len(data) >= 4:
        at = rng.randrange(len(data) // 4) * 4
        number = rng.choice(
            (b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f", b"\0\0\x80\xff")
        )
        return content[: 8 + length + at] + number + data[at + 4 :], f"{number!r} at {at}"
    entries = json.loads(header)
    names = [n for n in entries if n != "__metadata__"]
    if kind == "dtype" and names:
        name = rng.choice(names)
        entries[name]["dtype"] = new = rng.choice(
            ("I32", "U32", "F16", "BF16", "I8", "I64", "BOOL", "F64", "C64", "F8_E4M3", "x", 7)
        )
        width = {
            "I8": 1,
            "BOOL": 1,
            "F8_E4M3": 1,
            "F16": 2,
            "BF16": 2,
            "I64": 8,
            "F64": 8,
            "C64": 8,
        }
        if rng.random() < 0.5 and entries[name]["shape"]:
            entries[name]["shape"][-1] = entries[name]["shape"][-1] * 4 // width.get(new, 4)
        made: Any = entries
        what = f"{name} in {new}"
    else:
        made, what = change_value(entries, rng)
    text = made if isinstance(made, bytes) else dumped(made)
    return len(text).to_bytes(8, "little") + text + data, what


def _gguf(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Values, lengths and types of the metadata: the bytes around the names of the keys."""
    made = bytearray(content)
    keys = [b"general.architecture", *_keys(content)]
    key = rng.choice(keys)
    at = content.find(key)
    if at < 0:
        return _as_bytes(content, rng)
    start = at + len(key)
    kind = rng.choice(("type", "value", "value", "count", "name", "header"))
    hostile = rng.choice((0, 1, 7, 10**6, 2**31, 2**63, 2**64 - 1, 0x7FC00000))
    if kind == "type":
        made[start : start + 4] = rng.choice((*range(14), 255)).to_bytes(4, "little")
    elif kind == "value":
        made[start + 4 : start + 8] = (hostile % 2**32).to_bytes(4, "little")
    elif kind == "count":
        made[start + 4 : start + 12] = hostile.to_bytes(8, "little")
    elif kind == "name":
        made[at + rng.randrange(len(key))] ^= 1 << rng.randrange(8)
    else:  # the numbers of tensors and of keys
        place = rng.choice((4, 8, 16))
        made[place : place + 8] = hostile.to_bytes(8, "little")
    return bytes(made), f"{kind} of {key.decode()} ({hostile})"


def _keys(content: bytes) -> list[bytes]:
    import re

    head = content[: min(len(content), 20_000)]
    return re.findall(rb"(?:llama|tokenizer|general|blk|token_embd)\.[a-z0-9_.]{3,40}", head)


FORMATS: dict[str, Callable[[bytes, random.Random], tuple[bytes, str]]] = {
    ".json": _json,
    ".jsonl": _json_lines,
    ".yaml": _yaml,
    ".safetensors": _safetensors,
    ".gguf": _gguf,
}
