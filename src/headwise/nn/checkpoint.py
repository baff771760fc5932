"""A checkpoint on disk, read one tensor at a time.

    folder ─┬─ config.json
            ├─ model-00001-of-00002.safetensors ─ [length][JSON header][bytes …]
            └─ model-00002-of-00002.safetensors      names, shapes, dtypes, offsets

Opening reads the headers only. A tensor's bytes are read when asked for, into memory of its own:
nothing stays mapped, so memory follows what the caller holds, not what was read before. Only
safetensors are read: they are data, while a pickle is a program that runs when it is opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from headwise.errors import HeadwiseError, did_you_mean

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MOST_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one tensor lies: bytes `start … end − 1` of a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a folder by name, and its config as plain data."""

    folder: Path
    config: Mapping[str, Any]
    stored: Mapping[str, Stored]

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Read the headers of a folder's safetensors; refuse what is missing or broken."""
        folder = Path(folder).expanduser()
        if not folder.is_dir():
            raise HeadwiseError(f"{folder} is not a folder; give one with config.json and weights.")
        config = _config(folder)
        stored: dict[str, Stored] = {}
        for file in _files(folder):
            stored |= header(file)[0]
        return cls(folder=folder, config=config, stored=stored)

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor's name, in file order."""
        return tuple(self.stored)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as stored, bit for bit; NaN or infinity in it is an error."""
        if name not in self.stored:
            raise HeadwiseError(
                f"{self.folder} has no tensor {name!r}. {did_you_mean(name, self.stored)}"
            )
        found = read(self.stored[name])
        if found.is_floating_point() and found.numel():
            low, high = (found.float() if found.itemsize == 1 else found).aminmax()
            if not (math.isfinite(low) and math.isfinite(high)):
                raise HeadwiseError(
                    f"{name} in {self.folder} holds NaN or infinity; such a model is broken: "
                    "download it again, or repair it."
                )
        return found

    @cached_property
    def tied_copies(self) -> frozenset[str]:
        """Names that only repeat another tensor, though the config ties the two."""
        config = self.config.get("backbone", self.config)
        if not _ties(config):
            return frozenset()
        rows = config.get("vocab_size")
        tables = [n for n, s in self.stored.items() if len(s.shape) == 2 and s.shape[0] == rows]
        tables.sort(key=lambda n: ("embed" not in n and "wte" not in n, n))
        first: dict[tuple[Any, ...], str] = {}
        for name in tables:
            first.setdefault((self.stored[name].shape, self.stored[name].dtype), name)
        return frozenset(
            name
            for name in tables
            if (original := first[self.stored[name].shape, self.stored[name].dtype]) != name
            and torch.equal(read(self.stored[name]), read(self.stored[original]))
        )


def read(stored: Stored) -> torch.Tensor:
    """The tensor's bytes as a tensor of their own."""
    found = torch.empty(stored.shape, dtype=stored.dtype)
    place: Any = found.reshape(-1).view(torch.uint8).numpy()
    with stored.file.open("rb") as stream:
        stream.seek(stored.start)
        got = stream.readinto(place)
    if got != stored.end - stored.start:
        raise _broken(stored.file, "it ends too early")
    return found


def header(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors and the metadata of one safetensors file, checked against its size."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER):
                raise _broken(file, "it ends before its header does")
            data = json.loads(stream.read(length))
        metadata = data.pop("__metadata__", {})
        stored = {name: _stored(file, entry, 8 + length) for name, entry in data.items()}
    except OSError as error:
        raise HeadwiseError(f"{file} cannot be read ({error.strerror or error}).") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(file, f"its header cannot be read: {error}") from error
    end = 8 + length
    for one in sorted(stored.values(), key=lambda s: (s.start, s.end)):
        if one.start != end or one.end - one.start != one.numel * one.dtype.itemsize:
            raise _broken(file, "its tensors do not lie where its header says")
        end = one.end
    if end != size:
        raise _broken(file, f"its header speaks of {end} bytes and it has {size}")
    return stored, metadata


def refuse_pickles(folder: Path) -> None:
    """Raise if pickles are all the weights that a folder has."""
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles:
        raise HeadwiseError(
            f"{folder} has its weights as a pickle ({pickles[0]}), which can run any code when "
            "opened; only safetensors are read: where you trust the file, load it with "
            "transformers and save_pretrained() it, which writes safetensors."
        )


def _ties(config: Mapping[str, Any]) -> bool:
    """Whether input and output embeddings are one; what a config leaves out is its family's."""
    from transformers import CONFIG_MAPPING

    if "tie_word_embeddings" in config:
        return bool(config["tie_word_embeddings"])
    family = str(config.get("model_type"))
    known = family in CONFIG_MAPPING
    return known and bool(getattr(CONFIG_MAPPING[family](), "tie_word_embeddings", False))


def _stored(file: Path, entry: Mapping[str, Any], offset: int) -> Stored:
    start, end = entry["data_offsets"]
    shape = tuple(int(n) for n in entry["shape"])
    return Stored(file, DTYPES[entry["dtype"]], shape, offset + int(start), offset + int(end))


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise HeadwiseError(
            f"{folder} has no config.json; give a Hugging Face folder with config.json and weights."
        ) from error
    except (OSError, ValueError) as error:
        raise HeadwiseError(f"{path} cannot be read as JSON ({error}); check it.") from error
    if not isinstance(data, dict):
        raise HeadwiseError(f"{path} must hold a JSON object; check it.")
    return data


def _files(folder: Path) -> list[Path]:
    """The weight files: those of the index, or the single one."""
    index = folder / INDEX
    if not index.exists():
        if (folder / WEIGHTS).exists():
            return [folder / WEIGHTS]
        refuse_pickles(folder)
        raise HeadwiseError(f"{folder} has neither {WEIGHTS} nor {INDEX}; only those are read.")
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(shards.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HeadwiseError(f"{index} cannot be read as an index ({error}); check it.") from error
    for name in names:
        if Path(name).name != name:
            raise HeadwiseError(f"{index} names {name!r}, which is not a file of its own folder.")
        if not (folder / name).exists():
            raise HeadwiseError(f"{folder / name} is missing, but {INDEX} names it; fetch it.")
    files = [folder / name for name in names]
    absent = set(shards) - {name for file in files for name in header(file)[0]}
    if absent:
        raise HeadwiseError(f"{index} names {sorted(absent)[0]!r}, which no shard holds; fetch it.")
    return files


def _broken(file: Path, why: str) -> HeadwiseError:
    return HeadwiseError(
        f"{file} is not a whole safetensors file ({why}); download or make it again."
    )
