"""A model split over the processes of a run, for what does not fit one device (FSDP).

    whole model in main memory ─► every process keeps 1/n of each tensor on its device
    a layer runs ─► its tensors are gathered, used, and freed; gradients are summed and split

PyTorch's `fully_shard` does it, layer by layer. Accelerate's own FSDP calls it too, but only on
GPUs: on CPU processes it ignores its plugin. Checkpoints and finished models are not sharded, so a
run can be resumed with any number of processes, sharded or not.
"""

# mypy: disable-error-code="no-untyped-call,attr-defined"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from torch import Tensor, nn


def shard_model(model: Any, processes: Accelerator) -> Any:
    """Split a model over the processes in place; one process keeps it whole."""
    if processes.num_processes == 1:
        return model.to(processes.device)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from headwise.models.backbones_headwise import stock_attentions
    from headwise.models.build import inner

    mesh = init_device_mesh(processes.device.type, (processes.num_processes,))
    for layer, _ in stock_attentions(inner(model)):
        fully_shard(layer, mesh=mesh)
    # Also what is outside the layers is let go after use: a forward may have no backward.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor, which may be split; every process must ask for it."""
    if not _is_split(tensor):
        return tensor
    import torch

    gathered = tensor.full_tensor()
    # A tensor of its own, not one that waits for others or is a part of a longer one.
    return torch.empty(gathered.shape, dtype=gathered.dtype, device=gathered.device).copy_(gathered)


def like(tensor: Tensor, whole: Tensor) -> Tensor:
    """A whole tensor split as another is, or on its device."""
    if not _is_split(tensor):
        return whole.to(tensor.device)
    from torch.distributed.tensor import distribute_tensor

    local = whole.to(tensor.device_mesh.device_type)
    return distribute_tensor(local, tensor.device_mesh, tensor.placements)


def unshard_model(model: nn.Module, *, keep: bool) -> None:
    """Make a split model an ordinary one in main memory, in the processes that `keep` it.

    Every process must call this. It can be saved then, no longer trained.
    """
    import torch
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    seen: dict[int, nn.Parameter] = {}  # tied weights are one tensor
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not _is_split(parameter):
                continue
            if id(parameter) not in seen:
                whole = whole_tensor(parameter.detach())
                made = whole.cpu() if keep else torch.empty(whole.shape, device="meta")
                seen[id(parameter)] = nn.Parameter(made, parameter.requires_grad)
            setattr(module, name, seen[id(parameter)])
    for module in list(model.modules()):
        if isinstance(module, FSDPModule):  # its class was derived from the module's own
            module.__class__ = type(module).__mro__[2]


def _is_split(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")
