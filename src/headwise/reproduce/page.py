"""The findings as one HTML file: no scripts, no network, figures inside."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path
from typing import Any

from headwise.reproduce.table import COLUMNS, footing, provenance, reading, shown

STYLE = """
:root { color-scheme: light dark; --line: #8884; --card: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .6rem; text-align: left;
  vertical-align: top; }
th[scope="row"] { font-weight: normal; }
section { border-top: 2px solid var(--line); margin-top: 2rem; }
img { background: #fff; max-width: 100%; border-radius: 4px; padding: .5rem; box-sizing: border-box;
  }
.verdict { border-radius: 4px; padding: .1rem .5rem; white-space: nowrap; font-weight: 600;
  background: var(--card); border: 2px solid #888; }
.holds { border-color: #2a8a3a; }
.in-part { border-color: #b8860b; } .not { border-color: #c0392b; }
.small { font-size: .85rem; opacity: .8; }
"""
CLASSES = {"holds": "holds", "holds in part": "in-part", "does not hold": "not"}


def page(info: dict[str, Any], figures: Path) -> str:
    """The whole page; figures are read from their folder."""
    rows = "".join(_row(claim) for claim in info["claims"])
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in COLUMNS)
    words = "".join(f"<li>{escape(line)}</li>" for line in reading(info))
    sections = "".join(_section(claim, figures) for claim in info["claims"])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>The claims of the papers, measured</title><style>{STYLE}</style></head><body><main>
<h1>The claims of the papers, measured</h1>
<p>Size: {escape(info["size"])}. {escape(provenance(info))}</p>
<ul>{words}</ul>
<div class="wide"><table><thead><tr>{head}</tr></thead>
<tbody>{rows}</tbody></table></div>
{sections}</main></body></html>
"""


def _row(claim: dict[str, Any]) -> str:
    name = escape(claim["id"])
    first = f'<a href="#{name}">{name}</a><br>{escape(claim["statement"])}'
    cells = (
        f'{escape(claim["expected"])}<br><span class="small">{escape(claim["source"])}</span>',
        escape(claim["measured"]),
        str(len(claim["seeds"])),
        _verdict(claim),
    )
    others = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{first}</th>{others}</tr>\n'


def _verdict(claim: dict[str, Any]) -> str:
    kind = CLASSES.get(claim["verdict"], "")
    return f'<span class="verdict {kind}">{escape(claim["verdict"])}</span>'


def _section(claim: dict[str, Any], figures: Path) -> str:
    name = escape(claim["id"])
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in claim["reasons"])
    failures = "".join(
        f"<li>failed: {escape(f['name'])}, seed {f['seed']}: {escape(f['error'])}</li>"
        for f in claim["failures"]
    )
    return f"""<section id="{name}"><h2>{name}</h2>
<p>{escape(claim["statement"])}</p>
<p class="small">{escape(claim["setting"])}</p>
<p>{_verdict(claim)} {escape(claim["measured"])}</p>
<ul>{reasons}{failures}</ul>
{_figure(claim, figures)}{_table(claim)}
<p class="small">{escape(footing(claim))}</p></section>
"""


def _figure(claim: dict[str, Any], figures: Path) -> str:
    if not claim["figure"]:
        return ""
    picture = base64.b64encode((figures / f"{claim['id']}.svg").read_bytes()).decode()
    words = escape(claim["figure_shows"], quote=True)
    return f'<p><img alt="{words}" src="data:image/svg+xml;base64,{picture}"></p>\n'


def _table(claim: dict[str, Any]) -> str:
    if not claim["table"]:
        return ""
    head = "".join(f'<th scope="col">{escape(c)}</th>' for c in claim["table"]["columns"])
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(shown(cell))}</td>' for cell in row)}</tr>"
        for row in claim["table"]["rows"]
    )
    body = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="wide"><table>{body}</table></div>'
