"""How far two results that should be equal may lie apart, and why; how large a control must be.

float32 rounds to 6e-8. The logits of the tiny models reach 10 and come out of three layers of sums
of some tens of numbers, so another order of additions moves them by some 1e-6. The bounds stand a
little above the largest difference seen in any family, which is said beside each. What a control
changes (a weight, a place, a mask) moves the result by FELT or SEEN: far above all of them.
"""

from typing import Any

# For torch.testing.assert_close, of logits, losses and attention weights in float32.
SAME = {"atol": 1e-6, "rtol": 0}  # the same operations on the same numbers (seen: 0)
STOCK = {"atol": 1e-5, "rtol": 0}  # a uniform plan for the stock model: nearly the same (2e-6)
REORDERED = {"atol": 2e-5, "rtol": 1e-5}  # a cache, head classes, merged weights (1.5e-5)

# Shares of the largest output: see `difference`.
IDENTITY = 1e-5  # weights folded in float64 and stored in float32, for the dense ones (2e-6)
BFLOAT16 = 4e-3  # half a step of a number with 8 bits (0)
BFLOAT16_OPT = 3e-2  # OPT rounds its queries after they are scaled, not the scores (8e-3)

# What a control must do at least.
FELT = 1e-3  # of the largest output
SEEN = 1e-2  # absolute, of logits


def difference(found: Any, expected: Any) -> float:
    """The largest difference as a share of the largest expected number."""
    return float((found - expected).abs().max() / expected.abs().max())
