"""How big a model is: in its files, in its cache, and at its peak when decoding."""

from __future__ import annotations

import math
import re
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.errors import HeadwiseError, quoted
from headwise.memory import available
from headwise.planning.cost import reach

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from torch import Tensor

    from headwise.plan import Plan
    from headwise.source import Source

# mypy: disable-error-code="no-untyped-call,no-any-return"


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


# mypy: disable-error-code="no-untyped-call,no-any-return"


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{u}i": 1024**n for n, u in enumerate("kmgt", 1)}


def parse_bytes(text: str, option: str = "--memory") -> int:
    """`24GiB`, `80GB` or `1.5e9` as bytes."""
    found = re.fullmatch(r"\s*(\d+\.?\d*(?:e\d{1,3})?)\s*([kmgt]i?|)b?\s*", text, re.IGNORECASE)
    if found is None:
        raise HeadwiseError(
            f"{option} must be an amount of memory such as 24GiB or 80GB, got {quoted(text)}."
        )
    amount = float(found[1]) * _UNITS[found[2].lower()]
    if not 1 <= amount <= 2**60:
        raise HeadwiseError(f"{option} must be between 1 byte and 1 EiB, got {quoted(text)}.")
    return int(amount)


def free_memory(device: torch.device) -> float:
    """Bytes that are free now; infinity if unknown."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    left = available()
    return math.inf if left is None else left


def sequence_bytes(plan: Plan, context: int, bytes_per_number: int) -> int:
    """Bytes that one sequence of `context` tokens keeps in the cache; windows keep less."""
    return bytes_per_number * sum(
        (layer.key_width + layer.value_width) * reach(plan.shape, i, context)
        for i, layer in enumerate(plan.layers)
    )


def sequences_that_fit(memory: int, weight_bytes: int, each: int) -> int:
    """How many sequences fit beside the weights; 0 if the weights alone do not."""
    return max(0, memory - weight_bytes) // each if each else 0


def peak_bytes(call: Callable[[], object], held: Iterable[Tensor] = ()) -> int:
    """The peak bytes of tensors during a call: new ones, and those `held` before.

    Counted as PyTorch allocates them; memory inside kernels is not seen. A held tensor counts
    until its last reference is dropped.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    live = most = 0
    known: weakref.WeakSet[Any] = weakref.WeakSet()

    def forget(size: int) -> None:
        nonlocal live
        live -= size

    def note(out: Any, given: set[int]) -> None:
        nonlocal live, most
        if isinstance(out, tuple | list):
            for one in out:
                note(one, given)
        elif isinstance(out, torch.Tensor):
            storage = out.untyped_storage()
            if storage.data_ptr() in given or storage in known:
                return
            known.add(storage)
            live += storage.nbytes()
            most = max(most, live)
            weakref.finalize(storage, forget, storage.nbytes())

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            import torch

            out = func(*args, **(kwargs or {}))
            flat = [x for a in args for x in (a if isinstance(a, tuple | list) else (a,))]
            given = {x.untyped_storage().data_ptr() for x in flat if isinstance(x, torch.Tensor)}
            note(out, given)
            return out

    for tensor in held:
        note(tensor, set())
        del tensor
    del held
    with Watched():
        call()
    return most
