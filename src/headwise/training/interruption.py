"""Ctrl-C and SIGTERM as a wish, granted at the next step boundary.

The first signal asks the loop to save and stop; a second one acts as it did before.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interruption:
    """Which signal asked to stop; 0 while none did."""

    def __init__(self) -> None:
        self.signal = 0


@contextlib.contextmanager
def interruptions() -> Iterator[Interruption]:
    """While inside, SIGINT and SIGTERM are only noted (in the main thread; elsewhere nothing)."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before: dict[int, Any] = {}

    def note(number: int, _frame: FrameType | None) -> None:
        interruption.signal = number
        for each, handler in before.items():
            signal.signal(each, handler)

    for each in (signal.SIGINT, signal.SIGTERM):
        before[each] = signal.signal(each, note)
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
