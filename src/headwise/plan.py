"""The data that flows through headwise: a model's shape, a plan for its layers, budgets, costs.

    Plan ─┬─ shape    ModelShape: the Transformer around the layers, and its uniform layers
          ├─ layers   LayerPlan × n_layers
          │             ├─ heads    HeadSpec × head groups
          │             └─ ffn_dim  neurons of the MLP
          └─ origin   which command, versions and profile made it

One key/value head with the query heads it serves is a *head group*:

    queries = 1 (MHA)        queries = 3 (GQA)        one group, queries = n (MQA)
    q  q  q  q               q q q   q q q            q q q q q q
    │  │  │  │               └─┼─┘   └─┼─┘            └─┴─┼─┴─┴─┘
    kv kv kv kv                kv      kv                 kv

Everything here is frozen and hashable. Files are JSON with a format version; unknown keys are
refused; equal neighbours are written once with a `repeat` count, so a uniform plan is short.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    computed_field,
    field_serializer,
    field_validator,
    model_validator,
)

from headwise.errors import BudgetError, HeadwiseError, PlanError, quoted
from headwise.records import (
    Frozen,
    encodable,
    expanded,
    first_problem,
    parse_json,
    refuse_many,
    run_lengths,
)

PLAN_FORMAT: Literal["headwise-plan/2"] = "headwise-plan/2"
# Before, layers had no `ffn_dim`: all of them the shape's.
_OLD_FORMAT = "headwise-plan/1"

Projection = Literal["learned", "identity"]
Bias = Literal["query", "key", "value", "output"]
LossUnit = Literal["nats per token", "nats per image", "1 − cosine of embeddings"]
# Far above any model, and small enough that no product of sizes leaves a float.
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 1000  # every verb answers within seconds
MAX_HEADS = 200_000  # head groups in all layers; a typing error must not fill the memory
Count = Annotated[int, Field(strict=True, ge=1, le=MAX_SIZE)]
Amount = Annotated[int, Field(strict=True, ge=0, le=MAX_SIZE)]
Word = Annotated[str, AfterValidator(encodable)]


class ModelShape(Frozen):
    """A Transformer seen from its attention: sizes, the uniform heads it would have, the rest.

    `n_heads`, `n_kv_heads`, `qk_dim` and `vo_dim` describe the dense, uniform model that shares
    ("75%") refer to. `other_params` counts what the named fields do not (a pooler, token types).
    """

    family: Word = "llama"
    n_layers: Count
    d_model: Count
    context: Count
    n_heads: Count
    n_kv_heads: Count
    qk_dim: Count
    vo_dim: Count
    attention_biases: tuple[Bias, ...] = ()
    causal: bool = True
    windows: tuple[Count | None, ...] = ()  # sliding window of each layer; () = none has one
    vocab_size: Amount = 0
    tied_embeddings: bool = True
    lm_head: bool = True
    learned_positions: Amount = 0
    ffn_dim: Amount = 0
    ffn_gated: bool = True
    ffn_biases: bool = False
    norm_biases: bool = False
    norms_per_layer: Amount = 2
    final_norm: bool = True
    other_params: Annotated[int, Field(strict=True, ge=0, le=2**53)] = 0
    kv_dtype_bytes: Count = 2  # of a cached number
    weight_dtype_bytes: Count = 2  # of a weight

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_kv_heads must divide n_heads, got {self.n_kv_heads} and {self.n_heads}"
            )
        if self.n_layers > MAX_LAYERS:
            raise ValueError(f"a plan has at most {MAX_LAYERS} layers, got {self.n_layers}")
        if self.n_layers * self.n_kv_heads > MAX_HEADS:
            raise ValueError(
                f"a plan has at most {MAX_HEADS} key/value heads in all, got {self.n_layers} "
                f"layers of {self.n_kv_heads}"
            )
        if len(set(self.attention_biases)) != len(self.attention_biases):
            raise ValueError(f"attention_biases must not repeat, got {list(self.attention_biases)}")
        if self.windows and len(self.windows) != self.n_layers:
            raise ValueError(
                f"windows must be empty or have one entry per layer ({self.n_layers}), "
                f"got {len(self.windows)}"
            )
        return self

    @property
    def queries(self) -> int:
        """Query heads per key/value head in the uniform model."""
        return self.n_heads // self.n_kv_heads


class HeadSpec(Frozen):
    """One head group: a key/value head and the `queries` query heads that share it.

    `score_scale` multiplies q·k; None leaves it to the builder (1/√qk_dim for a new model, the
    original scale for a cut one). `rotary_planes` are the indices of the rotary planes a cut head
    keeps; None means all planes of its width. `source` is the number of the head group of the
    uncut layer that it was; None means the one at its own place.
    """

    qk_dim: Count
    vo_dim: Count
    queries: Count = 1
    score_scale: Annotated[float, Field(gt=0)] | None = None
    rotary_planes: tuple[Amount, ...] | None = None
    source: Amount | None = None

    @model_validator(mode="after")
    def _planes_fit(self) -> Self:
        planes = self.rotary_planes
        if planes is None:
            return self
        if any(b <= a for a, b in itertools.pairwise(planes)):
            raise ValueError(f"rotary_planes must rise strictly, got {list(planes)}")
        if 2 * len(planes) > self.qk_dim:
            raise ValueError(
                f"{len(planes)} rotary planes need a qk_dim of at least {2 * len(planes)}, "
                f"got {self.qk_dim}"
            )
        return self


class LayerPlan(Frozen):
    """One layer: its head groups, which of their projections are learned, and its MLP's width.

    A layer without head groups has no attention: only its output bias, where it has one. An
    `ffn_dim` of None is the shape's; a `Plan` writes it out.
    """

    heads: tuple[HeadSpec, ...]
    query: Projection = "learned"
    key: Projection = "learned"
    value: Projection = "learned"
    biases: tuple[Bias, ...] = ()
    ffn_dim: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        return expanded(data, "heads")

    @model_validator(mode="after")
    def _identity_has_no_bias(self) -> Self:
        if len(set(self.biases)) != len(self.biases):
            raise ValueError(f"biases must not repeat, got {list(self.biases)}")
        for side in self.identities:
            if side in self.biases:
                raise ValueError(f"an identity {side} projection has no bias, got one in biases")
        sources = self.sources
        if len(set(sources)) != len(sources):
            raise ValueError(f"no two heads have one source, got {list(sources)}")
        return self

    @field_serializer("heads", mode="plain")
    def _pack(self, heads: tuple[HeadSpec, ...]) -> list[dict[str, Any]]:
        return run_lengths(heads)

    @property
    def identities(self) -> tuple[Literal["query", "key", "value"], ...]:
        """The projections that are the identity."""
        return tuple(s for s in ("query", "key", "value") if getattr(self, s) == "identity")

    @property
    def sources(self) -> tuple[int, ...]:
        """For each head group the number it had in the uncut layer."""
        return tuple(j if h.source is None else h.source for j, h in enumerate(self.heads))

    @property
    def by_source(self) -> dict[int, HeadSpec]:
        """The head groups by the number they had in the uncut layer."""
        return dict(zip(self.sources, self.heads, strict=True))

    @property
    def n_queries(self) -> int:
        """Query heads of the layer."""
        return sum(h.queries for h in self.heads)

    @property
    def query_width(self) -> int:
        """Numbers per token in all queries."""
        return sum(h.queries * h.qk_dim for h in self.heads)

    @property
    def key_width(self) -> int:
        """Numbers per token in all keys."""
        return sum(h.qk_dim for h in self.heads)

    @property
    def value_width(self) -> int:
        """Numbers per token in all values."""
        return sum(h.vo_dim for h in self.heads)

    @property
    def output_width(self) -> int:
        """Numbers per token that enter the output projection."""
        return sum(h.queries * h.vo_dim for h in self.heads)


class Origin(Frozen):
    """Where a plan came from, and the loss that its profile predicts."""

    command: Word = ""
    policy: Word = ""
    versions: tuple[tuple[Word, Word], ...] = ()
    profile_sha256: Word | None = None
    predicted_loss: float | None = None  # rise of the mean loss; None if no profile was used
    loss_unit: LossUnit | None = None
    qk_weight: float | None = None  # of queries and keys against values, where it was not 1
    notes: tuple[Word, ...] = ()

    @field_validator("versions", mode="before")
    @classmethod
    def _from_mapping(cls, data: Any) -> Any:
        return tuple(data.items()) if isinstance(data, dict) else data

    @field_serializer("versions", mode="plain")
    def _to_mapping(self, versions: tuple[tuple[str, str], ...]) -> dict[str, str]:
        return dict(versions)


class Plan(Frozen):
    """The heads and MLP width of every layer: builds a model, cuts one, and is drawn in reports."""

    format: Literal["headwise-plan/2"] = PLAN_FORMAT
    shape: ModelShape
    layers: tuple[LayerPlan, ...]
    origin: Origin = Origin()

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        written_out = expanded(data, "layers")
        refuse_many(written_out, "layers", "heads", MAX_HEADS)
        return written_out

    @model_validator(mode="after")
    def _fits_shape(self) -> Self:
        if len(self.layers) != self.shape.n_layers:
            raise ValueError(
                f"the shape has n_layers {self.shape.n_layers}, but {len(self.layers)} layers "
                "are planned"
            )
        for i, layer in enumerate(self.layers):
            for side in layer.identities:
                width = getattr(layer, f"{side}_width")
                if width != self.shape.d_model:
                    raise ValueError(
                        f"an identity {side} projection needs heads whose widths add up to "
                        f"d_model {self.shape.d_model}, got {width} in layer {i}"
                    )
            if layer.ffn_dim is not None and not self.shape.ffn_dim:
                raise ValueError(
                    f"the shape has no MLPs (ffn_dim 0), but layer {i} plans one of {layer.ffn_dim}"
                )
        if self.shape.ffn_dim and any(layer.ffn_dim is None for layer in self.layers):
            stated = (_with_ffn_dim(layer, self.shape.ffn_dim) for layer in self.layers)
            object.__setattr__(self, "layers", tuple(stated))
        return self

    @field_serializer("layers", mode="plain")
    def _pack(self, layers: tuple[LayerPlan, ...]) -> list[dict[str, Any]]:
        return run_lengths(layers)

    @classmethod
    def uniform(cls, shape: ModelShape, origin: Origin | None = None) -> Plan:
        """The dense plan: every layer with the shape's own uniform heads."""
        head = HeadSpec(qk_dim=shape.qk_dim, vo_dim=shape.vo_dim, queries=shape.queries)
        layer = LayerPlan(heads=(head,) * shape.n_kv_heads, biases=shape.attention_biases)
        return cls(shape=shape, layers=(layer,) * shape.n_layers, origin=origin or Origin())

    @property
    def ffn_dims(self) -> tuple[int, ...]:
        """The neurons of every layer's MLP; all 0 where the model has none."""
        whole = self.shape.ffn_dim
        return tuple(whole if x.ffn_dim is None else x.ffn_dim for x in self.layers)

    @property
    def changes_ffn(self) -> bool:
        """Whether an MLP is narrower or wider than the uniform model's."""
        return any(width != self.shape.ffn_dim for width in self.ffn_dims)

    def to_json(self) -> str:
        """The plan as the text of a plan file."""
        return json.dumps({"format": self.format, **self.to_dict()}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "the plan") -> Plan:
        """The plan in the text of a plan file; `source` names it in errors."""
        advice = "restore the file, or make the plan again"
        try:
            return cls.from_dict(parse_json(text, source, advice=advice), source)
        except PlanError:
            raise
        except HeadwiseError as error:
            raise PlanError(str(error)) from error

    @classmethod
    def from_dict(cls, data: Any, source: str = "the plan") -> Plan:
        """The plan in JSON-ready data; `source` names it in errors."""
        if isinstance(data, dict) and data.get("format") == _OLD_FORMAT:
            data = {**data, "format": PLAN_FORMAT}
        if not isinstance(data, dict) or data.get("format") != PLAN_FORMAT:
            came = data.get("format", "no format") if isinstance(data, dict) else type(data)
            raise PlanError(
                f"{source} must be a JSON object with format {PLAN_FORMAT!r}, got {quoted(came)}; "
                "make it with `headwise plan new` or a version of headwise that reads it."
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            problem = first_problem(error, cls, _CHILDREN)
            raise PlanError(f"{source} is not a valid plan: {problem}") from error


def _with_ffn_dim(layer: LayerPlan, width: int) -> LayerPlan:
    return layer.model_copy(update={"ffn_dim": width}) if layer.ffn_dim is None else layer


_CHILDREN: dict[str, type[Frozen]] = {
    "shape": ModelShape,
    "layers": LayerPlan,
    "heads": HeadSpec,
    "origin": Origin,
}

Resource = Literal[
    "attn_params", "ffn_params", "block_params", "params", "kv_bytes", "flops", "traffic"
]
RESOURCES: tuple[Resource, ...] = get_args(Resource)
RESOURCE_NAMES: dict[Resource, str] = {
    "attn_params": "attention parameters",
    "ffn_params": "MLP parameters",
    "block_params": "attention and MLP parameters",
    "params": "total parameters",
    "kv_bytes": "key-value bytes per token",
    "flops": "FLOPs per token",
    "traffic": "bytes read per generated token",
}


class Cost(Frozen):
    """What a plan costs; one token attends to `context` tokens, `batch` sequences are decoded."""

    attn_params: int
    ffn_params: int
    params: int
    kv_bytes: int
    flops: int
    step_bytes: int  # read by one decoding step, which gives each of the sequences a token
    context: int
    batch: int = 1

    @computed_field  # type: ignore[prop-decorator]
    @property
    def block_params(self) -> int:
        """Parameters of attention and MLP together."""
        return self.attn_params + self.ffn_params

    @computed_field  # type: ignore[prop-decorator]
    @property
    def traffic(self) -> float:
        """Bytes read per generated token."""
        return self.step_bytes / self.batch

    def counted(self, resource: Resource) -> int:
        """The whole number in which a resource is budgeted; for traffic, the bytes of a step."""
        found: int = self.step_bytes if resource == "traffic" else getattr(self, resource)
        return found


MAX_AMOUNT = 10**18


class Limit(Frozen):
    """An upper limit: a share of the dense model's cost, or a number."""

    share: Annotated[float, Field(gt=0, le=1)] | None = None
    amount: Annotated[int, Field(strict=True, ge=1, le=MAX_AMOUNT)] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.share is None) == (self.amount is None):
            raise ValueError("a limit is either a share or an amount")
        return self

    @classmethod
    def parse(cls, text: str, name: str = "the budget") -> Limit:
        """The limit in `75%`, `1200000`, `1.2M` or `1e6`; `name` says whose in errors."""
        match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([%kKMGTB]?)", text.strip())
        number = float(match[1]) if match else math.nan
        unit = match[2] if match else ""
        if unit == "%" and 0 < number <= 100:
            return cls(share=number / 100)
        amount = number * _UNITS.get(unit, math.nan)
        if 1 <= amount <= MAX_AMOUNT:
            return cls(amount=int(amount))
        hint = f"; write {number:.4g} as {100 * number:.4g}%" if 0 < amount < 1 else ""
        raise BudgetError(
            f"{name} must be a share above 0% and up to 100% (75%) or a number of at least 1 "
            f"(1200000, 1.2M), got {quoted(text)}{hint}."
        )

    def __str__(self) -> str:
        return f"{100 * self.share:g}%" if self.share is not None else f"{self.amount}"


_UNITS = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


class Budget(Frozen):
    """Upper limits on what a plan may cost; None: no limit."""

    attn_params: Limit | None = None
    ffn_params: Limit | None = None
    block_params: Limit | None = None
    params: Limit | None = None
    kv_bytes: Limit | None = None
    flops: Limit | None = None
    traffic: Limit | None = None

    @property
    def limited(self) -> tuple[Resource, ...]:
        """The resources that have a limit."""
        return tuple(r for r in RESOURCES if getattr(self, r) is not None)

    def amount(self, resource: Resource, dense: Cost) -> int:
        """The most that may be spent, as `Cost.counted` counts; shares refer to `dense`."""
        limit: Limit | None = getattr(self, resource)
        assert limit is not None
        if limit.share is None:
            assert limit.amount is not None
            return limit.amount * (dense.batch if resource == "traffic" else 1)
        whole = dense.counted(resource)
        # The 1e-6 forgives the float product (0.29 · 100 = 28.999999999999996).
        return math.floor(limit.share * whole + 1e-6)

    def __str__(self) -> str:
        return ", ".join(f"{RESOURCE_NAMES[r]} ≤ {getattr(self, r)}" for r in self.limited)
