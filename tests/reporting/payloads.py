"""Names that try to be more than names, and folders in which every name is one of them."""

from __future__ import annotations

import html.parser
import json
import os
from pathlib import Path

HIT = "window.hit=1"
PAYLOADS = {
    "script": f"<script>{HIT}</script>",
    "image": f"<img src=x onerror={HIT}>",
    "end of script": f"</script><script>{HIT}</script><!--",
    "end of style": f"</style></title><script>{HIT}</script>",
    "attribute": f'"\'><svg onload={HIT}> autofocus onfocus={HIT} x="',
    "template": "{{ 7*7 }}{% include 'page.html' %}{# gone #}",
    "link": f"[x](javascript:{HIT}) ![y](x) <javascript:{HIT}>",
    "markdown": "`a` | b \\| c\n\n# d\n\n---\n\n```\n* e_f_ **g** ~~h~~",
    "entity": "&lt;script&gt;&#96;&amp;",
    "terminal": "a\x1b]0;owned\x07\x1b[31mred\x9b2Jb\r\x08",
    "direction": "abc\u202etxt.exe\u2066\u200f",
    "markup": "[bold]x[/bold] [/nothing] :bomb: [link=file:///]y",
    "expression": "datum.constructor('x')() {signal} '+alert(1)+'",
}
# What must be one of a few words to be a valid record, or is data of another kind.
_FIXED = frozenset(
    {"format", "kind", "role", "status", "objective", "plan", "tensors", "budget", "point"}
)
_FREE_KEYS = frozenset({"versions", "settings", "methods"})


def poisoned(data, payload, key=""):
    """JSON-ready data with the payload in the place of every name, also of free keys."""
    if key in _FIXED or key.endswith("tensors_sha256") or key == "profile_sha256":
        return data
    if isinstance(data, str):
        return payload
    if isinstance(data, list):
        return [poisoned(one, payload) for one in data]
    if isinstance(data, dict):
        made = {name: poisoned(one, payload, name) for name, one in data.items()}
        if key in _FREE_KEYS and made:
            made[payload] = next(iter(made.values()))
        return made
    return data


def poison(path: Path, payload: str) -> None:
    """Put the payload into every name of a JSON file."""
    path.write_text(json.dumps(poisoned(json.loads(path.read_text()), payload)))


def folder_name(payload: str) -> str:
    """The payload as far as a folder can be called so."""
    return payload.replace("/", "\\")[:200]


class Elements(html.parser.HTMLParser):
    """The elements of a page in their order, those of drawings apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.drawn: set[str] = set()
        self.bad: list[tuple[str, str, str | None]] = []
        self._depth = 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag == "svg" or self._depth:
            self._depth += tag == "svg"
            self.drawn.add(tag)
        else:
            self.tags.append(tag)
        for name, value in attrs:
            scripted = (value or "").strip().lower().startswith("javascript:")
            if name.startswith("on") or scripted:
                self.bad.append((tag, name, value))

    def handle_endtag(self, tag):
        self._depth -= tag == "svg" and self._depth > 0


DRAWING = {
    "svg",
    "g",
    "path",
    "line",
    "rect",
    "text",
    "tspan",
    "defs",
    "clippath",
    "lineargradient",
}
DRAWING |= {"stop", "circle", "title", "desc"}


def write_everything(made, folder: Path, payload: str) -> dict[str, Path]:
    """One folder of each kind that a report is made of, with the payload in every name."""
    folder.mkdir(parents=True, exist_ok=True)
    name = folder_name(payload)
    profile = made.profile(folder / f"p{name}", notes=("a note",))
    poison(profile / "profile.json", payload)
    cut = made.cut(folder / f"c{name}", verification=made.verification())
    for file in ("headwise.json", "verify.json"):
        poison(cut / file, payload)
    run = made.run(folder / f"r{name}", status="interrupted")
    poison(run / "run.json", payload)
    compared = folder / f"d{name}"
    compared.mkdir()
    (compared / "compare.json").write_text(json.dumps(poisoned(made.comparison(), payload)))
    return {"profile": profile, "cut": cut, "run": run, "compare": compared}


def is_quiet_text(text: str) -> bool:
    """Whether a terminal shows the text and obeys none of it."""
    return all(c.isprintable() or c in "\n\t" for c in text)


def broken_name(folder: Path) -> Path:
    """A folder whose name is not UTF-8, where the file system allows one."""
    return Path(os.fsdecode(os.fsencode(folder) + b"/bad\xff\x80"))
