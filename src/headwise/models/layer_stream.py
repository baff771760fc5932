"""A stock model run layer by layer, each layer's weights read when needed.

    checkpoint ──► embeddings, norms, head          (in memory)
               └─► layer 0 ─► layer 1 ─► …          (one at a time)

The model is built without memory for its weights. A stand-in replaces each layer and records
the arguments of its call (masks, rotary positions; they can differ between layers), so the
family's own code runs around the layers. Memory does not grow with the number of layers.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers.initialization import no_init_weights

from headwise.models.backbones_headwise import (
    TENSOR_PLACES,
    Projections,
    base_of,
    family_of,
    layer_projections,
    replace_in_layer,
    rotary_planes,
)
from headwise.models.checkpoint import Checkpoint
from headwise.models.configuration_headwise import planned_layers
from headwise.models.shapes import plan_errors, stock_class
from headwise.plan import LayerPlan

Batch = Mapping[str, torch.Tensor]


class LayerStream:
    """The layers of a checkpoint, and the arguments of each call for each of `batches`.

    `config` is the checkpoint's stock config, `names` are its names of the weights that the model
    of `task` has. `dtype` (default: as stored) and `device` are where the layers run.
    `headwise.source.Source.layers` makes one.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: Any,
        task: str,
        names: Mapping[str, str],
        batches: Sequence[Batch],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        attn_implementation: str | None = None,
    ) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, torch.device(device)
        self.config, self.task, self.names = copy.deepcopy(config), task, names
        with plan_errors():
            self.family = family_of(self.config.model_type)
        if attn_implementation is not None:
            self.config._attn_implementation = attn_implementation
        # Buffers (rotary frequencies, position numbers) are not in checkpoints: they are made.
        with init_empty_weights(include_buffers=False), no_init_weights():
            self.model = stock_class(self.config, self.task)(self.config).eval()
        self.planes = rotary_planes(self.model)
        base = base_of(self.model)
        prefix = next((f"{n}." for n, m in self.model.named_modules() if m is base and n), "")
        self.prefix = f"{prefix}{self.family.layers}"
        self._stock: list[nn.Module] = list(base.get_submodule(self.family.layers))
        self._stand_ins = [_StandIn(layer) for layer in self._stock]
        base.set_submodule(self.family.layers, nn.ModuleList(self._stand_ins))
        self._load_around()
        self.batches = [{n: self._placed(t) for n, t in batch.items()} for batch in batches]
        self._calls: list[list[Any]] = []
        self.first: list[torch.Tensor] = []  # the inputs of layer 0, batch by batch
        self._record()

    def __len__(self) -> int:
        return len(self._stock)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def load(self, i: int) -> nn.Module:
        """The stock layer `i` with its weights; keep no more of them than needed."""
        layer = self._empty(i)
        state = {n: self._tensor(f"{self.prefix}.{i}.{n}") for n in layer.state_dict()}
        layer.load_state_dict(state, assign=True)
        return layer.eval().requires_grad_(False)

    def planned(self, i: int, plan: LayerPlan, projections: Projections) -> nn.Module:
        """Layer `i` as planned with these projections, the rest as stored.

        An MLP that is as wide as stored need not be among them. The plan's scales and rotary
        planes must be explicit (`headwise.models.build.resolved`).
        """
        layer = self._empty(i)
        with plan_errors(), torch.device("meta"):
            (planned,) = planned_layers({"layers": [plan.to_dict()]})
            replace_in_layer(layer, planned, config=self.config, layer_idx=i, planes=self.planes)
        given = {n: self._placed(t) for n, t in self.planned_state(projections).items()}
        state = {
            n: given[n] if n in given else self._tensor(f"{self.prefix}.{i}.{n}")
            for n in layer.state_dict()
        }
        layer.load_state_dict(state, assign=True)
        return layer.eval().requires_grad_(False)

    def planned_state(self, projections: Projections) -> dict[str, torch.Tensor]:
        """Projections by their names in a planned layer; those of an MLP if they are there."""
        state = {
            f"{self.family.attention}.{TENSOR_PLACES[name]}": tensor
            for name, tensor in projections.tensors().items()
            if name in TENSOR_PLACES
        }
        if "down" in projections.by_side:
            state |= self.family.mlp.written(projections)
        return state

    def projections(self, layer: nn.Module) -> Projections:
        """The four projections of a stock layer."""
        return layer_projections(layer, self.config)

    def run(self, layer: nn.Module, i: int, hidden: torch.Tensor, batch: int = 0) -> torch.Tensor:
        """The output of a layer at place `i` for `hidden`, in the surroundings of a batch."""
        args, kwargs = self._calls[batch][i]
        output = layer(hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    def outputs(self, hidden: torch.Tensor, batch: int = 0) -> Any:
        """The model's output if `hidden` is the output of its last layer: logits or states."""
        last = self._stand_ins[-1]
        last.answer = hidden
        try:
            return self.model(**self.batches[batch], **self._no_cache())
        finally:
            last.answer = None
            for stand_in in self._stand_ins:
                stand_in.called = None

    def _empty(self, i: int) -> nn.Module:
        # The config stays shared: the attention implementation is read from it.
        return copy.deepcopy(self._stock[i], {id(self.config): self.config})

    def _tensor(self, name: str) -> torch.Tensor:
        return self._placed(self.checkpoint.tensor(self.names[name]))

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

    def _load_around(self) -> None:
        """Everything but the layers."""
        wanted = dict(self.model.state_dict())
        state = {n: self._tensor(n) for n in wanted if n in self.names}
        for name, empty in wanted.items():
            if name not in state and "pooler" in name:  # not trained here, and not looked at
                state[name] = self._placed(torch.zeros(empty.shape))
        self.model.load_state_dict(state, strict=False, assign=True)
        self.model.tie_weights()
        empty = [name for name, parameter in self.model.named_parameters() if parameter.is_meta]
        assert not empty, empty
        self.model.to(self.device).requires_grad_(False)

    @torch.no_grad()
    def _record(self) -> None:
        pool: dict[Any, list[torch.Tensor]] = {}
        for batch in self.batches:
            base_of(self.model)(**batch, **self._no_cache())
            self.first.append(self._stand_ins[0].called[0])
            calls = [stand_in.called[1:] for stand_in in self._stand_ins]
            self._calls.append(tree_map_only(torch.Tensor, lambda t: _pooled(t, pool), calls))
            for stand_in in self._stand_ins:
                stand_in.called = None

    def _no_cache(self) -> dict[str, bool]:
        return {"use_cache": False} if self.family.causal else {}


class _StandIn(nn.Module):
    """Replaces a layer: records its call and passes its input on, or returns a given output."""

    answer: torch.Tensor | None = None
    called: Any = None

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "stock", stock)  # not a submodule: it has no weights

    def __getattr__(self, name: str) -> Any:
        # The model may ask a layer for its kind of attention.
        return getattr(object.__getattribute__(self, "stock"), name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.called = (hidden_states, args, kwargs)
        return hidden_states if self.answer is None else self.answer


def _pooled(tensor: torch.Tensor, pool: dict[Any, list[torch.Tensor]]) -> torch.Tensor:
    """One tensor for all equal ones: batches of one length share masks and positions."""
    alike = pool.setdefault((tensor.shape, tensor.dtype), [])
    for known in alike:
        if known is tensor or torch.equal(known, tensor):
            return known
    alike.append(tensor)
    return tensor
