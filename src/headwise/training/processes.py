"""The machine under a run: one process or many, on one device each.

Accelerate makes `torchrun --nproc_per_node 2 -m headwise train …` the same run as one process.
All processes must see the run folder (one machine, or shared storage); only the first writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from headwise.devices import Device
from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

# The first process may tokenise for long while the others wait for it.
PATIENCE = timedelta(hours=2)


def accelerator(device: Device) -> Accelerator:
    """The processes of this run on `device` (already chosen)."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.state import (  # type: ignore[import-untyped]
        AcceleratorState,
        PartialState,
    )

    for plugin in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() == "true":
            raise HeadwiseError(
                f"the accelerate configuration asks for {plugin}, but headwise trains "
                "data-parallel only; start it with torchrun or without that option."
            )
    # Accelerate keeps one state per process and refuses another device after the first.
    if AcceleratorState._shared_state and PartialState().num_processes == 1:
        AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(
        cpu=device == "cpu",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )


def on_main(processes: Accelerator, action: Callable[[], None]) -> None:
    """Do `action` in the first process while the others wait; its failure stops them all."""
    failure: HeadwiseError | None = None
    if processes.is_main_process:
        try:
            action()
        except HeadwiseError as error:
            failure = error
    if processes.num_processes > 1:
        from accelerate.utils import (  # type: ignore[import-untyped]
            broadcast_object_list,
        )

        message = [str(failure) if failure else None]
        broadcast_object_list(message)
        if message[0] and not failure:
            failure = HeadwiseError(message[0])
    if failure:
        raise failure
