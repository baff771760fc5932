"""How the library reports progress; printing is the caller's job.

progress("training: loss 2.31", 40, 300)    step 40 of 300; after the colon, a detail
note(progress, "Resuming after step 40.")   a message: 0 of 0
"""

from __future__ import annotations

from collections.abc import Callable

# The name of the step, the amount done, the total.
Progress = Callable[[str, int, int], None]


def silent(step: str, done: int, total: int) -> None:
    """Report nothing."""


def note(progress: Progress, message: str) -> None:
    """Report a message instead of a count."""
    progress(message, 0, 0)
