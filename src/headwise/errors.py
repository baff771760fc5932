"""The errors a user can cause. Each message says what was expected, what came, and what to do.

Anything else that is raised is our own mistake and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_REASON = 200  # characters of another library's message that ours repeats


class HeadwiseError(Exception):
    """Bad input; the command line prints it as one sentence and exits with code 2."""


class PlanError(HeadwiseError):
    """A plan, or a file that should hold one, is not valid."""


class BudgetError(HeadwiseError):
    """A budget is malformed, contradicts another, or is too small for any plan."""


class TheoryError(HeadwiseError):
    """A formula was asked outside the range in which it holds."""


class OutputError(HeadwiseError):
    """An output cannot be written, or would overwrite something."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: a guess, or the full list of names."""
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {', '.join(names)}."


def reason_of(error: BaseException) -> str:
    """Another library's error in one line, its kind first: what our message puts in brackets."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:MOST_REASON]}"
