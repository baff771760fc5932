"""Words of the command line turned into values, each with one clear sentence when it cannot be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from headwise.errors import BudgetError, HeadwiseError, did_you_mean

if TYPE_CHECKING:
    from headwise.plan import Budget, Resource

MAX_COUNTS = 10_000
_PROJECTIONS: tuple[Literal["query", "key", "value"], ...] = ("query", "key", "value")


def counts(text: str, name: str) -> tuple[int, ...]:
    """Whole numbers: `8`, `1,2,4`, `1-80`, or a mixture."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?", part)
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else 0
        if not 1 <= first <= last or len(found) + last - first >= MAX_COUNTS:
            raise HeadwiseError(
                f"{name} must be whole numbers from 1 up, such as 8, 1,2,4 or 1-80 (at most "
                f"{MAX_COUNTS} of them), got {text!r}."
            )
        found += range(first, last + 1)
    return tuple(found)


def numbers(text: str, name: str) -> tuple[float, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise HeadwiseError(
            f"{name} must be numbers separated by commas, such as 1,0.5,0.25, got {text!r}."
        ) from None


def budget(
    given: dict[Resource, Sequence[str] | None], names: dict[Resource, str] | None = None
) -> Budget:
    """The budget of options that may each be given once; `names` of options that differ."""
    from headwise.plan import Budget, Limit

    limits: dict[str, Limit] = {}
    for resource, texts in given.items():
        option = (names or {}).get(resource, f"--{resource.replace('_', '-')}")
        for text in texts or ():
            limit = Limit.parse(text, option)
            if limits.setdefault(resource, limit) != limit:
                raise BudgetError(
                    f"{option} must be given once, got {limits[resource]} and {limit}, which "
                    "contradict each other; keep one of them."
                )
    return Budget(**limits)


def projections(given: Sequence[str]) -> tuple[Literal["query", "key", "value"], ...]:
    """Names of projections, each once."""
    for name in given:
        if name not in _PROJECTIONS:
            raise HeadwiseError(
                f"--identity must be query, key or value, got {name!r}. "
                f"{did_you_mean(name, _PROJECTIONS)}"
            )
    return tuple(p for p in _PROJECTIONS if p in given)
