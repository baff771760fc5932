"""The claims, one folder per paper, and the list of them in the order of the table."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence

from headwise.errors import did_you_mean
from headwise.papers.harness.claim import Claim, ReproduceError

PLACES = (
    "allocation.formulas:BOUND_CURVE",
    "allocation.formulas:ALLOCATION_256",
    "allocation.eight_heads:FOUR_GRAM",
    "allocation.eight_heads:INDUCTION",
    "allocation.eight_heads:NONLINEAR",
    "allocation.saturation:SATURATION_LENGTH",
    "allocation.saturation:SATURATION_WIDTH",
    "allocation.student_head:CLAIM",
    "allocation.width_returns:CLAIM",
    "allocation.depth:HEAD_DOMINANCE",
    "allocation.depth:HEAD_SPECTRA",
    "allocation.later_layers:CLAIM",
    "allocation.planned_vs_uniform:CLAIM",
    "allocation.planned_vs_uniform:CLASSIFICATION",
    "allocation.adaptive:CLAIM",
    "allocation.two_layers:CLAIM",
    "allocation.three_tokens:WIDTH",
    "allocation.three_tokens:CLAIM",
    "allocation.six_layers:CLAIM",
    "allocation.six_layers:LANGUAGE",
    "allocation.robustness:CLAIM",
    "head_counts.tied_heads:CLAIM",
    "head_counts.ensemble:CLAIM",
    "head_counts.jl_floor:CLAIM",
    "head_counts.low_rank_bottleneck:CLAIM",
    "head_counts.memorization:CLAIM",
    "query_free.query_free:CLAIM",
    "query_free.query_free_decay:CLAIM",
    "query_free.folding:FOLD_EXACT",
    "query_free.folding:RELU_SKIP",
    "query_free.folding:RELU_SKIP_IFF",
)


@functools.cache
def known_claims() -> dict[str, Claim]:
    """Every claim by its id."""
    found: dict[str, Claim] = {}
    for place in PLACES:
        module, _, name = place.partition(":")
        claim: Claim = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        assert claim.id not in found, f"two claims are called {claim.id}"
        found[claim.id] = claim
    return found


def choose_claims(ids: Sequence[str]) -> tuple[Claim, ...]:
    """The named claims in the order of the table; without names, all."""
    known = known_claims()
    for name in ids:
        if name not in known:
            raise ReproduceError(
                f"Expected the id of a claim, got {name!r}. {did_you_mean(name, known)}"
            )
    return tuple(claim for name, claim in known.items() if not ids or name in ids)
