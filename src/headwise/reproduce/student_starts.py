"""The weights that narrow students of a head begin with: the best of its own, or random ones."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from headwise.nn.resolve import spread_planes
from headwise.plan import HeadSpec
from headwise.planning.worth_curves import most_valuable
from headwise.profile.factor import value_basis
from headwise.reproduce.head_student import Imitation, Lesson, Start

_VALUES = ("value", "output")


def truncated(teacher: Imitation, shown: Lesson, width: int) -> Start:
    """The strongest planes and the whitened value directions of the teacher, `width` of each."""
    spec = teacher.spec
    seen = _seen(teacher, shown)
    half, g, vo = spec.qk_dim // 2, spec.queries, spec.vo_dim
    power = {
        name: seen[name].double().square().reshape(-1, 2, half).sum((0, 1)) for name in ("q", "k")
    }
    places = most_valuable((power["q"] * power["k"]).numpy(), width // 2)
    columns = [*places, *(half + p for p in places)]
    z = seen["z"].double().reshape(-1, vo)
    matrices = {side: w.double() for side, w in teacher.weights()[0].items()}
    W_O = matrices["output"].unflatten(1, (g, vo))  # d_model × queries × vo
    basis = value_basis((z.mT @ z / len(z)).numpy(), W_O.permute(2, 1, 0).flatten(1).numpy())
    encode = torch.from_numpy(basis.encode[:, :width].copy())
    decode = torch.from_numpy(basis.decode[:width].copy())
    made = {
        "query": matrices["query"].unflatten(0, (g, spec.qk_dim))[:, columns].flatten(0, 1),
        "key": matrices["key"][columns],
        "value": encode.mT @ matrices["value"],
        "output": (W_O @ decode.mT).flatten(1),
    }
    return Start(_narrowed(spec, width, places), ({s: w.float() for s, w in made.items()}, {}))


def random(teacher: Imitation, width: int, seed: int) -> Start:
    """Random projections as large as the teacher's, on planes spread over all frequencies."""
    generator = torch.Generator().manual_seed(seed)
    spec, made = teacher.spec, {}
    for side, matrix in teacher.weights()[0].items():
        axis = 1 if side == "output" else 0
        shape = list(matrix.shape)
        shape[axis] = shape[axis] * width // (spec.vo_dim if side in _VALUES else spec.qk_dim)
        made[side] = torch.randn(shape, generator=generator) * matrix.square().mean().sqrt()
    places = list(spread_planes(width // 2, spec.qk_dim // 2))
    return Start(_narrowed(spec, width, places), (made, {}))


def _seen(teacher: Imitation, shown: Lesson) -> dict[str, Tensor]:
    """Queries and keys before their rotation, and what enters the output projection."""
    found: dict[str, list[Tensor]] = {"q": [], "k": [], "z": []}
    attention: Any = teacher.attention
    with ExitStack() as undo:
        for name in ("q", "k"):
            module = getattr(attention, f"{name}_proj")
            keep = found[name]
            undo.callback(
                module.register_forward_hook(lambda m, a, out, keep=keep: keep.append(out)).remove
            )
        undo.callback(
            attention.o_proj.register_forward_pre_hook(
                lambda m, args: found["z"].append(args[0])
            ).remove
        )
        with torch.no_grad():
            for rows in shown.hidden.split(4):
                teacher(rows)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _narrowed(spec: HeadSpec, width: int, places: list[int]) -> HeadSpec:
    planes = spec.rotary_planes or ()
    change = {
        "qk_dim": width,
        "vo_dim": width,
        "rotary_planes": tuple(planes[p] for p in places),
    }
    return spec.model_copy(update=change)
