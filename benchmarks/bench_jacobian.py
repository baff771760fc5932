"""The Jacobian norm against numpy.linalg.eigvalsh, on the same rows, as one JSON document."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
from timing import interleaved

from headwise.theory.saturation import jacobian_norm

LENGTH = 1024
TEMPERATURES = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # almost uniform to almost one-hot


def probabilities(seed: int = 0) -> np.ndarray:
    """One row of softmax probabilities for each temperature."""
    scores = np.random.default_rng(seed).normal(size=(len(TEMPERATURES), LENGTH))
    e = np.exp(scores * np.array(TEMPERATURES)[:, None])
    return np.asarray(e / e.sum(-1, keepdims=True))


def dense_norm(p: np.ndarray) -> np.ndarray:
    """The same norms by a full symmetric eigenvalue solver, one row at a time."""
    return np.array([np.linalg.eigvalsh(np.diag(row) - np.outer(row, row))[-1] for row in p])


def main() -> None:
    p = probabilities()
    timings = interleaved(
        {"jacobian_norm": lambda: jacobian_norm(p), "eigvalsh": lambda: dense_norm(p)},
        repeats=5,
        warmup=1,
    )
    document = {
        "length": LENGTH,
        "rows": len(p),
        "seconds": {name: asdict(timing) for name, timing in timings.items()},
        "ratio": timings["eigvalsh"].median / timings["jacobian_norm"].median,
        "ratio_target": 100,
        "max_abs_difference": float(np.abs(jacobian_norm(p) - dense_norm(p)).max()),
        "max_abs_difference_target": 1e-9,
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
