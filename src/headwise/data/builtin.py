"""A corpus that is always there: the running Python's own documentation and standard library.

The order is fixed (help topics, documentation strings of the compiled modules, source files by
name), so one Python version always gives the same text. Files that hold the paths of the machine
Python was built on (`_sysconfigdata…`) are left out, and so are tests and installed packages.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

MAX_CHARS = 16_000_000
_LEFT_OUT = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
)


def python_documents(max_chars: int = MAX_CHARS) -> Iterator[str]:
    """The documents of `builtin:python`, whole ones only, up to `max_chars` characters."""
    used = 0
    for document in _all_documents():
        used += len(document)
        if used > max_chars:
            return
        yield document


def _all_documents() -> Iterator[str]:
    yield from _help_topics()
    yield from _compiled_docs()
    yield from _library_source()


def _help_topics() -> Iterator[str]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


def _compiled_docs() -> Iterator[str]:
    """One document per compiled module: the documentation strings of its public names.

    Values are never written out, because `sys.path` and its like differ between machines.
    """
    for module_name in sorted(n for n in sys.builtin_module_names if not n.startswith("_")):
        module = importlib.import_module(module_name)
        parts = [f"{module_name}\n\n{module.__doc__ or ''}"]
        for name in sorted(n for n in dir(module) if not n.startswith("_")):
            member = getattr(module, name)
            doc = inspect.getdoc(member) if callable(member) else None
            if doc:
                parts.append(f"{module_name}.{name}\n\n{doc}")
        yield "\n\n".join(parts) + "\n"


def _library_source() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix())
    for file in files:
        inside = file.relative_to(root)
        if _LEFT_OUT.intersection(inside.parts) or inside.name.startswith("_sysconfigdata"):
            continue
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if source.strip():
            yield source
