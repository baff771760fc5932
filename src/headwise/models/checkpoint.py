"""Checkpoints, read and written one tensor at a time.

    folder ─┬─ config.json
            ├─ model-00001-of-00002.safetensors ─ [length][JSON header][bytes …]
            └─ model-00002-of-00002.safetensors      names, shapes, dtypes, offsets

Opening reads only the headers. A tensor's bytes are read on request, into newly allocated memory:
nothing stays mapped, so memory use depends on what the caller holds, not on what was read before.
Only safetensors are read: they are data, while a pickle can run code when it is opened.

    put ─► spool (bytes as they come) ─ full ─► header + bytes, sorted ─► model-0000k-of-n
                                                                          index at the end

Writing also needs memory for one tensor only. A safetensors file starts with a header that lists
every tensor, so bytes are spooled on disk until their shard is complete. Within a shard, wide
dtypes come before narrow ones, which keeps each tensor aligned to its own size.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from headwise.errors import HeadwiseError, did_you_mean, quoted, reason_of
from headwise.inputs import MOST_CONFIG, MOST_WEIGHTS, check_file, check_folder, user_path
from headwise.records import read_json, without_repeats

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
DEFAULT_SHARD_BYTES = 2 * 2**30
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MOST_HEADER = 100_000_000  # bytes; the format's own limit
_PIECE = 16 * 2**20  # bytes copied at once
_MALFORMED = (AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Stored:
    """The location of one tensor: bytes `start … end − 1` of a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    def read(self) -> torch.Tensor:
        """The bytes as a tensor of their own."""
        found = torch.empty(self.shape, dtype=self.dtype)
        place: Any = found.reshape(-1).view(torch.uint8).numpy()
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            got = stream.readinto(place)
        if got != self.end - self.start:
            raise _broken(self.file, "it is truncated")
        return found


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of a live model."""

    value: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Its number format."""
        return self.value.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.value.shape)

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return self.value.numel()

    def read(self) -> torch.Tensor:
        """The tensor itself, on the CPU; never write to it."""
        return self.value.detach().cpu()


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, and a config as plain data: those of a folder, or of a live model."""

    name: str  # of the folder or the model, in errors
    config: Mapping[str, Any]
    stored: Mapping[str, Stored | Held]

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Read the headers of a folder's safetensors; refuse what is missing or broken."""
        folder = user_path(folder)
        if not folder.is_dir():
            raise HeadwiseError(f"{folder} is not a folder; give one with config.json and weights.")
        check_folder(folder)
        return cls(name=str(folder), config=_config(folder), stored=_tensors(folder))

    @classmethod
    def of_model(cls, model: Any, name: str) -> Checkpoint:
        """The tensors of a live model, each once, by the names that save_pretrained gives them."""
        state, tied = model.state_dict(), model.all_tied_weights_keys
        away = [n for n, t in state.items() if t.is_meta]
        if away:
            raise HeadwiseError(
                f"the weights of {name} must be in memory, but {away[0]} is offloaded; load the "
                "model without offloading."
            )
        copies = {n for n, first in tied.items() if state[n].data_ptr() == state[first].data_ptr()}
        held = {n: Held(t) for n, t in state.items() if n not in copies}
        return cls(name=name, config=model.config.to_dict(), stored=held)

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor's name, in file order."""
        return tuple(self.stored)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as stored, bit for bit; NaN or infinity in it is an error."""
        if name not in self.stored:
            raise HeadwiseError(
                f"{self.name} has no tensor {name!r}. {did_you_mean(name, self.stored)}"
            )
        found = self.stored[name].read()
        if found.is_floating_point() and found.numel():
            low, high = (found.float() if found.itemsize == 1 else found).aminmax()
            if not (math.isfinite(low) and math.isfinite(high)):
                raise HeadwiseError(
                    f"{name} in {self.name} holds NaN or infinity; such a model is broken: "
                    "download it again, or repair it."
                )
        return found

    @cached_property
    def tied_copies(self) -> frozenset[str]:
        """Names that only repeat another tensor, though the config ties the two."""
        headwise = self.config.get("model_type") == "headwise"
        config = self.config["backbone"] if headwise else self.config
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
            and torch.equal(self.stored[name].read(), self.stored[original].read())
        )


def fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The SHA-256 of tensors: names, number formats, shapes and bytes, in the order given."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        plain: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(plain)
    return digest.hexdigest()


def header(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors and the metadata of one safetensors file, checked against its size."""
    try:
        if not file.is_file():
            raise HeadwiseError(f"{file} must be a file, but it is a folder, a device or a pipe.")
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER):
                raise _broken(file, "it ends before its header does")
            data = json.loads(stream.read(length), object_pairs_hook=without_repeats)
        metadata = data.pop("__metadata__", {})
        stored = {name: _stored(file, entry, 8 + length) for name, entry in data.items()}
    except OSError as error:
        raise HeadwiseError(f"{file} cannot be read ({error.strerror or error}).") from error
    except _MALFORMED as error:
        raise _broken(file, f"its header cannot be read: {reason_of(error)}") from error
    end = 8 + length
    for one in sorted(stored.values(), key=lambda s: (s.start, s.end)):
        if one.start != end or one.end - one.start != one.numel * one.dtype.itemsize:
            raise _broken(file, "its tensors are not where its header says")
        end = one.end
    if end != size:
        raise _broken(file, f"its header describes {end} bytes and it has {size}")
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
    shape = tuple(entry["shape"])
    if not all(type(n) is int and n >= 0 for n in (start, end, *shape)):
        raise ValueError(f"sizes must be whole numbers, got {quoted(entry)}")
    return Stored(file, DTYPES[entry["dtype"]], shape, offset + start, offset + end)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        raise HeadwiseError(
            f"{folder} has no config.json; give a Hugging Face folder with config.json and weights."
        )
    check_file(path, most=MOST_CONFIG, advice="download it again, or repair it")
    data = read_json(path, advice="download it again, or repair it")
    if not isinstance(data, dict):
        raise HeadwiseError(f"{path} must hold a JSON object; download it again, or repair it.")
    return data


def _tensors(folder: Path) -> dict[str, Stored]:
    """The tensors of the single weight file, or of those that an index names."""
    index = folder / INDEX
    if not index.exists():
        if (folder / WEIGHTS).exists():
            return header(folder / WEIGHTS)[0]
        refuse_pickles(folder)
        raise HeadwiseError(f"{folder} has neither {WEIGHTS} nor {INDEX}; only those are read.")
    data = read_json(index, advice="download it again")
    shards = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise HeadwiseError(f"{index} must map every tensor to its file; download it again.")
    found: dict[str, Stored] = {}
    for name in sorted(set(shards.values())):
        if Path(name).name != name:
            raise HeadwiseError(
                f"{index} names {quoted(name)}, which is not a file in its folder; download it "
                "again."
            )
        check_file(folder / name, most=MOST_WEIGHTS, advice=f"{INDEX} names it: download it")
        found |= header(folder / name)[0]
    for name in sorted(found.keys() | shards.keys()):
        if name not in shards:
            raise HeadwiseError(
                f"{index} does not list {name!r}, which {found[name].file.name} contains; download "
                "it again."
            )
        if name not in found or found[name].file.name != shards[name]:
            raise HeadwiseError(
                f"{index} lists {name!r}, which its shard does not contain; download it again."
            )
    return found


def _broken(file: Path, why: str) -> HeadwiseError:
    return HeadwiseError(
        f"{file} is not a complete safetensors file ({why}); download or make it again."
    )


@dataclass(frozen=True, slots=True)
class _Waiting:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass
class CheckpointWriter:
    """Streams tensors into sharded safetensors; use as a context manager, or call `close`."""

    folder: Path
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    _waiting: list[_Waiting] = field(default_factory=list)
    _shards: list[tuple[Path, list[_Waiting]]] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)
    _spool: IO[bytes] | None = None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor, its bytes as they are."""
        assert name not in self._names, name
        if tensor.dtype not in _CODES:
            raise HeadwiseError(f"{name} has the dtype {tensor.dtype}, which cannot be saved.")
        size = tensor.numel() * tensor.itemsize
        start = self._spooled
        if self._waiting and start + size > self.max_shard_bytes:
            self._finish_shard()
            start = 0
        if self._spool is None:
            self._spool = self._spool_path.open("wb")
        self._spool.write(_bytes(tensor))
        self._waiting.append(_Waiting(name, tensor.dtype, tuple(tensor.shape), start, size))
        self._names.add(name)

    def close(self) -> None:
        """Write the last shard, give the shards their names, and write the index."""
        if self._waiting or not self._shards:
            self._finish_shard()
        n = len(self._shards)
        weight_map: dict[str, str] = {}
        for i, (path, tensors) in enumerate(self._shards, start=1):
            name = WEIGHTS if n == 1 else f"model-{i:05d}-of-{n:05d}.safetensors"
            path.rename(self.folder / name)
            weight_map |= {t.name: name for t in tensors}
        if n > 1:
            total = sum(t.size for _, tensors in self._shards for t in tensors)
            index = {
                "metadata": {"total_size": total},
                "weight_map": dict(sorted(weight_map.items())),
            }
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif self._spool is not None:
            with contextlib.suppress(OSError):
                self._spool.close()

    @property
    def _spooled(self) -> int:
        return self._waiting[-1].start + self._waiting[-1].size if self._waiting else 0

    @property
    def _spool_path(self) -> Path:
        return self.folder / "spool"

    def _finish_shard(self) -> None:
        if self._spool is not None:
            self._spool.close()
            self._spool = None
        tensors = sorted(self._waiting, key=lambda t: (-t.dtype.itemsize, t.name))
        path = self.folder / f"shard-{len(self._shards):05d}"
        with path.open("wb") as target:
            target.write(_header(tensors))
            if tensors:
                with self._spool_path.open("rb") as source:
                    for t in tensors:
                        _copy(source, target, t)
                self._spool_path.unlink()
        self._shards.append((path, tensors))
        self._waiting = []


def _header(tensors: list[_Waiting]) -> bytes:
    """The start of a safetensors file that holds `tensors` in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in tensors:
        entries[t.name] = {
            "dtype": _CODES[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [end, end + t.size],
        }
        end += t.size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _copy(source: IO[bytes], target: IO[bytes], tensor: _Waiting) -> None:
    source.seek(tensor.start)
    left = tensor.size
    while left:
        piece = source.read(min(left, _PIECE))
        assert piece
        target.write(piece)
        left -= len(piece)
