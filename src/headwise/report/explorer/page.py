"""The explorer's page: one HTML file with its style, its script and what it knows of the model."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from typing import Any

from headwise.report.explorer.answers import Answers, levels, model_facts
from headwise.report.explorer.grid import Tick, saved_grid

# A live page may talk to the server it came from, a saved one to nobody.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "connect-src {connect}; base-uri 'none'; form-action 'none'"
)


def live_page(answers: Answers, where: str) -> str:
    """The page that asks its server for every plan."""
    steps = levels(answers, {"attn_params": 1, "kv_bytes": 1, "flops": 0.5})
    return _page({**model_facts(answers, where), "levels": steps}, connect="'self'")


def saved_page(answers: Answers, where: str, step: float, tick: Tick | None = None) -> str:
    """The page that holds all its plans."""
    return _page(
        {**model_facts(answers, where), **saved_grid(answers, step, tick)}, connect="'none'"
    )


def _page(facts: dict[str, Any], connect: str) -> str:
    own, room = files("headwise.report.explorer"), files("headwise.report")
    # `<` never ends the script element that holds the data.
    data = json.dumps(facts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "POLICY": _POLICY.format(connect=connect),
        "MODEL": html.escape(facts["model"]),
        "STYLE": (room / "page.css").read_text("utf-8") + (own / "explorer.css").read_text("utf-8"),
        "DATA": data,
        "SCRIPT": (own / "explorer.js").read_text("utf-8"),
    }
    page = (own / "explorer.html").read_text("utf-8")
    head, *rest = page.split("{{")
    for piece in rest:  # one pass, so that nothing inserted is looked at again
        name, text = piece.split("}}", 1)
        head += parts[name] + text
    return head
