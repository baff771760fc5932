"""The pieces a page is made of, as HTML text; whatever comes from a file is escaped here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from headwise import __version__
from headwise.report.figure import Figure, inline_svg

_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


@dataclass(frozen=True, slots=True)
class Card:
    """One figure of the headline: what it is, its value, and what to compare it with."""

    name: str
    value: str
    beside: str = ""
    mood: str = ""  # good, bad or nothing


def escaped(value: Any) -> str:
    """Text that cannot be mistaken for HTML."""
    return html.escape(str(value))


def paragraph(*sentences: str, quiet: bool = False) -> str:
    """Sentences as one paragraph."""
    kind = ' class="quiet"' if quiet else ""
    return f"<p{kind}>{escaped(' '.join(sentences))}</p>"


def code(text: str) -> str:
    """A command or a program."""
    return f"<pre><code>{escaped(text)}</code></pre>"


def quotation(text: str) -> str:
    """Words a model wrote."""
    return f"<blockquote>{escaped(text)}</blockquote>"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """A table; numbers are aligned to the right, the first cell of a row names it."""
    head = "".join(
        f'<th scope="col"{"" if i == 0 else _RIGHT}>{escaped(name)}</th>'
        for i, name in enumerate(columns)
    )
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    words = f'<caption class="quiet">{escaped(caption)}</caption>' if caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escaped(caption or "Table")}">'
        f"<table>{words}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


_RIGHT = ' class="number"'


def _cells(row: Sequence[Any]) -> str:
    first, *rest = (shown(cell) for cell in row)
    cells = "".join(f"<td{_RIGHT}>{escaped(cell)}</td>" for cell in rest)
    return f'<th scope="row">{escaped(first)}</th>{cells}'


def shown(value: Any) -> str:
    """A number as people read it; other things as they are."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def facts(rows: Iterable[Sequence[Any]]) -> str:
    """Names and what belongs to them; what is not known is left out."""
    body = "".join(
        f'<tr><th scope="row">{escaped(name)}</th><td><code>{escaped(value)}</code></td></tr>'
        for name, value in rows
        if value
    )
    return f'<div class="scroll"><table class="facts"><tbody>{body}</tbody></table></div>'


def cards(items: Iterable[Card]) -> str:
    """The headline."""
    made = "".join(
        f'<li class="card"><h3>{escaped(one.name)}</h3>'
        f'<div class="big {escaped(one.mood)}">{escaped(one.value)}</div>'
        f'<p class="quiet">{escaped(one.beside)}</p></li>'
        for one in items
    )
    return f'<ul class="cards">{made}</ul>'


def warnings(sentences: Sequence[str]) -> str:
    """What to mind."""
    made = "".join(f"<li>{escaped(sentence)}</li>" for sentence in sentences)
    return f'<ul class="warnings">{made}</ul>'


def figures(items: Sequence[Figure], name: str) -> str:
    """Charts beside each other where there is room; `name` is theirs in the whole page."""
    made = "".join(_figure(one, f"{name}{i}") for i, one in enumerate(items))
    return f'<div class="figures">{made}</div>'


def _figure(one: Figure, name: str) -> str:
    numbers = table(one.columns, one.rows, one.title)
    return (
        f"<figure><figcaption><b>{escaped(one.title)}</b>{escaped(one.words)}</figcaption>"
        f'<div role="img" aria-label="{escaped(f"{one.title}. {one.words}")}">'
        f"{inline_svg(one.chart, name)}</div>"
        f"<details><summary>The numbers as a table</summary>{numbers}</details></figure>"
    )


def section(title: str, *parts: str) -> str:
    """A part of the page under its heading."""
    return f"<section><h2>{escaped(title)}</h2>{''.join(parts)}</section>"


def page(title: str, lead: str, *parts: str) -> str:
    """The whole document: no script, no network."""
    style = (files("headwise.report") / "page.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="generator" content="headwise {__version__}">\n'
        f'<title>{escaped(title)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{style}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">Skip to the content</a>\n'
        f"<header><h1>{escaped(title)}</h1>{paragraph(lead, quiet=True)}</header>\n"
        f'<main id="main">{"".join(parts)}</main>\n'
        f"<footer><p>Written by headwise {__version__}.</p></footer>\n</body>\n</html>\n"
    )
