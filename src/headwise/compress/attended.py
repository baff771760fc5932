"""What goes into and comes out of a layer's attention when the layer is run in a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from headwise.nn.attention_headwise import HeadwiseAttention
from headwise.nn.layer_stream import LayerStream


class _Reached(Exception):  # noqa: N818 (not an error: ends a layer's run at its output projection)
    pass


def outputs(
    stream: LayerStream, layer: nn.Module, i: int, inputs: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The attention outputs and the layer outputs, batch by batch."""
    attended: list[Tensor] = []
    with _hooked(attention_of(layer).o_proj, lambda m, args, out: attended.append(out)):
        found = [stream.run(layer, i, h, b) for b, h in enumerate(inputs)]
    return attended, found


def before_output(
    stream: LayerStream, layer: nn.Module, i: int, hidden: Tensor, batch: int
) -> Tensor:
    """What enters the output projection; the rest of the layer is not run."""
    found: list[Tensor] = []

    def stop(module: Any, args: Any, output: Any) -> None:
        found.append(args[0])
        raise _Reached

    with _hooked(attention_of(layer).o_proj, stop), suppress(_Reached):
        stream.run(layer, i, hidden, batch)
    return found[0]


def attention_of(layer: nn.Module) -> HeadwiseAttention:
    """The planned attention in a layer."""
    return next(m for m in layer.modules() if isinstance(m, HeadwiseAttention))


@contextmanager
def _hooked(module: nn.Module, hook: Callable[..., None]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
