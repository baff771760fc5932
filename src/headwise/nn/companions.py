"""What belongs to a model beside its weights: tokenizer, generation config, templates, licences."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

# Small files that are neither weights nor code: listed, so that nothing else slips through.
SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab"})
_PAPERS = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_WRITTEN_ANEW = frozenset({"config.json", "headwise.json", "verify.json"})


def copy_companions(source: Path, target: Path, *, code: bool = False) -> tuple[str, ...]:
    """Copy tokenizer, generation config, chat templates and licences; `code` takes *.py too.

    Never weights, pickles or the model's config. Returns the names copied.
    """
    copied = []
    for file in _companions(source, code=code):
        name = file.relative_to(source)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / name)
        copied.append(name.as_posix())
    return tuple(copied)


def _companions(source: Path, *, code: bool) -> Iterator[Path]:
    for file in sorted([*source.glob("*"), *source.glob("*/*")]):
        name = file.relative_to(source)
        if not file.is_file() or any(part.startswith(".") for part in name.parts):
            continue
        if name.as_posix() in _WRITTEN_ANEW or name.name.endswith(".index.json"):
            continue
        paper = name.name.upper().startswith(_PAPERS) and file.suffix in {"", ".md", ".txt"}
        if file.suffix in SUFFIXES or paper or (code and file.suffix == ".py"):
            yield file
