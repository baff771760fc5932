"""Which widths a fitted plan may have besides the budget; the source of the defaults.

Light on import: the command line's help reads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headwise.errors import PlanError, did_you_mean, quoted

GRANULARITIES = ("layer", "head", "model")
# Training repairs dropped query-key directions better than dropped value directions: in a cut that
# is recovered they count this much of their sensitivity (docs/compress.md, "What the allocation
# brings").
RECOVERED_QK_WEIGHT = 0.4
FIT_POLICIES = (
    "sensitivity",
    "uniform",
    "narrower-late",
    "wider-late",
    "saturation",
    "energy",
    "random",
)


def qk_weight(given: float | None, *, recovered: bool) -> float:
    """The weight of queries and keys: the given one, or what suits a cut that is recovered."""
    return given if given is not None else RECOVERED_QK_WEIGHT if recovered else 1.0


def policy_and_seed(policy: str) -> tuple[str, int]:
    """A policy's name and the seed of `random:7`; a wrong one is refused."""
    name, _, seed = policy.partition(":")
    if name not in FIT_POLICIES:
        raise PlanError(f"unknown policy {quoted(policy)}. {did_you_mean(name, FIT_POLICIES)}")
    if seed and (name != "random" or not seed.isdecimal()):
        raise PlanError(
            f"only random takes a seed, such as random:7, got {quoted(policy)}; correct it."
        )
    return name, int(seed or 0)


def check_multiples(
    multiple_of: int, min_dim: int | None, names: str = "multiple-of and min-dim"
) -> None:
    """Raise unless both are at least 1."""
    if multiple_of < 1 or (min_dim is not None and min_dim < 1):
        raise PlanError(f"{names} must be at least 1, got {multiple_of} and {min_dim}.")


@dataclass(frozen=True, slots=True)
class WidthRules:
    """Which widths a fitted plan may have, and the batch and context of its costs."""

    granularity: str = "layer"  # equal widths within a layer or the whole model, or free per head
    multiple_of: int = 8  # of dimensions, query-key widths too
    min_dim: int | None = None  # None: one multiple
    context: int | None = None  # for FLOPs and traffic; None: the shape's
    batch: int = 1  # for traffic
    equal_sides: bool = False  # what is tied ties queries and keys to values, too
    max_classes: int | None = None  # granularity head: most different widths in a layer
    drop_groups: bool = False  # whole head groups may go; not with granularity model
    ffn_multiple_of: int = 64  # of neurons
    min_ffn_dim: int | None = None  # None: one multiple
    cut_ffn: bool = True  # MLPs may be narrowed, where a limit counts them
    widths: tuple[int, ...] | None = None  # heads are as wide as one of these; None: any multiple
    one_ffn_dim: bool | None = None  # one width for all MLPs; None: with granularity model
    qk_weight: float = 1.0  # of query-key directions, where a policy goes by sensitivity

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise PlanError(
                f"granularity must be layer, head or model, got {quoted(self.granularity)}. "
                f"{did_you_mean(self.granularity, GRANULARITIES)}"
            )
        check_multiples(self.multiple_of, self.min_dim)
        check_multiples(self.ffn_multiple_of, self.min_ffn_dim, "ffn-multiple-of and min-ffn-dim")
        if self.batch < 1 or (self.context is not None and self.context < 1):
            raise PlanError(
                f"batch and context must be at least 1, got {self.batch} and {self.context}."
            )
        if not 0 < self.qk_weight < math.inf:
            raise PlanError(f"qk-weight must be a number above 0, got {self.qk_weight:g}.")
        if self.max_classes is not None and self.max_classes < 1:
            raise PlanError(f"max-classes must be at least 1, got {self.max_classes}.")

    @property
    def least(self) -> int:
        """The minimum width of a head that is not already narrower."""
        return self.multiple_of if self.min_dim is None else self.min_dim

    @property
    def least_ffn(self) -> int:
        """The minimum width of an MLP that is not already narrower."""
        return self.ffn_multiple_of if self.min_ffn_dim is None else self.min_ffn_dim

    @property
    def ties_ffn(self) -> bool:
        """Whether all MLPs have one width."""
        return self.granularity == "model" if self.one_ffn_dim is None else self.one_ffn_dim
