"""All claims, in the order of the table; each file of ``MODULES`` holds one ``CLAIM``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence

from headwise.errors import did_you_mean
from headwise.reproduce.claim import Claim, ReproduceError

MODULES = (
    "bound_curve",
    "allocation_256",
    "four_gram",
    "induction",
    "nonlinear",
    "saturation_length",
    "saturation_width",
    "student_head",
    "later_layers",
    "planned_vs_uniform",
    "adaptive",
    "robustness",
    "single_is_tied_multi",
    "ensemble",
    "jl_floor",
    "low_rank_bottleneck",
    "memorization",
    "query_free",
    "query_free_decay",
    "fold_exact",
    "relu_skip",
)


@functools.cache
def claims() -> dict[str, Claim]:
    """Every claim by its id."""
    modules = [importlib.import_module(f"headwise.reproduce.{name}") for name in MODULES]
    found: dict[str, Claim] = {module.CLAIM.id: module.CLAIM for module in modules}
    assert len(found) == len(MODULES), "two claims share an id"
    return found


def chosen(ids: Sequence[str]) -> tuple[Claim, ...]:
    """The named claims in the order of the table; without names, all."""
    known = claims()
    for name in ids:
        if name not in known:
            raise ReproduceError(
                f"Expected the id of a claim, got {name!r}. {did_you_mean(name, known)}"
            )
    return tuple(claim for name, claim in known.items() if not ids or name in ids)
