"""Timings that can be compared: warmed up, interleaved, and with their spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call, or a ratio: the median and the quartiles around it."""

    median: float
    q1: float
    q3: float


def interleaved(
    callables: Mapping[str, Callable[[], object]],
    repeats: int = 9,
    warmup: int = 2,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, Timing]:
    """Time each callable in turn, round after round, so that a slow moment strikes all alike.

    On a busy machine the `clock` of the process itself (`time.process_time`) does not count the
    time others take; it adds up the threads, so it compares one thread's work only.
    """
    seconds = rounds(callables, repeats, warmup, clock)
    return {name: spread(values) for name, values in seconds.items()}


def rounds(
    callables: Mapping[str, Callable[[], object]],
    repeats: int = 9,
    warmup: int = 2,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, list[float]]:
    """The seconds of every callable in every round."""
    if repeats < 2:
        raise ValueError(f"Expected at least 2 repeats for a spread, got {repeats}.")
    for _ in range(warmup):
        for call in callables.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in callables}
    for _ in range(repeats):
        for name, call in callables.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
    return seconds


def spread(values: list[float]) -> Timing:
    """The median and the quartiles of some figures, such as ratios taken round by round."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(median, q1, q3)
