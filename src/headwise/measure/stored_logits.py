"""A model's predictions on a text, on disk: how two models are compared where one fits in memory.

reference ─► logits of every group of windows ─► file ─┐
(freed)                                                ├─► the same comparison, the same numbers
model ─────► logits, group by group ───────────────────┘
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Integer

from headwise.errors import HeadwiseError
from headwise.measure.likelihood import (
    Window,
    batched_windows,
    check_vocabulary,
    check_windows,
    last_logits,
    sliding_windows,
    windows_at_once,
)
from headwise.memory import size

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(slots=True)
class StoredLogits:
    """The logits of a text's groups of windows, to be read once, in the order they were written."""

    file: Path
    at_once: int  # windows in a group
    _shapes: list[tuple[int, ...]] = field(default_factory=list)
    _read: int = 0  # bytes so far

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        stream: Integer[np.ndarray, " n"],
        file: Path,
        *,
        window: int,
        stride: int | None = None,
    ) -> StoredLogits:
        """Run a model over a text and keep its logits, in float32."""
        import torch

        stride = window if stride is None else stride
        check_windows(stream, window, stride)
        check_vocabulary(model, stream)
        vocabulary: int = model.config.get_text_config().vocab_size
        _check_space(file, 4 * vocabulary * len(stream) * max(1, window // stride))
        found = cls(file, groups_at_once(model, window))
        with file.open("wb") as target, torch.inference_mode():
            for group in groups(len(stream) - 1, window, stride, found.at_once):
                inputs = torch.from_numpy(rows_of(stream, group))[:, :-1]
                logits = last_logits(model, inputs.to(model.device), longest(group))
                numbers = logits.float().cpu().numpy()
                found._shapes.append(numbers.shape)
                target.write(np.ascontiguousarray(numbers).data)
        return found

    def next(self) -> torch.Tensor:
        """The logits of the next group."""
        import torch

        shape = self._shapes.pop(0)
        count = int(np.prod(shape))
        numbers = np.fromfile(self.file, np.float32, count, offset=self._read)
        self._read += numbers.nbytes
        if not self._shapes:
            self.file.unlink()
        return torch.from_numpy(numbers.reshape(shape))


def groups(n_tokens: int, window: int, stride: int, at_once: int) -> Iterator[list[Window]]:
    """The windows of a text, some of them together."""
    return batched_windows(sliding_windows(n_tokens, window, stride), at_once)


def groups_at_once(model: PreTrainedModel, window: int) -> int:
    """How many windows run together when there are logits of two models."""
    return max(1, windows_at_once(model, window) // 2)


def rows_of(
    stream: Integer[np.ndarray, " n"], group: list[Window]
) -> Integer[np.ndarray, "rows length"]:
    """The tokens of windows of one length, each with the token after its last."""
    return np.stack([stream[w.start : w.end + 1] for w in group]).astype(np.int64)


def longest(group: list[Window]) -> int:
    """How many of a group's last positions are scored."""
    return max(w.end + 1 - w.scored_from for w in group)


def _check_space(file: Path, wanted: int) -> None:
    left = shutil.disk_usage(file.parent).free
    if wanted > left:
        raise HeadwiseError(
            f"there is memory for one of the two models only, and the predictions of the other "
            f"need {size(wanted)} in {file.parent}, where {size(left)} are left; use fewer "
            "--tokens, or free space."
        )
