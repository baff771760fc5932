"""AdamW with decoupled weight decay, and its state by parameter name.

Weight decay applies to matrices only. Norms, biases and embeddings are excluded: their size does
not cause overfitting, and an embedding row without gradient would decay to zero.

Adam changes every weight by about the learning rate, whatever its size. The matrices of a trained
model differ in size, so the rate can be relative to each tensor's initial root mean square
(`lr_relative`): one rate then fits all models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError
from headwise.training.settings import TrainSettings, learning_rate
from headwise.training.sharding import like, whole_tensor

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import AdamW


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, by name, tied ones once."""
    found = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise HeadwiseError("the model has no parameter to train; set requires_grad on some.")
    return found


def decayed_names(model: nn.Module) -> frozenset[str]:
    """The trained parameters that decay: matrices that are not embeddings."""
    from torch import nn

    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return frozenset(
        name
        for name, p in trained_parameters(model).items()
        if p.ndim >= 2 and id(p) not in embeddings
    )


def adamw(model: nn.Module, settings: TrainSettings) -> AdamW:
    """The optimizer over the trained parameters: with decay and without; `scale` is of the rate."""
    from torch.optim import AdamW

    parameters, decayed = trained_parameters(model), decayed_names(model)
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in parameters.items() if n in decayed], "scale": 1.0},
        {
            "params": [p for n, p in parameters.items() if n not in decayed],
            "scale": 1.0,
            "weight_decay": 0.0,
        },
    ]
    if settings.lr_relative:
        groups = [
            {**group, "params": [p], "scale": _size(p)} for group in groups for p in group["params"]
        ]
    fused = all(p.device.type in {"cpu", "cuda"} for p in parameters.values())
    return AdamW(
        [g for g in groups if g["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=fused,
    )


def set_learning_rate(optimizer: AdamW, step: int, settings: TrainSettings) -> float:
    """Give every group its rate of the update with index `step`; returns the schedule's rate."""
    rate = learning_rate(step, settings)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]
    return rate


def _size(tensor: Tensor) -> float:
    """The root mean square; a tensor of zeros has none, so its rate is taken as it is."""
    return float(whole_tensor(tensor.detach()).double().square().mean().sqrt()) or 1.0


def moments(model: nn.Module, optimizer: AdamW, *, keep: bool = True) -> dict[str, Tensor]:
    """The optimizer's state as `parameter name/moment`, on the CPU; nothing unless kept."""
    whole = (
        (f"{name}/{key}", whole_tensor(value.detach()))
        for name, p in trained_parameters(model).items()
        for key, value in optimizer.state[p].items()
    )
    return {name: value.cpu().contiguous() for name, value in whole if keep}


def restore_moments(model: nn.Module, optimizer: AdamW, saved: dict[str, Tensor]) -> None:
    """Put back what `moments` gave."""
    parameters = trained_parameters(model)
    for full_name, value in saved.items():
        name, _, key = full_name.rpartition("/")
        p = parameters[name]
        # The step counter lives where the optimizer made it: beside the weights when fused.
        device = p.device if key != "step" or optimizer.defaults["fused"] else "cpu"
        optimizer.state[p][key] = value.to(device) if key == "step" else like(p, value)
