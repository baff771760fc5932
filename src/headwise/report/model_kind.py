"""The kind of a cut checkpoint: what it reads, how it is loaded, what the Hub calls it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelKind:
    """The names that a reader of a card or page needs."""

    auto: str  # the class of transformers that loads it
    reader: str  # and the one that prepares its inputs
    task: str  # the Hub's pipeline tag

    @property
    def of_images(self) -> bool:
        """Whether it reads images."""
        return self.reader == "AutoImageProcessor"

    def program(self, where: str) -> str:
        """The lines that load it."""
        name = "processor" if self.of_images else "tokenizer"
        return (
            f"import headwise\nfrom transformers import {self.auto}, {self.reader}\n\n"
            f'model = {self.auto}.from_pretrained("{where}")\n'
            f'{name} = {self.reader}.from_pretrained("{where}")'
        )


_TEXT = {  # by causal
    True: ModelKind("AutoModelForCausalLM", "AutoTokenizer", "text-generation"),
    False: ModelKind("AutoModel", "AutoTokenizer", "feature-extraction"),
}
_IMAGES = {  # by whether it has classes
    True: ModelKind(
        "AutoModelForImageClassification", "AutoImageProcessor", "image-classification"
    ),
    False: ModelKind("AutoModel", "AutoImageProcessor", "image-feature-extraction"),
}


def kind_of(folder: Path, record: Mapping[str, Any], *, causal: bool) -> ModelKind:
    """The kind of the cut checkpoint in `folder`, whose headwise.json is `record`."""
    if "images" not in (record.get("calibration") or {}):
        return _TEXT[causal]
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    saved = (config.get("architectures") or [""])[0]
    return _IMAGES[saved.endswith("ForImageClassification")]


def calibrated_on(used: Mapping[str, Any]) -> str:
    """How much was read, in words: `1,234 tokens`, or `166 images`."""
    kind = "images" if "images" in used else "tokens"
    return f"{used.get(kind, 0):,} {kind}"


def calibration_sha256(used: Mapping[str, Any]) -> str | None:
    """The hash of the text or the images."""
    found: str | None = used.get("images_sha256", used.get("text_sha256"))
    return found
