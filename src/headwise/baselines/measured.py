"""What two of the methods need and no profile has, from one pass over the calibration sequences.

    3.input   d_model × d_model      second moment of what enters W_Q, W_K and W_V of layer 3
    3.mixed   width × width          second moment of what enters W_O
    3.gates   sequences × heads      ∂loss/∂gate of every query head

The first two are for SVD-LLM (a forward pass), the gates for head pruning (a backward pass too).
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.profiling.objectives import probe
from headwise.progress import Progress, silent


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which of the measurements are needed."""

    moments: bool = True
    gates: bool = True

    def __bool__(self) -> bool:
        return self.moments or self.gates

    def covered(self, found: dict[str, np.ndarray]) -> bool:
        """Whether all of it has been found already."""
        return (not self.moments or "0.input" in found) and (not self.gates or "0.gates" in found)


@dataclass
class _Listener:
    """Sums over the batches so far."""

    wanted: Wanted
    sums: dict[str, Tensor] = field(default_factory=dict)
    gates: dict[str, list[Tensor]] = field(default_factory=dict)

    def input(self, module: Any, args: tuple[Tensor, ...], *, name: str) -> None:
        rows = args[0].detach().flatten(0, -2).float()
        moment = (rows.mT @ rows).double().cpu()
        self.sums[name] = self.sums[name] + moment if name in self.sums else moment

    def mixed(self, module: Any, args: tuple[Tensor, ...], *, name: str, heads: int) -> None:
        z = args[0]
        z.register_hook(partial(self.gate, z.detach(), name, heads))

    def gate(self, z: Tensor, name: str, heads: int, gradient: Tensor) -> None:
        by_head = (z * gradient).double().unflatten(-1, (heads, -1)).sum((1, -1))
        self.gates.setdefault(name, []).append(by_head.cpu())


def measurements(
    model: Any,
    ids: Tensor,
    wanted: Wanted,
    *,
    batch: int = 4,
    progress: Progress = silent,
) -> dict[str, np.ndarray]:
    """The sums named above, moments as means per token; `model` is a causal headwise model."""
    listener, rows = _Listener(wanted), list(torch.split(ids, batch))
    with ExitStack() as undo:
        undo.enter_context(torch.set_grad_enabled(wanted.gates))
        _listen(model, listener, undo)
        for done, some in enumerate(rows):
            progress("measuring", done, len(rows))
            part = probe("next-token", some.to(model.device), tuple(range(len(some))), seed=0)
            losses, _ = part.losses(model(input_ids=part.inputs, use_cache=False))
            if not bool(torch.isfinite(losses).all()):
                raise HeadwiseError(
                    "the model's loss on the calibration text must be finite, got NaN or infinity; "
                    "its weights are broken, or give another text."
                )
            if wanted.gates:
                losses.sum().backward()
    found = {name: (s / ids.numel()).numpy() for name, s in listener.sums.items()}
    return found | {name: torch.cat(parts).numpy() for name, parts in listener.gates.items()}


def _listen(model: Any, listener: _Listener, undo: ExitStack) -> None:
    model.requires_grad_(False)
    if listener.wanted.gates:
        embeddings = model.get_input_embeddings()
        undo.callback(embeddings.register_forward_hook(_start_of_gradients).remove)
    for i, attention in enumerate(model.attentions()):
        if listener.wanted.moments:
            for module, name in ((attention.q_proj, "input"), (attention.o_proj, "mixed")):
                hook = partial(listener.input, name=f"{i}.{name}")
                undo.callback(module.register_forward_pre_hook(hook).remove)
        if listener.wanted.gates:
            heads = sum(c.n_heads * c.queries for c in attention.classes)
            hook = partial(listener.mixed, name=f"{i}.gates", heads=heads)
            undo.callback(attention.o_proj.register_forward_pre_hook(hook).remove)


def _start_of_gradients(module: Any, args: Any, output: Tensor) -> Tensor:
    """No weight asks for a gradient, so the embedding is where they begin."""
    return output.detach().requires_grad_()
