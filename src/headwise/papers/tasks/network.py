"""A small network for the synthetic tasks: one or a few layers of mixed heads, all else optional.

    inputs ─ embedding (+ positions) ─┬─ attention ─ + ─┬─ MLP ─ + ─ … ─ readout
                                      └──── skip ───────┘──────┘

The attention is the same `HeadwiseAttention` that language models use, built from the same plan.
Everything around it can be switched off, because each part can do the attention's work: a skip
delivers lag 0 for free, an MLP adds the nonlinearity that values lack, learned positions give each
head an arbitrary pattern. Without MLPs it is an attention-only model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from headwise.errors import PlanError, did_you_mean
from headwise.models.attention_headwise import HeadwiseAttention, Surroundings
from headwise.models.build import resolved
from headwise.models.configuration_headwise import Layer, planned_layers
from headwise.plan import Bias, HeadSpec, LayerPlan, ModelShape, Plan

POSITIONS = ("learned", "rotary", "none")
# Task sequences are short: with the usual 10 000 only the first plane would rotate noticeably.
ROTARY_BASE = 100.0


@runtime_checkable
class TaskSizes(Protocol):
    """What a network must know of its task; every `SyntheticTask` has it."""

    @property
    def length(self) -> int:
        """Tokens per sequence."""

    @property
    def continuous(self) -> bool:
        """Whether tokens are vectors rather than ids."""

    @property
    def n_inputs(self) -> int:
        """Width of the input vectors, or size of the vocabulary."""

    @property
    def n_outputs(self) -> int:
        """Numbers to predict at each position."""


@dataclass(frozen=True, slots=True)
class FixedSizes:
    """Sizes without a task: next-token prediction, or a layer that is only looked at."""

    length: int
    n_inputs: int
    n_outputs: int
    continuous: bool = False


@dataclass(slots=True)
class _Implementation:
    """The one thing that attention reads from a config; "eager" is for looking at the weights."""

    _attn_implementation: str = "sdpa"


EAGER = _Implementation("eager")


class TaskNetwork(nn.Module):
    """Embedding, the plan's attention layers, readout; the same seed gives the same weights.

    positions: "learned" adds a vector per position to the embedding; "rotary" rotates queries and
    keys (relative positions; a head that attends by position alone needs query and key biases);
    "none" leaves the causal mask as the only trace of order.
    """

    def __init__(
        self,
        plan: Plan,
        task: TaskSizes,
        *,
        mlp: bool = False,
        positions: str = "learned",
        skip: bool = True,
        norm: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check(plan, task, positions)
        self.causal = plan.shape.causal
        self.implementation = _Implementation()
        self.rotary_planes = plan.shape.qk_dim // 2 if positions == "rotary" else 0
        d_model = plan.shape.d_model
        # torch's linear layers start uniform in ±1/√d_model, a spread of 1/√(3·d_model).
        stated = resolved(plan, init_std=(3 * d_model) ** -0.5, rotary_planes=self.rotary_planes)
        layers = planned_layers(stated.to_dict())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if task.continuous:
                self.embedding: nn.Module = nn.Linear(task.n_inputs, d_model, bias=False)
            else:
                self.embedding = nn.Embedding(task.n_inputs, d_model)
            self.positions = (
                nn.Parameter(torch.randn(plan.shape.context, d_model))
                if positions == "learned"
                else None
            )
            self.blocks = nn.ModuleList(
                _Block(
                    self._attention(layer, d_model, i),
                    d_model,
                    (plan.ffn_dims[i] or 4 * d_model) if mlp else 0,
                    skip=skip,
                    norm=norm,
                )
                for i, layer in enumerate(layers)
            )
            self.norm = nn.LayerNorm(d_model) if norm else nn.Identity()
            self.readout = nn.Linear(d_model, task.n_outputs)

    def forward(
        self, inputs: Shaped[Tensor, "batch length *width"]
    ) -> Float[Tensor, "batch length outputs"]:
        """The prediction at every position: vectors, or the logits of classes."""
        outputs, _ = self._run(inputs)
        return outputs

    @torch.no_grad()
    def attention_weights(
        self, inputs: Shaped[Tensor, "batch length *width"]
    ) -> tuple[Float[Tensor, "batch heads length length"], ...]:
        """Where every query head of every layer looks."""
        before = self.implementation._attn_implementation
        self.implementation._attn_implementation = "eager"
        try:
            _, weights = self._run(inputs)
        finally:
            self.implementation._attn_implementation = before
        return tuple(w for w in weights if w is not None)

    def _run(self, inputs: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        length = inputs.shape[1]
        x = self.embedding(inputs)
        if self.positions is not None:
            x = x + self.positions[:length]
        rotations = _rotations(x, self.rotary_planes) if self.rotary_planes else None
        mask = None
        if self.causal and self.implementation._attn_implementation == "eager":
            # Fused attention makes its own causal mask; eager attention must be given one.
            mask = x.new_full((length, length), -math.inf).triu(1)
        weights: list[Tensor | None] = []
        for block in self.blocks:
            x, seen = block(x, mask, rotations)
            weights.append(seen)
        return self.readout(self.norm(x)), weights

    def _attention(self, layer: Layer, d_model: int, index: int) -> HeadwiseAttention:
        around = Surroundings(
            config=self.implementation,
            d_model=d_model,
            layer_idx=index,
            is_causal=self.causal,
            rotary_planes=self.rotary_planes,
        )
        return HeadwiseAttention(layer, around)


class _Block(nn.Module):
    """Attention and, if wanted, an MLP, each with its norm before and its skip around it."""

    def __init__(
        self, attention: HeadwiseAttention, width: int, hidden: int, *, skip: bool, norm: bool
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.skip = skip
        self.mlp: nn.Module | None = None
        if hidden:
            self.mlp = nn.Sequential(
                nn.LayerNorm(width) if norm else nn.Identity(),
                nn.Linear(width, hidden),
                nn.GELU(),
                nn.Linear(hidden, width),
            )

    def forward(
        self, x: Tensor, mask: Tensor | None, rotations: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:
        mixed, weights = self.attention(
            self.attention_norm(x), attention_mask=mask, position_embeddings=rotations
        )
        x = x + mixed if self.skip else mixed
        if self.mlp is not None:
            x = x + self.mlp(x) if self.skip else self.mlp(x)
        return x, weights


def task_plan(
    heads: Sequence[HeadSpec],
    d_model: int,
    context: int,
    *,
    n_layers: int = 1,
    biases: tuple[Bias, ...] = (),
    causal: bool = True,
) -> Plan:
    """A plan whose layers all have these heads, for networks without a stock counterpart."""
    shape = ModelShape(
        n_layers=n_layers,
        d_model=d_model,
        context=context,
        n_heads=len(heads),
        n_kv_heads=len(heads),
        qk_dim=max(h.qk_dim for h in heads),
        vo_dim=max(h.vo_dim for h in heads),
        attention_biases=biases,
        causal=causal,
    )
    layer = LayerPlan(heads=tuple(heads), biases=biases)
    return Plan(shape=shape, layers=(layer,) * n_layers)


def _check(plan: Plan, task: TaskSizes, positions: str) -> None:
    if positions not in POSITIONS:
        raise PlanError(
            f"Expected known positions, got {positions!r}. {did_you_mean(positions, POSITIONS)}"
        )
    if plan.shape.context < task.length:
        raise PlanError(
            f"Expected a plan with a context of at least the task's {task.length} tokens, got "
            f"{plan.shape.context}; plan for a longer context or shorten the task."
        )
    if any(plan.shape.windows):
        raise PlanError("Expected a plan without sliding windows; leave windows empty.")


def _rotations(x: Tensor, planes: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position's angle in every plane, both halves of the planes."""
    places = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
    steps = torch.arange(planes, device=x.device, dtype=torch.float32) / planes
    angles = (places[:, None] * ROTARY_BASE**-steps).repeat(1, 2)[None]
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
