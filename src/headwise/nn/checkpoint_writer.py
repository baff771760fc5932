"""A checkpoint written one tensor at a time, in memory for one tensor.

    put ─► spool (bytes as they come) ─ full ─► header + bytes, sorted ─► model-0000k-of-n
                                                                          index at the end

A safetensors file starts with a header that knows every tensor, so bytes wait on disk until their
shard is complete. Within a shard wide numbers stand before narrow ones, which keeps each tensor
aligned to its own size. Write into an `artifacts.atomic_folder`: until `close` the folder is not a
checkpoint.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from headwise.errors import HeadwiseError
from headwise.nn.checkpoint import DTYPES, INDEX, WEIGHTS

DEFAULT_SHARD_BYTES = 2 * 2**30
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_PIECE = 16 * 2**20


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
            raise HeadwiseError(f"{name} has numbers of kind {tensor.dtype}, which are not saved.")
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
