"""Which parameters a recovery trains, and how they become a plain model again.

    attention   the four projections of every attention, and the MLPs that were cut
    norms       those, and the scales and biases of all norms
    all         everything
    lora        low-rank additions to every linear layer but the output head (PEFT), merged into
                their matrices at the end

In every case the recovered model has the same tensors as the cut one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError
from headwise.training.settings import Trained

if TYPE_CHECKING:
    from torch import nn

LORA_RANK = 16
_NORM = re.compile(r"norm|(^|[._])ln(_|\d|$)", re.IGNORECASE)


def choose_trained(model: Any, trained: Trained, *, seed: int) -> None:
    """Let the chosen parameters of a headwise model require gradients, and no others."""
    model.requires_grad_(trained == "all")
    if trained == "lora":
        _add_lora(model, seed)
        return
    for projection in _projections(model):
        projection.requires_grad_()
    if trained == "norms":
        for name, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if own and _NORM.search(f"{name.rpartition('.')[2]}.{type(module).__name__}"):
                module.requires_grad_()


def merge_trained(model: Any) -> None:
    """Merge low-rank additions into their matrices; models without them do not change."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "get_base_layer"):
                child.merge()
                setattr(parent, name, child.get_base_layer())


def _projections(model: Any) -> list[nn.Module]:
    from headwise.models.attention_headwise import PROJECTIONS
    from headwise.models.backbones_headwise import family_of, stock_attentions
    from headwise.models.build import inner, plan_of

    found = (getattr(a, name, None) for a in model.attentions() for name in PROJECTIONS.values())
    own = [projection for projection in found if projection is not None]
    plan, stock = plan_of(model), inner(model)
    paths = family_of(stock.config.model_type).mlp.paths
    for (layer, _), width in zip(stock_attentions(stock), plan.ffn_dims, strict=True):
        if width != plan.shape.ffn_dim:
            own += [layer.get_submodule(path) for path in paths]
    return own


def _add_lora(model: Any, seed: int) -> None:
    import torch

    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise HeadwiseError(
            "--train lora needs the `peft` package, which is missing; install headwise[lora], or "
            "choose --train attention."
        ) from error
    head = model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and module is not head
    ]
    config = LoraConfig(r=LORA_RANK, lora_alpha=LORA_RANK, target_modules=names)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
