"""HTML templates that escape all values.

Names of folders and texts, notes and generated text are untrusted. In a template every
value is escaped unless it is `Markup`, which only our own files and charts are. Values inside a
script are JSON in which no character can end the script (`tojson`).
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from headwise import __version__
from headwise.errors import HeadwiseError

try:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
except ImportError as missing:
    raise HeadwiseError(
        "Pages need jinja2, which is not installed; run: pip install 'headwise[plot]'."
    ) from missing


_HOME = "headwise.reporting"  # whose templates others may include


def page_text(template: str, *, package: str = _HOME, **values: Any) -> str:
    """A page as text that can be written as UTF-8; its template lies in the package's templates."""
    text = _environment(package).get_template(template).render(values)
    # A file name that is not UTF-8 has lone surrogates, which no file can hold.
    return text.encode("utf-8", "replace").decode("utf-8") + "\n"


@cache
def _environment(package: str) -> Environment:
    made = Environment(
        loader=ChoiceLoader([PackageLoader(name, "templates") for name in (package, _HOME)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.globals |= {"version": __version__, "file": _own_file}
    made.filters["figure"] = figure
    return made


def unescaped(text: str) -> Markup:
    """Text that templates take as it is: only for what no user wrote."""
    return Markup(text)  # noqa: S704


def _own_file(name: str) -> Markup:
    """A style sheet or a script of ours."""
    return unescaped((files(_HOME) / "templates" / name).read_text("utf-8"))


def figure(value: Any) -> str:
    """A number as people read it; other values as they are."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
