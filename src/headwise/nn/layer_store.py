"""Finished layers of long work, one whole file each, so that a killed run can go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headwise.artifacts import atomic_file
from headwise.errors import HeadwiseError
from headwise.nn.checkpoint import header, read


@dataclass(frozen=True)
class LayerStore:
    """Layers by number. Those made under another `key` (other settings) count as not there."""

    folder: Path
    key: str = ""

    def put(
        self,
        layer_index: int,
        tensors: Mapping[str, torch.Tensor],
        record: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a layer, whole or not at all, with a JSON-ready record beside it."""
        metadata = {"key": self.key, "record": json.dumps(dict(record or {}))}
        # Copies, because safetensors refuses views of one memory.
        own = {n: t.detach().cpu().clone().contiguous() for n, t in tensors.items()}
        with atomic_file(self._path(layer_index), force=True) as temporary:
            save_file(own, temporary, metadata=metadata)

    def has(self, layer_index: int) -> bool:
        """Whether the layer is there, whole and made under this key."""
        try:
            _, metadata = header(self._path(layer_index))
        except HeadwiseError:
            return False
        return metadata.get("key") == self.key

    def get(self, layer_index: int) -> dict[str, torch.Tensor]:
        """The tensors of a finished layer."""
        stored, _ = header(self._path(layer_index))
        return {name: read(one) for name, one in stored.items()}

    def record(self, layer_index: int) -> dict[str, Any]:
        """What was noted with a finished layer."""
        _, metadata = header(self._path(layer_index))
        found: dict[str, Any] = json.loads(metadata["record"])
        return found

    def _path(self, layer_index: int) -> Path:
        return self.folder / f"layer-{layer_index:05d}.safetensors"
