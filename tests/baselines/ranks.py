"""The rank of a matrix of weights, for counting what its folded form stores."""

import numpy as np

ZERO = 1e-5  # of the largest weight: float32 rounding of what is zero in exact numbers


def rank(matrix) -> int:
    s = np.linalg.svd(np.asarray(matrix, dtype=np.float64), compute_uv=False)
    return int((s > ZERO * max(s[0], 1e-30)).sum())
