"""Which engines can run a plan: for every target yes, or the reason why not.

    target    what reads it                                    what it needs tied
    stock     transformers, without headwise                   one width, one set of planes, one
                                                               MLP width
    gguf      llama.cpp                                        the same; head groups free per layer,
                                                               MLP widths too where qk = vo
    vllm      vLLM                                             as many queries in all groups
    onnx      ONNX Runtime                                     nothing
    padded    the source's own class, zeros for what was cut   nothing, and nothing is saved

A class of model that other engines know has one head width and one list of rotary frequencies for
all layers, and one MLP width. Queries and keys may be wider than values where the class allows it.
Score scales are no obstacle: they are folded into the queries.

Kernels take some head widths only, or are fast with some only. `gguf-cuda` and `vllm-cpu` are the
targets `gguf` and `vllm` limited to those widths:

    gguf-cuda   llama.cpp's flash attention on CUDA   keys as wide as values
    vllm-cpu    vLLM on a CPU, which has no others
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headwise.errors import HeadwiseError, did_you_mean, quoted
from headwise.plan import HeadSpec, LayerPlan, Plan

# Families whose blocks are a Llama's: RMS norms, a gated MLP, rotary positions, nothing else.
LLAMA_LIKE = ("llama", "mistral", "phi3", "qwen2")
_NORMED = ("gemma3_text", "olmo2", "qwen3")
SERVED_MULTIPLE = 8  # vLLM's kernels for GPUs take widths of these
# The widths for which there are kernels: in llama.cpp's ggml-cuda/fattn.cu, in vLLM's cpu_attn.py.
CUDA_WIDTHS = (40, 64, 72, 80, 96, 112, 128, 256)
CPU_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
ROTARY = (*LLAMA_LIKE, *_NORMED, "gpt_neox")


@dataclass(frozen=True, slots=True)
class RunsIn:
    """Whether a target runs a plan: `how` it does, or `why_not`."""

    target: str
    engine: str
    how: str = ""
    why_not: str = ""

    @property
    def yes(self) -> bool:
        """Whether it does."""
        return not self.why_not

    def __str__(self) -> str:
        return f"{self.target} ({self.engine}): " + (
            f"yes, {self.how}" if self.yes else f"no, {self.why_not}"
        )


@dataclass(frozen=True, slots=True)
class Kernels:
    """The head widths that an engine's kernels take."""

    multiple_of: int = 1
    widths: tuple[int, ...] | None = None  # None: all multiples

    def both(self, other: Kernels) -> Kernels:
        """What two engines take."""
        lists = [one.widths for one in (self, other) if one.widths is not None]
        shared = tuple(w for w in lists[0] if all(w in own for own in lists)) if lists else None
        return Kernels(math.lcm(self.multiple_of, other.multiple_of), shared)


@dataclass(frozen=True, slots=True)
class Target:
    """An export target: the engine that reads it, and the test of whether it runs a plan."""

    name: str
    engine: str
    test: Callable[[Plan], str]  # how it runs; raises _No
    kernels: Kernels = Kernels()
    equal_sides: bool = False  # keys that are not as wide as values save nothing there
    one_width: bool = False  # the same in all layers

    def runs(self, plan: Plan) -> RunsIn:
        """Whether this target runs the plan."""
        try:
            return RunsIn(self.name, self.engine, how=self.test(plan))
        except _No as no:
            return RunsIn(self.name, self.engine, why_not=str(no))


class _No(Exception):  # noqa: N818  (an answer, not an error)
    """Why a target does not run a plan."""


def runs_in(plan: Plan) -> tuple[RunsIn, ...]:
    """For every target, whether it runs the plan as it is, and how or why not.

    >>> import headwise as hw
    >>> plan = hw.new_plan(layers=2, d_model=64, heads=4, context=32, attn_params="75%")
    >>> names = [found.target for found in hw.runs_in(plan) if found.yes]
    """
    return tuple(target.runs(plan) for target in TARGETS.values())


def target_of(name: str) -> Target:
    """A target by its name."""
    if name not in TARGETS:
        raise HeadwiseError(
            f"a target is one of {', '.join(TARGETS)}, got {quoted(name)}. "
            f"{did_you_mean(name, TARGETS)}"
        )
    return TARGETS[name]


def kernels_of(names: Sequence[str]) -> Kernels:
    """The head widths that all of these targets have kernels for."""
    found = Kernels()
    for name in names:
        found = found.both(target_of(name).kernels)
    return found


def planes_of(head: HeadSpec, plan: Plan) -> range | tuple[int, ...]:
    """The rotary planes of a head, as a range if they are the first ones, however many.

    None stands for all planes of its width.
    """
    planes = head.rotary_planes
    if planes is None:
        return range(head.qk_dim // 2 if plan.shape.family in ROTARY else 0)
    return range(len(planes)) if not planes or planes[-1] == len(planes) - 1 else planes


def _stock(plan: Plan) -> str:
    _causal(plan)
    if plan.shape.family not in LLAMA_LIKE:
        _whole_only(plan)
        return f"as {plan.shape.family}: nothing is cut"
    _one_group_size(plan)
    _one_count(plan)
    qk, vo = _one_width(plan)
    _one_set_of_planes(plan)
    _one_ffn_dim(plan)
    if qk == vo:
        return f"as {_llama_or_windowed(plan)}, heads {qk} wide"
    _mimo(plan)
    return f"as mimo_v2_flash, keys {qk} and values {vo} wide"


def _gguf(plan: Plan) -> str:
    _causal(plan)
    if plan.shape.family == "gpt2":
        _whole_only(plan)
        return "as gpt2: nothing is cut"
    if plan.shape.family not in LLAMA_LIKE:
        raise _No(f"{plan.shape.family} models are not written as GGUF files")
    _one_group_size(plan)
    _no_windows(plan)
    qk, vo = _one_width(plan)
    plain = _one_set_of_planes(plan)
    counts = {len(layer.heads) for layer in plan.layers}
    if qk == vo:
        alike = len(counts) == 1 and len(set(plan.ffn_dims)) == 1
        return f"as {'llama' if alike else 'deci'}, heads {qk} wide"
    _mimo(plan)
    if any(layer.biases for layer in plan.layers):
        raise _No("keys and values differ in width, and the classes that allow it have no biases")
    _one_ffn_dim(plan)
    if 0 in counts:
        raise _No("a layer has no head, which it runs only where keys are as wide as values")
    kind = "mimo2" if plain and len(counts) == 1 else "step35"
    return f"as {kind}, keys {qk} and values {vo} wide"


def _gguf_cuda(plan: Plan) -> str:
    how = _gguf(plan)
    qk, vo = _one_width(plan)
    if qk != vo:
        raise _No(f"keys are {qk} and values {vo} wide; that kernel takes them equally wide")
    _kernel_for([qk], CUDA_WIDTHS)
    return how


def _vllm_cpu(plan: Plan) -> str:
    how = _vllm(plan)
    if "headwise" in how:
        _kernel_for([served_width(layer, plan) for layer in plan.layers], CPU_WIDTHS)
    else:
        _kernel_for(_one_width(plan)[:1], CPU_WIDTHS)
    return how


def _kernel_for(widths: Sequence[int], taken: Sequence[int]) -> None:
    for i, width in enumerate(widths):
        if width not in taken:
            where = "heads are" if len(widths) == 1 else f"layer {i} has heads"
            listed = ", ".join(map(str, taken))
            raise _No(f"{where} {width} wide, and there are kernels for {listed}")


def _vllm(plan: Plan) -> str:
    """Its own classes read what is exported to stock; others run in ours, one call per layer."""
    try:
        how = _stock(plan)
        if "mimo" not in how:
            return how
    except _No:
        pass
    _causal(plan)
    widths = set()
    for i, layer in _layers(plan):
        if not layer.heads:
            raise _No(f"layer {i} has no head, and it caches keys in every layer")
        sizes = sorted({h.queries for h in layer.heads})
        if len(sizes) > 1:
            raise _No(f"layer {i} has groups of {sizes[0]} and {sizes[1]} queries")
        if plan.shape.family in _NORMED:
            _padded_norms(plan, i, layer)
        widths.add(served_width(layer, plan))
    _whole_norms(plan)
    listed = ", ".join(str(w) for w in sorted(widths))
    return f"in headwise's class, keys and values of a layer as wide as its widest: {listed}"


def served_width(layer: LayerPlan, plan: Plan) -> int:
    """The one width of a layer's keys and values that holds every head, as kernels take them."""
    planes = [len(planes_of(head, plan)) for head in layer.heads]
    free = [h.qk_dim - 2 * n for h, n in zip(layer.heads, planes, strict=True)]
    need = max(*(h.vo_dim for h in layer.heads), 2 * max(planes) + max(free))
    return need + -need % SERVED_MULTIPLE


def _padded_norms(plan: Plan, i: int, layer: LayerPlan) -> None:
    """Normed queries and keys cannot be padded, nor scaled before their norm."""
    width = served_width(layer, plan)
    family = plan.shape.family
    if any(h.qk_dim != width for h in layer.heads):
        raise _No(f"{family} normalises keys, and those of layer {i} would be padded to {width}")
    if len({h.score_scale for h in layer.heads}) > 1:
        raise _No(f"{family} normalises queries, and layer {i} has several score scales")


def _onnx(plan: Plan) -> str:
    _causal(plan)
    return "each layer's cache has its own width"


def _padded(plan: Plan) -> str:
    shape = plan.shape
    _whole_norms(plan)
    for i, layer in _layers(plan):
        if len(layer.heads) > shape.n_kv_heads:
            raise _No(
                f"layer {i} has {len(layer.heads)} head groups and a {shape.family} of this shape "
                f"{shape.n_kv_heads}"
            )
        for head in layer.heads:
            if head.queries > shape.queries:
                raise _No(
                    f"layer {i} has groups of {head.queries} queries and a {shape.family} of this "
                    f"shape {shape.queries}"
                )
            if head.qk_dim > shape.qk_dim or head.vo_dim > shape.vo_dim:
                raise _No(
                    f"layer {i} has heads {head.qk_dim}/{head.vo_dim} wide, wider than the "
                    f"{shape.qk_dim}/{shape.vo_dim} of the {shape.family} shape"
                )
        if plan.ffn_dims[i] > shape.ffn_dim:
            raise _No(
                f"layer {i} has an MLP of {plan.ffn_dims[i]} neurons, wider than the "
                f"{shape.ffn_dim} of the {shape.family} shape"
            )
    return f"as {shape.family}, zeros for what was cut: nothing is saved"


def _layers(plan: Plan) -> Iterator[tuple[int, LayerPlan]]:
    return enumerate(plan.layers)


def _causal(plan: Plan) -> None:
    if not plan.shape.causal:
        raise _No(f"{plan.shape.family} is an encoder; only causal models are exported")


def _whole_only(plan: Plan) -> None:
    """A class that has no free head width runs the uniform heads only."""
    shape = plan.shape
    for i, layer in _layers(plan):
        widths = {(h.qk_dim, h.vo_dim, h.queries) for h in layer.heads}
        if len(layer.heads) != shape.n_kv_heads or widths != {
            (shape.qk_dim, shape.vo_dim, shape.queries)
        }:
            normed = ", which normalises queries and keys," if shape.family in _NORMED else ""
            raise _No(f"{shape.family}{normed} has no free head width, and layer {i} is cut")
        if plan.ffn_dims[i] != shape.ffn_dim:
            raise _No(f"{shape.family} is exported uncut only, and the MLP of layer {i} is cut")


def _whole_norms(plan: Plan) -> None:
    """A stock norm of queries and keys is over all columns; one over fewer was fitted to them."""
    shape = plan.shape
    for i, layer in _layers(plan) if shape.family in _NORMED else ():
        moved = layer.sources != tuple(range(shape.n_kv_heads)) and shape.family == "olmo2"
        if layer.heads and (moved or any(h.qk_dim != shape.qk_dim for h in layer.heads)):
            raise _No(
                f"layer {i} has norms over some of the columns of its queries and keys, and a "
                f"{shape.family} has norms over all; cut values only"
            )


def _one_group_size(plan: Plan) -> None:
    """Every key/value head serves as many query heads."""
    sizes = {h.queries: i for i, layer in _layers(plan) for h in layer.heads}
    if len(sizes) > 1:
        (a, i), (b, j) = list(sizes.items())[:2]
        raise _No(
            f"groups have {a} queries in layer {i} and {b} in layer {j}; one number is needed"
        )


def _one_count(plan: Plan) -> None:
    counts = {len(layer.heads): i for i, layer in _layers(plan)}
    if len(counts) > 1:
        (a, i), (b, j) = list(counts.items())[:2]
        raise _No(f"layer {i} has {a} head groups and layer {j} {b}; one number is needed")
    heads = plan.layers[0].n_queries
    if heads and plan.shape.d_model % heads:
        raise _No(f"{heads} query heads do not divide the model's width of {plan.shape.d_model}")


def _one_ffn_dim(plan: Plan) -> None:
    first: dict[int, int] = {}
    for i, width in enumerate(plan.ffn_dims):
        first.setdefault(width, i)
    if len(first) > 1:
        (a, i), (b, j) = list(first.items())[:2]
        raise _No(f"layer {i} has an MLP of {a} neurons and layer {j} of {b}; one width is needed")


def _one_width(plan: Plan) -> tuple[int, int]:
    found = []
    for side, name in (("qk_dim", "keys"), ("vo_dim", "values")):
        first: dict[int, int] = {}
        for i, layer in _layers(plan):
            for head in layer.heads:
                first.setdefault(getattr(head, side), i)
        if len(first) > 1:
            (a, i), (b, j) = list(first.items())[:2]
            where = f"layer {i} has {name} of {a} and layer {j} of {b}"
            if i == j:
                where = f"layer {i} has {name} of {a} and of {b}"
            raise _No(f"{where}; one width for the model is needed")
        if not first:
            raise _No("no layer has a head")
        found.append(next(iter(first)))
    if found[0] % 2:
        raise _No(f"keys are {found[0]} wide; rotary planes need an even width")
    return found[0], found[1]


def _one_set_of_planes(plan: Plan) -> bool:
    """Whether the one set of planes is that of the dense model, in order."""
    first: dict[range | tuple[int, ...], int] = {}
    for i, layer in _layers(plan):
        for head in layer.heads:
            first.setdefault(planes_of(head, plan), i)
    if len(first) > 1:
        i, j = list(first.values())[:2]
        where = f"layers {i} and {j} keep" if i != j else f"heads of layer {i} keep"
        raise _No(f"{where} different rotary planes; one set for the model is needed")
    (planes,) = first
    return planes == range(plan.shape.qk_dim // 2)


def _no_windows(plan: Plan) -> None:
    window = next((w for w in plan.shape.windows if w), None)
    if window is not None and window < plan.shape.context:
        raise _No(f"it has sliding windows of {window} tokens, which are not supported there")


def _llama_or_windowed(plan: Plan) -> str:
    """Any of the families is a Llama with other options, but for sliding windows."""
    shape = plan.shape
    if not any(w is not None and w < shape.context for w in shape.windows):
        return "llama"
    if shape.family == "phi3":
        raise _No("phi3 has no free head width, and llama no sliding windows")
    return shape.family


def _mimo(plan: Plan) -> None:
    """The classes with keys and values of two widths have neither windows nor other biases."""
    _no_windows(plan)
    if "output" in plan.layers[0].biases or plan.shape.ffn_biases:
        raise _No("keys and values differ in width, and the class that allows it has fewer biases")


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("stock", "transformers without headwise", _stock, one_width=True),
        Target("gguf", "llama.cpp", _gguf, one_width=True),
        Target(
            "gguf-cuda",
            "llama.cpp's flash attention on CUDA",
            _gguf_cuda,
            Kernels(widths=CUDA_WIDTHS),
            equal_sides=True,
            one_width=True,
        ),
        Target("vllm", "vLLM", _vllm, Kernels(SERVED_MULTIPLE), equal_sides=True),
        Target(
            "vllm-cpu",
            "vLLM on a CPU",
            _vllm_cpu,
            Kernels(SERVED_MULTIPLE, CPU_WIDTHS),
            equal_sides=True,
        ),
        Target("onnx", "ONNX Runtime", _onnx),
        Target("padded", "the source's own class", _padded),
    )
}
