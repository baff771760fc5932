"""What models and texts are called on a card or a page, and how a model is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from headwise.inputs import user_path
from headwise.measure.record import Measured
from headwise.models.record import CutRecord
from headwise.records import read_json

_HUB_NAMES = {
    "builtin:smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "builtin:minilm": "sentence-transformers/all-MiniLM-L6-v2",
}
# As the Hub has them; anything else in a name would also have to be escaped in a link.
_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelKind:
    """How a model is loaded, and what the Hub calls its task."""

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
            f"model = {self.auto}.from_pretrained({where!r})\n"
            f"{name} = {self.reader}.from_pretrained({where!r})"
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


def kind_of(folder: Path, record: CutRecord, *, causal: bool) -> ModelKind:
    """The kind of the cut checkpoint in `folder`, whose headwise.json is `record`."""
    if record.calibration.images is None:
        return _TEXT[causal]
    config = read_json(folder / "config.json")
    saved = config.get("architectures") if isinstance(config, dict) else None
    first = saved[0] if isinstance(saved, list) and saved else ""
    return _IMAGES[str(first).endswith("ForImageClassification")]


def hub_name(model: str) -> str | None:
    """The Hub's name of a source; None for folders and files, whose paths are private."""
    if model in _HUB_NAMES:
        return _HUB_NAMES[model]
    local = user_path(model).exists() or model.endswith(".gguf")
    return model if is_hub_name(model) and not local else None


def is_hub_name(name: object) -> bool:
    """Whether something could be the name of a repository on the Hub."""
    return isinstance(name, str) and _HUB_NAME.fullmatch(name) is not None


def shown_source(source: str) -> str:
    """A text or model by its name: Hub and built-in names whole, paths by their last part."""
    if source.startswith(("builtin:", "hub:")):
        return source
    return source if hub_name(source) else Path(source).name


def text_name(text: Measured) -> str:
    """A text of a verification, by its name and role."""
    name = shown_source(text.source)
    # The held-out part of a text says so in brackets already.
    return f"{name[:-1]}, {text.role})" if name.endswith(")") else f"{name} ({text.role})"


def gib(amount: int) -> str:
    """Bytes as people read them."""
    return f"{amount / 2**30:.2f} GiB"
