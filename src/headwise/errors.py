"""The errors a user can cause. Each message says what was expected, what came, and what to do.

Anything else that is raised is our own mistake and keeps its traceback.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable

MOST_REASON = 200  # characters of another library's message that ours repeats
MOST_SENTENCE = 1200  # characters of an error
_LONG_WORD = re.compile(r"\S{301,}")


class HeadwiseError(Exception):
    """Bad input; the command line prints it as one sentence and exits with code 2.

    However long what came is, the sentence is not: long words and long sentences are cut.
    """

    def __init__(self, sentence: object = "") -> None:
        super().__init__(shortened(str(sentence)))


class PlanError(HeadwiseError):
    """A plan, or a file that should hold one, is not valid."""


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
    """The sentence with words of more than 300 characters, and beyond 1,200, cut to what tells."""
    plain = _LONG_WORD.sub(lambda found: f"{found[0][:MOST_REASON]}…", sentence)
    return plain if len(plain) <= MOST_SENTENCE else f"{plain[:900]} … {plain[-250:]}"


def quoted(value: object) -> str:
    """What came, as an error quotes it: at most 200 characters of it, on one line."""
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
