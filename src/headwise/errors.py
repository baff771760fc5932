"""The errors a user can cause. Each message says what was expected, what was given, and what to do.

Any other exception is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable

MOST_REASON = 200  # characters of another library's message that ours repeats
MOST_SENTENCE = 1200  # characters of an error
_LONG_WORD = re.compile(r"\S{301,}")
_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)


class HeadwiseError(Exception):
    """Bad input; the command line prints it as one sentence and exits with code 2.

    Long words and long messages are shortened.
    """

    def __init__(self, sentence: object = "") -> None:
        super().__init__(shortened(str(sentence)))


class PlanError(HeadwiseError):
    """A plan or a plan file is not valid."""


class BudgetError(HeadwiseError):
    """A budget is malformed, contradicts another, or is too small for any plan."""


class TheoryError(HeadwiseError):
    """A formula was used outside the range in which it holds."""


class OutputError(HeadwiseError):
    """An output cannot be written, or would overwrite something."""


class StoppedError(HeadwiseError):
    """The work was interrupted (Ctrl-C, SIGTERM) and has saved its state."""

    def __init__(self, signal: int) -> None:
        super().__init__("Stopped. Run the same command again to resume.")
        self.signal = signal


def shortened(sentence: str) -> str:
    """The sentence with words over 300 characters shortened, and at most 1,200 characters long."""
    plain = _LONG_WORD.sub(lambda found: f"{found[0][:MOST_REASON]}…", sentence)
    return plain if len(plain) <= MOST_SENTENCE else f"{plain[:900]} … {plain[-250:]}"


def quoted(value: object) -> str:
    """A value as an error quotes it: at most 200 characters, on one line."""
    text = repr(value) if not isinstance(value, BaseException) else " ".join(str(value).split())
    return text if len(text) <= MOST_REASON else f"{text[:MOST_REASON]}…"


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with everything invisible written as an escape (`\\x1b`): safe on any screen.

    Control characters can move a terminal's cursor or set its title, direction marks can reorder
    what is read, and lone surrogates (a file name that is not UTF-8) cannot be written at all.
    """
    return "".join(c if c in keep or _is_plain(c) else _escape(c) for c in text)


def _is_plain(character: str) -> bool:
    return unicodedata.category(character) not in _INVISIBLE or character in _JOINERS


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_JOINERS = "\u200c\u200d"  # letters of some scripts and emoji are written with them


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: a guess, or the full list of names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {', '.join(names)}."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch has a kind of its own for a GPU's only."""
    told = isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None
    return isinstance(error, MemoryError) or told


def reason_of(error: BaseException) -> str:
    """Another library's error in one line, its type first; our messages put it in brackets."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:MOST_REASON]}"
