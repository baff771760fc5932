"""Measurements that some methods need and no profile has, from one pass over the sequences.

    moments    3.input     d_model × d_model   second moment of what enters W_Q, W_K and W_V
               3.mixed     width × width       of what enters W_O
    gates      3.gates     sequences × heads   ∂loss/∂gate of every query head
    mlps       3.mlp       d_model × d_model   second moment of what enters the MLP
               3.neurons   I × I               of what enters W_down
    spread     3.mixed_mean, mixed_variance    of what enters W_O
               3.neurons_mean, …_variance      of what enters W_down
    influence  3.influence                     1 − mean cosine of the layer's input and output
    taylor     3.taylor_heads, taylor_neurons  Σ|w · ∂loss/∂w| of every head group and neuron

Gates and Taylor sums take a backward pass too. Moments of neurons are kept in float32: they are as
wide as the MLP.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.models.attention_headwise import PROJECTIONS
from headwise.models.backbones_headwise import Mlp, family_of, projections_of, stock_attentions
from headwise.models.build import inner, plan_of
from headwise.profiling.source import probe
from headwise.progress import Progress, silent

Measure = Literal["moments", "gates", "mlps", "spread", "influence", "taylor"]
MEASURES: tuple[Measure, ...] = ("moments", "gates", "mlps", "spread", "influence", "taylor")
_FIRST: dict[Measure, str] = {  # by which a measure is known to be there
    "moments": "0.input",
    "gates": "0.gates",
    "mlps": "0.neurons",
    "spread": "0.neurons_variance",
    "influence": "0.influence",
    "taylor": "0.taylor_heads",
}


def missing_measures(
    wanted: Collection[Measure], known: Mapping[str, np.ndarray]
) -> tuple[Measure, ...]:
    """The wanted measures that are not known yet."""
    return tuple(m for m in MEASURES if m in wanted and _FIRST[m] not in known)


@dataclass
class _Sums:
    """Sums over the batches so far."""

    of: dict[str, Tensor] = field(default_factory=dict)
    gates: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, more: Tensor) -> None:
        more = more.cpu()
        self.of[name] = self.of[name].add_(more) if name in self.of else more

    def moment(self, module: Any, args: tuple[Tensor, ...], *, name: str, exact: bool) -> None:
        rows = args[0].detach().flatten(0, -2).float()
        product = rows.mT @ rows
        self.add(name, product.double() if exact else product)

    def spread(self, module: Any, args: tuple[Tensor, ...], *, name: str) -> None:
        rows = args[0].detach().flatten(0, -2).double()
        self.add(f"{name}_mean", rows.sum(0))
        self.add(f"{name}_square", rows.square().sum(0))

    def influence(self, module: Any, args: Any, output: Any, *, name: str) -> None:
        after = output[0] if isinstance(output, tuple) else output
        cosine = torch.cosine_similarity(args[0].detach().float(), after.detach().float(), dim=-1)
        self.add(name, (1.0 - cosine.double()).sum())

    def mixed(self, module: Any, args: tuple[Tensor, ...], *, name: str, heads: int) -> None:
        z = args[0]
        z.register_hook(partial(self.gate, z.detach(), name, heads))

    def gate(self, z: Tensor, name: str, heads: int, gradient: Tensor) -> None:
        by_head = (z * gradient).double().unflatten(-1, (heads, -1)).sum((1, -1))
        self.gates.setdefault(name, []).append(by_head.cpu())


def measurements(
    model: Any,
    ids: Tensor,
    wanted: Collection[Measure],
    *,
    batch: int = 4,
    progress: Progress = silent,
) -> dict[str, np.ndarray]:
    """The wanted measurements, sums as means per token; `model` is a causal headwise model."""
    sums, rows = _Sums(), list(torch.split(ids, batch))
    backward = "gates" in wanted or "taylor" in wanted
    with ExitStack() as undo:
        undo.enter_context(torch.set_grad_enabled(backward))
        _listen(model, sums, wanted, undo)
        for done, some in enumerate(rows):
            progress("measuring", done, len(rows))
            part = probe("next-token", some.to(model.device), tuple(range(len(some))), seed=0)
            losses, _ = part.losses(model(input_ids=part.inputs, use_cache=False))
            if not bool(torch.isfinite(losses).all()):
                raise HeadwiseError(
                    "the model's loss on the calibration text must be finite, got NaN or infinity; "
                    "check its weights, or give another text."
                )
            if backward:
                losses.sum().backward()
        found = {name: np.asarray((s / ids.numel()).numpy()) for name, s in sums.of.items()}
        if "taylor" in wanted:
            found |= _taylor(model)
    for name in [name for name in found if name.endswith("_square")]:
        stem = name.removesuffix("_square")
        variance = found.pop(name) - np.square(found[f"{stem}_mean"])
        found[f"{stem}_variance"] = variance.clip(min=0.0)
    return found | {name: torch.cat(parts).numpy() for name, parts in sums.gates.items()}


def _listen(model: Any, sums: _Sums, wanted: Collection[Measure], undo: ExitStack) -> None:
    model.requires_grad_(False)
    if "gates" in wanted or "taylor" in wanted:
        embeddings = model.get_input_embeddings()
        undo.callback(embeddings.register_forward_hook(_start_of_gradients).remove)
    stock = inner(model)
    mlp = family_of(stock.config.model_type).mlp
    for i, (layer, attention) in enumerate(stock_attentions(stock)):
        down, up = layer.get_submodule(mlp.down), layer.get_submodule(mlp.sides["up"])

        def listen(module: Any, hook: Callable[..., None], **how: Any) -> None:
            undo.callback(module.register_forward_pre_hook(partial(hook, **how)).remove)

        if "moments" in wanted:
            listen(attention.q_proj, sums.moment, name=f"{i}.input", exact=True)
            listen(attention.o_proj, sums.moment, name=f"{i}.mixed", exact=True)
        if "mlps" in wanted:
            listen(up, sums.moment, name=f"{i}.mlp", exact=True)
            listen(down, sums.moment, name=f"{i}.neurons", exact=False)
        if "spread" in wanted:
            listen(attention.o_proj, sums.spread, name=f"{i}.mixed")
            listen(down, sums.spread, name=f"{i}.neurons")
        if "influence" in wanted:
            hook = partial(sums.influence, name=f"{i}.influence")
            undo.callback(layer.register_forward_hook(hook).remove)
        if "gates" in wanted:
            heads = sum(c.n_heads * c.queries for c in attention.classes)
            listen(attention.o_proj, sums.mixed, name=f"{i}.gates", heads=heads)
        if "taylor" in wanted:
            for module in _weighed(layer, attention, mlp):
                module.weight.requires_grad_()
                undo.callback(_forget_gradient, module.weight)


def _weighed(layer: Any, attention: Any, mlp: Mlp) -> list[Any]:
    """The modules of a layer whose weights the Taylor sums are of."""
    own = [getattr(attention, name, None) for name in PROJECTIONS.values()]
    return [m for m in (*own, *map(layer.get_submodule, mlp.paths)) if m is not None]


def _forget_gradient(weight: Tensor) -> None:
    weight.requires_grad_(False)
    weight.grad = None


def _taylor(model: Any) -> dict[str, np.ndarray]:
    """Σ|w · ∂loss/∂w| over the weights of every head group and of every neuron."""
    stock, plan, found = inner(model), plan_of(model), {}
    mlp = family_of(stock.config.model_type).mlp
    for i, (layer, attention) in enumerate(stock_attentions(stock)):
        with torch.no_grad():
            sides = {
                s: _salience(getattr(attention, PROJECTIONS[s]))
                for s, _ in projections_of(attention).items()
            }
            paths = {f"{path}.weight": _salience(layer.get_submodule(path)) for path in mlp.paths}
        neurons = sum(
            p.weight.sum(0 if side == "down" else 1) for side, p in mlp.read(paths).items()
        )
        heads, ends = [], dict.fromkeys(PROJECTIONS, 0)
        for head in plan.layers[i].heads:
            widths = {"query": head.queries * head.qk_dim, "key": head.qk_dim}
            widths |= {"value": head.vo_dim, "output": head.queries * head.vo_dim}
            total = 0.0
            for side, salience in sides.items():
                mine = slice(ends[side], ends[side] + widths[side])
                ends[side] = mine.stop
                total += float((salience[:, mine] if side == "output" else salience[mine]).sum())
            heads.append(total)
        found[f"{i}.taylor_heads"] = np.array(heads)
        found[f"{i}.taylor_neurons"] = torch.as_tensor(neurons).double().cpu().numpy()
    return found


def _salience(module: Any) -> Tensor:
    weight = module.weight
    found: Tensor = (weight.detach() * weight.grad).abs()
    return found


def _start_of_gradients(module: Any, args: Any, output: Tensor) -> Tensor:
    """No weight before it asks for a gradient, so the embedding is where they begin."""
    return output.detach().requires_grad_()
