"""Charts without their engine: every figure is an empty drawing.

Drawing takes most of the time of a small command; tests of files and faults need only that a
picture is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BLANK = '<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"></svg>'


def install(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Leave all pictures of this process blank, or for as long as what is put stays."""
    import altair
    import vl_convert

    def save(self: Any, target: Any, format: str, **how: Any) -> None:  # noqa: A002
        target.write(BLANK if format == "svg" else BLANK.encode())

    put(altair.TopLevelMixin, "save", save)
    put(vl_convert, "javascript_bundle", lambda *words, **how: "")
