"""Built-in texts: documentation and source of the running Python and its packages.

    builtin:python     help topics, documentation of the compiled modules, library source
    builtin:prose      help topics and the library's documentation strings: English
    builtin:code       library source
    builtin:packages   the installed packages' descriptions and licences: Markdown and English
    builtin:mixed      the last three together (`headwise.data.mixture`)

The order is fixed, so one Python version always gives the same text; only the packages' text
depends on what is installed. Files that hold the paths of the machine Python was built on
(`_sysconfigdata…`) are left out, and so are tests and the source of installed packages.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

MAX_CHARS = 16_000_000
MAX_KIND_CHARS = 4_000_000  # of one kind of the mixed text: about a million tokens
SHORTEST_DOCUMENT = 200  # characters; what is shorter says little
MIXED = "builtin:mixed"
_LEFT_OUT = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data"}
)


def python_documents(max_chars: int = MAX_CHARS) -> Iterator[str]:
    """The documents of `builtin:python`, whole ones only, up to `max_chars` characters."""
    return _first(_all_documents(), max_chars)


def prose_documents() -> Iterator[str]:
    """The documents of `builtin:prose`: documentation without code."""
    return _first(_all_prose(), MAX_KIND_CHARS)


def code_documents() -> Iterator[str]:
    """The documents of `builtin:code`."""
    return _first(_library_source(), MAX_KIND_CHARS)


def package_documents() -> Iterator[str]:
    """The documents of `builtin:packages`, each once."""
    return _first(dict.fromkeys(_descriptions_and_licences()), MAX_KIND_CHARS)


BUILTIN: dict[str, Callable[[], Iterator[str]]] = {
    "python": python_documents,
    "prose": prose_documents,
    "code": code_documents,
    "packages": package_documents,
}
MIXED_KINDS = ("prose", "code", "packages")


def _first(documents: Iterable[str], max_chars: int) -> Iterator[str]:
    used = 0
    for document in documents:
        used += len(document)
        if used > max_chars:
            return
        yield document


def _all_documents() -> Iterator[str]:
    yield from _help_topics()
    yield from _compiled_docs()
    yield from _library_source()


def _all_prose() -> Iterator[str]:
    yield from _help_topics()
    yield from _compiled_docs()
    for source in _library_source():
        told = "\n\n".join(_docstrings(source))
        if len(told) >= SHORTEST_DOCUMENT:
            yield told + "\n"


def _docstrings(source: str) -> Iterator[str]:
    """The documentation strings of a module and of all that it defines, in order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that a later Python will refuse
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            told = ast.get_docstring(node)
            if told:
                yield told


def _descriptions_and_licences() -> Iterator[str]:
    packages = {p.metadata["Name"]: p for p in importlib.metadata.distributions()}
    for name in sorted(packages, key=lambda n: (n.casefold(), n)):
        package = packages[name]
        told = package.metadata.get_payload()  # type: ignore[attr-defined]
        if isinstance(told, str) and len(told) >= SHORTEST_DOCUMENT:
            yield told
        for file in sorted(package.files or (), key=str):
            if file.name.split(".")[0].upper() in ("LICENSE", "LICENCE", "COPYING"):
                try:
                    told = file.read_text()
                except (OSError, UnicodeDecodeError):
                    continue
                if told and len(told) >= SHORTEST_DOCUMENT:
                    yield told


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
