"""Devices, processes and signals of a run.

Accelerate makes `torchrun --nproc_per_node 2 -m headwise train …` the same run as one process.
All processes must see the run folder (one machine, or shared storage); only the first writes.

The first Ctrl-C or SIGTERM asks the loop to save and stop at the next step; a second one acts as
it would have without the loop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from headwise.errors import HeadwiseError, quoted

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]


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
    """The dtype for `auto`: bf16 where it is faster, which on a CPU its backward is not."""
    if dtype != "auto":
        return dtype
    return "fp32" if device == "cpu" else "bf16"


def has_bf16_products(device: Device) -> bool:
    """Whether the device supports matrix products in bf16, which are then faster than in fp32."""
    import torch

    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device == "cpu":
        # Newer than the oldest torch that will do.
        abilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
        return any(abilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return True


T = TypeVar("T")

# The first process may tokenise for long while the others wait for it.
PATIENCE = timedelta(hours=2)


def check_environment() -> None:
    """Raise if what torchrun sets for its processes is there, but is no number."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        value = os.environ.get(name, "0")
        if not (value.isascii() and value.isdecimal()):
            raise HeadwiseError(
                f"the environment variable {name} must be a whole number, got {quoted(value)}; "
                "unset it, or start with torchrun."
            )


def accelerator(device: Device) -> Accelerator:
    """The processes of this run on `device` (already chosen)."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.state import (  # type: ignore[import-untyped]
        AcceleratorState,
        PartialState,
    )

    check_environment()
    for plugin in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() == "true":
            raise HeadwiseError(
                f"the accelerate configuration asks for {plugin}, but headwise splits models by "
                "itself; start it with torchrun, or without that option, and with --shard where a "
                "model does not fit one device."
            )
    # Accelerate keeps one state per process and refuses another device after the first.
    if AcceleratorState._shared_state and PartialState().num_processes == 1:
        AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(
        cpu=device == "cpu",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )


def on_main(processes: Accelerator, action: Callable[[], T]) -> T:
    """Do `action` in the first process while the others wait; all get its result or its error.

    With several processes the result must be picklable.
    """
    failure: HeadwiseError | None = None
    result: Any = None
    if processes.is_main_process:
        try:
            result = action()
        except HeadwiseError as error:
            failure = error
    if processes.num_processes > 1:
        from accelerate.utils import (  # type: ignore[import-untyped]
            broadcast_object_list,
        )

        message = [str(failure) if failure else None, result]
        broadcast_object_list(message)
        if message[0] and not failure:
            failure = HeadwiseError(message[0])
        result = message[1]
    if failure:
        raise failure
    return result  # type: ignore[no-any-return]


class Interruption:
    """The signal that interrupted the work; 0 if none did."""

    def __init__(self) -> None:
        self.signal = 0


@contextlib.contextmanager
def interruptions() -> Iterator[Interruption]:
    """While inside, SIGINT and SIGTERM are only noted (in the main thread; elsewhere nothing)."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before: dict[int, Any] = {}

    def note(number: int, _frame: FrameType | None) -> None:
        interruption.signal = number
        for each, handler in before.items():
            signal.signal(each, handler)

    for each in (signal.SIGINT, signal.SIGTERM):
        before[each] = signal.signal(each, note)
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
