"""The one way the library tells its caller how far long work is; printing is the caller's."""

from __future__ import annotations

from collections.abc import Callable

# What is being done, how much of it is done, how much there is in all.
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """Report to nobody."""
