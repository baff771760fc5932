"""Text by name: a file, a folder, a hub dataset, or the built-in corpus.

    notes.txt                          one document
    folder/                            one document per readable text file below it, by name
    builtin:python                     the running Python's documentation and library source
    builtin:prose, :code, :packages    texts of one kind each (`headwise.data.builtin`)
    hub:owner/name[:config][:split][:column]   a dataset on the Hugging Face hub
    owner/name                         the same, when no such path exists here

A text is its documents in a fixed order. Runs record its SHA-256, which shows whether two runs used
the same text.

Part of a text is held out:

    many documents   a document is held out when the SHA-256 of its text falls below the share,
                     so copies of one document are never on both sides
    few documents    the last part of the stream, cut after a line end where one is near

The rule is deterministic and does not depend on the seed, so runs with different seeds compare.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headwise.data.builtin import BUILTIN, MIXED, MIXED_KINDS
from headwise.errors import HeadwiseError, did_you_mean, reason_of
from headwise.inputs import MOST_TEXT, file_text, user_path

MANY_DOCUMENTS = 100  # below this, hashing could easily hold out nothing, or too much


@dataclass(frozen=True, slots=True)
class Split:
    """Documents to train on, documents held out, and the rule in words."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    rule: str


def held_out_split(documents: tuple[str, ...], share: float) -> Split:
    """Hold out about `share` of the documents, or of the characters if there are few documents."""
    if not 0 <= share < 1:
        raise HeadwiseError(f"held-out must be a share from 0 up to 1, got {share}.")
    if share == 0:
        return Split(train=documents, held_out=(), rule="nothing held out")
    if len(documents) >= MANY_DOCUMENTS:
        chosen = [_position(d) < share for d in documents]
        if any(chosen) and not all(chosen):
            train = tuple(d for d, out in zip(documents, chosen, strict=True) if not out)
            held = tuple(d for d, out in zip(documents, chosen, strict=True) if out)
            return Split(train, held, f"documents whose hash is below {share:g}")
    return _last_part(documents, share)


def _position(document: str) -> float:
    """A document's position in [0, 1), from the hash of its text."""
    digest = hashlib.sha256(document.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _last_part(documents: tuple[str, ...], share: float) -> Split:
    cut = round(sum(map(len, documents)) * (1 - share))
    train, held, seen = [], [], 0
    for document in documents:
        at = min(max(cut - seen, 0), len(document))
        if 0 < at < len(document):
            line_end = document.find("\n", at, at + 200)
            at = line_end + 1 if 0 <= line_end < len(document) - 1 else at
        train += [document[:at]] if at else []
        held += [document[at:]] if at < len(document) else []
        seen += len(document)
    return Split(tuple(train), tuple(held), f"the last {share:.3g} of the text")


_WEIGHTED = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+):(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Text:
    """The documents of a text, in order; `skipped` counts files of a folder without text."""

    source: str
    documents: tuple[str, ...]
    skipped: int = 0

    @property
    def characters(self) -> int:
        """Characters in all documents."""
        return sum(map(len, self.documents))

    @property
    def sha256(self) -> str:
        """A hash of the documents and where each ends."""
        digest = hashlib.sha256()
        for document in self.documents:
            data = document.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.hexdigest()


def read_source(source: str, max_chars: int | None = None) -> Text:
    """The text named `source`, or its first `max_chars` characters."""
    if max_chars is not None and max_chars < 1:
        raise HeadwiseError(f"max-chars must be at least 1, got {max_chars}.")
    if not source.strip():
        raise HeadwiseError("a text needs a name, got an empty one; give a file, folder or name.")
    documents, skipped = _documents(source)
    kept = tuple(_first(documents, max_chars))
    if not any(d.strip() for d in kept):
        raise HeadwiseError(f"{source} holds no text (it is empty or blank); give another text.")
    return Text(source=source, documents=kept, skipped=skipped)


def text_name(name: str) -> str:
    """The name of a text without its weight."""
    return name_and_weight(name)[0]


def name_and_weight(name: str) -> tuple[str, float]:
    """The two parts of 0.5:code.txt; a name without a weight has the weight 1."""
    found = _WEIGHTED.fullmatch(name)
    if found is None:
        return name, 1.0
    weight = float(found[1])
    if not 0 < weight < math.inf:
        raise HeadwiseError(
            f"the weight of a text must be a number above 0, got {name!r}; a file whose name "
            f"begins like that is written ./{name}."
        )
    return found[2], weight


def _documents(source: str) -> tuple[Iterable[str], int]:
    if source.startswith("builtin:"):
        name = source.removeprefix("builtin:")
        if source == MIXED:
            kinds = " or ".join(f"builtin:{kind}" for kind in MIXED_KINDS)
            raise HeadwiseError(f"{source} is a mixture, but one text is needed; give {kinds}.")
        if name not in BUILTIN:
            raise HeadwiseError(
                f"builtin:{name} is not a built-in text. {did_you_mean(name, BUILTIN)}"
            )
        return BUILTIN[name](), 0
    if source.startswith("hub:"):
        return _hub(source), 0
    path = user_path(source)
    if path.is_dir():
        return _folder(path)
    if path.exists():
        return [_file(path)], 0
    if path.is_absolute() or source.startswith((".", "~")) or path.suffix:
        raise HeadwiseError(
            f"{source} does not exist; give a text file, a folder, hub:owner/name or "
            "builtin:python."
        )
    return _hub(f"hub:{source}"), 0


def _first(documents: Iterable[str], max_chars: int | None) -> Iterator[str]:
    left = max_chars
    for document in documents:
        if left is None:
            yield document
            continue
        if left <= 0:
            return
        yield document[:left]
        left -= len(document)


def _file(path: Path) -> str:
    try:
        return file_text(path, most=MOST_TEXT, advice="give a text file, or a folder of them")
    except UnicodeDecodeError as error:
        raise HeadwiseError(
            f"{path} must be UTF-8 text, but byte {error.start} is not; convert it first."
        ) from error
    except OSError as error:
        raise HeadwiseError(f"{path} cannot be read ({error.strerror or error}).") from error


def _folder(root: Path) -> tuple[list[str], int]:
    """Every file below `root` that decodes as UTF-8 without NUL; hidden ones are not looked at."""
    documents, skipped = [], 0
    for file in sorted(root.rglob("*"), key=lambda p: p.relative_to(root).as_posix()):
        hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
        if hidden or not file.is_file():
            continue
        try:
            content = file_text(file, most=MOST_TEXT, advice="remove it, or give another folder")
        except (OSError, UnicodeDecodeError):
            skipped += 1
            continue
        if "\0" in content or not content.strip():
            skipped += 1
            continue
        documents.append(content)
    if not documents:
        raise HeadwiseError(
            f"{root} holds no readable text file ({skipped} files skipped); give another folder."
        )
    return documents, skipped


def _hub(source: str) -> Iterator[str]:
    name, config, split, column = _hub_parts(source)
    try:
        from datasets import load_dataset  # type: ignore[import-untyped]
    except ImportError as error:
        raise HeadwiseError(
            f"{source} is a hub dataset, but the `datasets` package is missing; "
            "install headwise[hub], or give a file, a folder or builtin:python."
        ) from error
    try:
        rows = load_dataset(name, config, split=split)
    # The library raises its own errors, the hub's, requests' and plain ones alike.
    except Exception as error:
        raise HeadwiseError(
            f"{name} is not a file or folder here, and the hub dataset of that name (split "
            f"{split}) could not be loaded ({reason_of(error)}); check the name "
            "and the connection, or give a file, a folder or builtin:python."
        ) from error
    columns = list(rows.column_names)
    if column is None:
        strings = [c for c in columns if getattr(rows.features[c], "dtype", "") == "string"]
        column = "text" if "text" in strings else next(iter(strings), None)
    if column not in columns:
        raise HeadwiseError(
            f"{name} has no text column {column!r}, it has {', '.join(columns)}; "
            f"name one: hub:{name}:{config or ''}:{split}:COLUMN."
        )
    return (str(row[column]) for row in rows if row[column])


def _hub_parts(source: str) -> tuple[str, str | None, str, str | None]:
    parts = source.removeprefix("hub:").split(":")
    if not parts[0] or len(parts) > 4:
        raise HeadwiseError(
            f"a hub dataset is written hub:owner/name[:config][:split][:column], got {source!r}."
        )
    name, config, split, column = (parts + [""] * 3)[:4]
    return name, config or None, split or "train", column or None
