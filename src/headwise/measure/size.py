"""How big a model is, counted: in its files, and in the cache that a forward pass leaves."""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise.source import Source

# What files store beside the parameters: masks and rotary frequencies (older ones), and the fitted
# constants of norms over kept planes.
_NOT_PARAMETERS = ("inv_freq", "masked_bias", "position_ids", "_norm.share", "_norm.rest")


@dataclass(frozen=True, slots=True)
class Counted:
    """Numbers stored in a checkpoint's files."""

    attn_params: int  # weights and biases of the four projections, all layers
    params: int  # tied embeddings once


def counted(source: Source) -> Counted:
    """Parameters by the headers of the files."""
    from headwise.models.backbones_headwise import family_of, stock_attentions
    from headwise.models.build import inner

    model = source.empty()
    backbone = inner(model)
    family = family_of(backbone.config.model_type)
    within: set[Any] = set()
    for layer, attention in stock_attentions(backbone):
        norms = {m for n in ("q_norm", "k_norm") if (m := getattr(attention, n, None)) is not None}
        within |= {p for m in attention.modules() if m not in norms for p in m.parameters(False)}
        if family.holds_output:
            within |= set(layer.get_submodule(family.holds_output).parameters())
    wanted = {name for name, p in model.named_parameters() if p in within}
    names, checkpoint = source.names(), source.checkpoint
    stored = checkpoint.stored
    return Counted(
        attn_params=sum(stored[names[name]].numel for name in wanted),
        params=sum(
            s.numel
            for name, s in stored.items()
            if s.dtype.is_floating_point
            and name not in checkpoint.tied_copies
            and not name.endswith(_NOT_PARAMETERS)
            and len(s.shape) < 4 + (".weight" in name)  # GPT-2's masks are 4-dimensional "biases"
        ),
    )


def cache_bytes(model: Any, n_tokens: int = 4) -> int:
    """Bytes that one token leaves in a live key-value cache, all layers together."""
    import torch

    ids = torch.zeros((1, n_tokens), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    # A sliding layer may keep fewer tokens than it was given.
    return sum(t.nbytes // t.shape[-2] for t in tensors)
