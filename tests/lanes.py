"""The two lanes: `make test` runs everything, `make test-fast` (`-m "not slow"`) its quick part.

In the fast lane generated examples are fewer, and only the tests of reports draw. What is left out
runs in the other lane.
"""

from __future__ import annotations

from typing import Any

import pytest

FAST_MARKS = "not slow"
is_fast = False  # set by conftest.py before any test module is imported


def examples(n: int) -> int:
    """So many generated examples, a seventh of them in the fast lane."""
    return max(1, n // 7) if is_fast else n


def every(n: int) -> int:
    """The step of a walk through many cases, seven times as long in the fast lane."""
    return 7 * n if is_fast else n


def slow_but(quick: tuple[Any, ...], values: Any) -> list[Any]:
    """Parameters of a test, all of them slow but the quick ones."""
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)),
            marks=() if one in quick else (pytest.mark.slow,),
        )
        for one in values
    ]
