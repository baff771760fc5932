"""How much memory a step will need at its peak, computed from the shapes before loading anything.

    profile     weights ─ once, in the dtype they run in
                + what one chunk's backward pass needs of its forward pass, + logits and gradients
    cut         one layer, dense and cut, with the copies and solves of its fit; the hidden states
                of the calibration text
    verify      both models, or where memory is short one at a time, + a group of windows' logits or
                the caches of the longest point of speed, whichever is more
    recover     both models, + gradients and two moments of what is trained, + a batch

`Need.check` compares the sum with the available memory and raises before anything is loaded. If the
system does not report its available memory, nothing is compared. Only CPU memory is checked.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from headwise.errors import HeadwiseError
from headwise.plan import ModelShape, Plan
from headwise.planning.cost import cost, ffn_params
from headwise.progress import Progress, note

NUMBER = 4  # bytes: on a CPU everything runs in float32
# What a process grows by whatever the model: tokenizer, thread stacks, the libraries' workspace.
SETTLING = 96 * 2**20
# Numbers that a layer's backward pass keeps of each token, in model widths and in FFN widths:
# the inputs of both norms, queries, keys and values before and after rotation, both products of
# the gate, the neurons. Weights ask for no gradient, so the inputs of the projections are not kept.
KEPT_WIDTHS, KEPT_FFN_WIDTHS = 12, 5
# Copies of the logits: themselves, their logarithms, gradients.
KEPT_LOGITS = 4
# Copies of them in recovery, whose loss is computed in pieces: both models' and a gradient.
LOSS_LOGITS = 3
# Copies of one layer that its cut holds: dense, cut, its fit with gradients and moments, solves.
CUT_LAYERS = 5.5
CUT_GRAMS = 6  # matrices in float64, as wide and high as an MLP whose W_down is refitted
CUT_MOMENTS = 4  # matrices as wide and high as a whole MLP, when twins are looked for
CUT_STATES = 6  # copies of the hidden states of the whole calibration text
LOGIT_BYTES = 256 * 2**20  # of fp32 logits made at once; sets how many windows run together
# Speed is measured with a cache as heavy as the weights, and with contexts this much longer.
LONGER = 4
# Numbers of each token that a forward pass alone has at a time.
PASSING_WIDTHS, PASSING_FFN_WIDTHS = 6, 3


@dataclass(frozen=True, slots=True)
class Need:
    """The expected peak of a step, in bytes, by what it is for."""

    step: str
    held: int  # by this process already
    weights: int
    work: int  # activations, gradients, moments, logits

    @property
    def peak(self) -> int:
        """The expected peak of this process."""
        return self.held + self.more

    @property
    def more(self) -> int:
        """What is needed beyond what the process holds."""
        return self.weights + self.work + SETTLING

    @property
    def sentence(self) -> str:
        """The message for the user."""
        return (
            f"{self.step} will need about {size(self.peak)} of memory at its peak: "
            f"{size(self.weights)} of weights, {size(self.work)} of working memory, "
            f"{size(self.held + SETTLING)} for the program."
        )

    @property
    def fits(self) -> bool:
        """Whether enough memory is available, or the system does not say."""
        left = available()
        return left is None or self.more <= left

    def check(self, progress: Progress, *, advice: str) -> Progress:
        """Raise if not enough memory is available; call it before anything is loaded.

        The returned progress reports the peak when the work begins, so that it does not appear
        before an error about an option.
        """
        left = available()
        if left is not None and self.more > left:
            raise HeadwiseError(
                f"{self.sentence.rstrip('.')}; {size(left)} are available: {advice}."
            )
        told = False

        def telling(what: str, done: int, total: int) -> None:
            nonlocal told
            if not told:
                told = True
                note(progress, self.sentence)
            progress(what, done, total)

        return telling


def profile_need(plan: Plan, *, tokens: int, number: int = NUMBER) -> Need:
    """Profiling with `tokens` in a chunk; `number` is the bytes of a weight."""
    work = tokens * (_kept(plan) + KEPT_LOGITS * plan.shape.vocab_size)
    return Need("Profiling", held(), number * cost(plan).params, NUMBER * work)


def cut_need(plan: Plan, cut: Plan, *, tokens: int) -> Need:
    """Cutting layer by layer from one plan to another, with `tokens` of calibration text."""
    shape, total = plan.shape, cost(plan)
    layers = total.params - _tables(shape)
    changed = [x for x in zip(plan.ffn_dims, cut.ffn_dims, strict=False) if x[0] != x[1]]
    whole, refitted = (max(widths) for widths in zip(*changed, strict=True)) if changed else (0, 0)
    states = CUT_STATES + (1 if refitted else 0)  # what the dense MLP gave
    work = CUT_LAYERS * layers / shape.n_layers + states * tokens * shape.d_model
    work += max(CUT_MOMENTS * whole**2, 2 * CUT_GRAMS * refitted**2)  # one after the other
    return Need("Cutting", held(), NUMBER * _tables(shape), int(NUMBER * work))


def verify_need(
    plans: tuple[Plan, Plan],
    *,
    tokens: int,
    most: int | None = None,
    number: int = NUMBER,
    in_turns: bool = False,
    timed: bool = False,
) -> Need:
    """Comparing two models, cut and dense, on windows of `tokens`, `most` of them in all.

    `in_turns`: one model at a time, the other's predictions on disk. `timed`: the speed is
    measured too, of many sequences only where both models and their caches fit.
    """
    shape = plans[1].shape
    together = tokens * max(1, windows_at_once(max(1, shape.vocab_size), tokens) // 2)
    if most is not None:
        together = min(together, max(most, tokens))
    widest = max(max(one.ffn_dims) for one in plans)
    passing = PASSING_WIDTHS * shape.d_model + PASSING_FFN_WIDTHS * widest
    work = together * (2 * shape.vocab_size + passing)
    params = [cost(one).params for one in plans]
    weights = number * (max(params) if in_turns else sum(params))
    work *= NUMBER
    if timed and not in_turns:
        work = max(work, _serving_caches(plans, weights, number * params[1]))
    return Need("Verifying", held(), weights, work)


def recover_need(cut: Plan, dense: Plan, *, tokens: int) -> Need:
    """Training a cut model's attention on `tokens` a step, beside the dense one."""
    params = cost(cut).params + cost(dense).params
    pairs = zip(cut.ffn_dims, dense.ffn_dims, strict=True)
    mlps = sum(ffn_params(cut.shape, own) for own, whole in pairs if own != whole)
    trained = 3 * (cost(cut).attn_params + mlps)
    # Gradients pass through every layer; the inputs of trained projections are kept too.
    kept = _kept(cut) + 4 * cut.shape.d_model * cut.shape.n_layers
    logits = LOSS_LOGITS * cut.shape.vocab_size
    return Need(
        "Recovering", held(), NUMBER * params, NUMBER * (trained + tokens * (kept + logits))
    )


def windows_at_once(vocabulary: int, window: int) -> int:
    """How many windows run together: as many as LOGIT_BYTES of logits allow."""
    return max(1, min(64, LOGIT_BYTES // (4 * window * vocabulary)))


def available() -> int | None:
    """Bytes that can still be taken: free and reclaimable memory and swap; None if unknown."""
    left = _meminfo()
    if left is None:
        try:
            left = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):  # not every system has these
            return None
    group = _group_left()
    return left if group is None else min(left, group)


def held() -> int:
    """Bytes of memory that this process holds now; 0 if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError, LookupError):
        return 0


def size(count: int) -> str:
    """A number of bytes in MiB or GiB."""
    if count < 2**30:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / 2**30:.1f} GiB"


def _serving_caches(plans: tuple[Plan, Plan], weights: int, dense: int) -> int:
    """Bytes of caches at the longest point of speed that fits; `dense` are the dense weights."""
    cut_cache, dense_cache = (cost(one).kv_bytes for one in plans)
    if not dense_cache:
        return 0
    # The dense model is timed twice, with its own code and with the cut one's.
    each = 2 + cut_cache / dense_cache
    left = available()
    for times in (LONGER, 1):
        caches = times * dense * each
        if left is None or weights + 2 * caches <= left:  # as `timed_point` decides
            return int(caches + times * dense)  # the one that is written to is a copy
    return 0


def _kept(plan: Plan) -> int:
    """Numbers that a backward pass keeps of one token."""
    shape = plan.shape
    ffn = (KEPT_FFN_WIDTHS if shape.ffn_gated else 3) * sum(plan.ffn_dims)
    return shape.n_layers * KEPT_WIDTHS * shape.d_model + ffn


def _tables(shape: ModelShape) -> int:
    """Numbers in the embeddings."""
    return shape.vocab_size * shape.d_model * (1 if shape.tied_embeddings else 2)


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return found["MemAvailable"] + found.get("SwapFree", 0)
    except (OSError, ValueError, LookupError):
        return None


def _group_left() -> int | None:
    """What a container's limit leaves; caches do not count, for they give way."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        stat = (group / "memory.stat").read_text(encoding="ascii").splitlines()
        cached = next(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
        return None if limit == "max" else max(0, int(limit) - used + cached)
    except (OSError, ValueError, LookupError, StopIteration):
        return None
