"""Which device and number format `auto` stands for on this machine."""

from __future__ import annotations

from typing import Literal

from headwise.errors import HeadwiseError

Device = Literal["auto", "cpu", "cuda", "mps"]
Dtype = Literal["auto", "fp32", "bf16"]


def chosen_device(device: str) -> Device:
    """The device `auto` stands for here; an absent one is an error."""
    import torch

    there: dict[Device, bool] = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    found = [name for name, present in there.items() if present]
    if device == "auto":
        return found[0]
    for name in found:
        if name == device:
            return name
    raise HeadwiseError(
        f"device must be auto or one that torch finds here ({', '.join(found)}), got {device!r}."
    )


def training_dtype(dtype: Dtype, device: Device) -> Dtype:
    """What `auto` stands for: bf16 where it is faster, which its backward on a CPU is not."""
    if dtype != "auto":
        return dtype
    return "fp32" if device == "cpu" else "bf16"
