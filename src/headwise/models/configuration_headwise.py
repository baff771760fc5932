"""The config of a Transformer whose layers follow a plan.

    HeadwiseConfig ─┬─ backbone   the stock config of the model around them
                    └─ plan       the plan's own JSON, every score scale and rotary plane explicit

This file travels with checkpoints: it needs torch and transformers only. What it does not know
itself it reads from, and writes to, the backbone's config, so that generation, caches and trainers
find the sizes and token ids they look for.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, configuration_utils
from transformers.configuration_utils import PreTrainedConfig

# Not in transformers before 5.20, which vLLM still brings.
SubConfigSpec: Any = getattr(configuration_utils, "SubConfigSpec", None)

# Settings that the wrapper and the backbone both hold; setting one sets the other.
_SHARED = frozenset(
    {"id2label", "label2id", "problem_type", "output_attentions", "output_hidden_states", "dtype"}
)


@dataclass(frozen=True)
class Head:
    """One head group: a key/value head and the `queries` query heads that share it."""

    qk_dim: int
    vo_dim: int
    queries: int
    score_scale: float
    rotary_planes: tuple[int, ...]
    source: int = 0  # the head group of the uncut layer that it was


@dataclass(frozen=True)
class Layer:
    """One layer, as the plan in a config describes it."""

    heads: tuple[Head, ...]
    identities: frozenset[str]
    biases: frozenset[str]
    ffn_dim: int | None = None  # neurons of the MLP; None: as many as the backbone has

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


def planned_layers(plan: dict[str, Any]) -> tuple[Layer, ...]:
    """The layers of a plan in a config; scales and planes must be there, they are never derived."""
    return tuple(_layer(data) for data in _written_out(plan["layers"]))


def _written_out(packed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in packed for _ in range(entry.get("repeat", 1))]


def _layer(data: dict[str, Any]) -> Layer:
    return Layer(
        heads=tuple(_head(h, j) for j, h in enumerate(_written_out(data["heads"]))),
        identities=frozenset(
            side for side in ("query", "key", "value") if data.get(side) == "identity"
        ),
        biases=frozenset(data.get("biases", ())),
        ffn_dim=data.get("ffn_dim"),
    )


def _head(data: dict[str, Any], place: int) -> Head:
    missing = [name for name in ("score_scale", "rotary_planes") if data.get(name) is None]
    if missing:
        raise ValueError(
            f"every head of a config's plan must state its {' and '.join(missing)}, got {data}; "
            "build the config with headwise.models.build, which resolves them."
        )
    return Head(
        qk_dim=int(data["qk_dim"]),
        vo_dim=int(data["vo_dim"]),
        queries=int(data.get("queries", 1)),
        score_scale=float(data["score_scale"]),
        rotary_planes=tuple(data["rotary_planes"]),
        source=place if data.get("source") is None else data["source"],
    )


class HeadwiseConfig(PreTrainedConfig):
    """The stock config of the backbone plus the plan of its layers."""

    model_type = "headwise"
    # transformers reads these class attributes
    if SubConfigSpec is None:
        sub_configs = {"backbone": AutoConfig}
    else:
        sub_configs_defaults = {
            "backbone": SubConfigSpec(config_class=AutoConfig, model_type="llama")
        }
    _auto_class = "AutoConfig"

    backbone: Any = None  # the stock config; may be given as its dict
    plan: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if SubConfigSpec is None and not isinstance(self.backbone, PreTrainedConfig):
            self.backbone = AutoConfig.for_model(**(self.backbone or {"model_type": "llama"}))
        given = self.id2label is not None or kwargs.get("num_labels") is not None
        super().__post_init__(**kwargs)
        self._post_init_done = True  # which older versions of transformers do not say
        if not given:  # the backbone's labels are the model's
            self.id2label = self.backbone.id2label
            self.label2id = self.backbone.label2id
        else:
            self.backbone.id2label = self.id2label
            self.backbone.label2id = self.label2id
        if self.problem_type is None:
            self.problem_type = self.backbone.problem_type
        else:
            self.backbone.problem_type = self.problem_type

    def __getattr__(self, name: str) -> Any:
        # Reached only for names that are not set here. Private names are never passed on: copying
        # and pickling ask for them before there is a backbone.
        own = super().__getattribute__("__dict__")
        if name.startswith("_") or "_post_init_done" not in own:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(own["backbone"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        backbone = self.__dict__.get("backbone") if "_post_init_done" in self.__dict__ else None
        if backbone is None or name.startswith("_"):
            super().__setattr__(name, value)
        elif name in _SHARED:
            super().__setattr__(name, value)
            setattr(backbone, name, value)
        elif name in self.__dict__ or hasattr(type(self), name) or not hasattr(backbone, name):
            super().__setattr__(name, value)
        else:
            setattr(backbone, name, value)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """The backbone's text config: sizes, layer types and windows as caches and masks want.

        A config that declares the heads of every layer (`per_layer_config`) is its own: engines
        take a text config apart from it for a model that sees and hears.
        """
        if not isinstance(self.backbone, PreTrainedConfig) or self.is_heterogeneous:
            return self
        return self.backbone.get_text_config(decoder=decoder, encoder=encoder)

    def to_diff_dict(self) -> dict[str, Any]:
        """The config as saved; the backbone is written in full, so no default can drift."""
        saved: dict[str, Any] = super().to_diff_dict()
        full = self.to_dict()
        saved["backbone"] = full["backbone"]
        saved["backbone"].pop("_name_or_path", None)
        return saved

    def layers(self) -> tuple[Layer, ...]:
        """Every layer as planned."""
        if self.plan is None:
            raise ValueError("a headwise config needs a plan, got none; see headwise.models.build.")
        return planned_layers(self.plan)
