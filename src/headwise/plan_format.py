"""How plan files are written and read: run lengths, and one clear sentence for a bad file."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from headwise.errors import did_you_mean

MAX_REPEAT = 100_000  # far above any model, in one list; a typing error must not fill the memory


class Frozen(BaseModel):
    """A value: frozen, hashable, no unknown keys, defaults left out of its JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_dict(self) -> dict[str, Any]:
        """The value as JSON-ready data, defaults left out."""
        return self.model_dump(mode="json", exclude_defaults=True)


def run_lengths(items: Sequence[Frozen]) -> list[dict[str, Any]]:
    """Equal neighbours written once: `{"repeat": n, …}`; n = 1 is left out."""
    packed = []
    for item, run in itertools.groupby(items):
        n = len(list(run))
        packed.append({"repeat": n, **item.to_dict()} if n > 1 else item.to_dict())
    return packed


def expanded(data: Any, key: str) -> Any:
    """`data` with the run lengths under `key` written out."""
    if not isinstance(data, dict) or not isinstance(data.get(key), list | tuple):
        return data
    written_out: list[Any] = []
    for entry in data[key]:
        if not isinstance(entry, dict) or "repeat" not in entry:
            written_out.append(entry)
            continue
        n = entry["repeat"]
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_REPEAT:
            raise ValueError(f"repeat must be a whole number from 1 to {MAX_REPEAT}, got {n!r}")
        if len(written_out) + n > MAX_REPEAT:
            raise ValueError(f"{key} may have at most {MAX_REPEAT} entries in all")
        written_out += [{k: v for k, v in entry.items() if k != "repeat"}] * n
    return {**data, key: written_out}


def refuse_many(data: Any, outer: str, inner: str, most: int) -> None:
    """Raise if the lists `inner` of all entries under `outer` would be longer than `most` together.

    Counted before they are written out.
    """
    entries = data.get(outer) if isinstance(data, dict) else None
    total = 0
    for entry in entries if isinstance(entries, list | tuple) else ():
        parts = entry.get(inner) if isinstance(entry, dict) else None
        for part in parts if isinstance(parts, list | tuple) else ():
            n = part.get("repeat", 1) if isinstance(part, dict) else 1
            total += n if isinstance(n, int) and 1 <= n <= MAX_REPEAT else 1
        if total > most:
            raise ValueError(f"there may be at most {most} {inner} in all {outer}")


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands there twice")
    return found


def encodable(text: str) -> str:
    """The text, refused if it cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"text must be writable as UTF-8, got {text!r}") from None
    return text


def first_problem(
    error: ValidationError, root: type[BaseModel], children: Mapping[str, type[BaseModel]]
) -> str:
    """The most telling of pydantic's complaints, as one sentence that says where.

    `children` maps a key to the type found under it, at any depth, so that an unknown key can be
    answered with the names its owner does know.
    """
    problems = error.errors(include_url=False)
    # A misspelt key is both unknown and missing; the unknown name is the one to talk about.
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    loc = problem["loc"]
    if problem["type"] == "extra_forbidden":
        owner = next((children[str(p)] for p in reversed(loc[:-1]) if str(p) in children), root)
        known: Iterable[str] = owner.model_fields
        place = _place(loc[:-1]) or "the top level"
        return f"unknown key {loc[-1]!r} in {place}. {did_you_mean(str(loc[-1]), known)}"
    if problem["type"] == "missing":
        return f"{_place(loc)} is missing."
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{message}{f' ({_place(loc)})' if loc else ''}."
    return f"{_place(loc)}: {message[0].lower()}{message[1:]}, got {problem['input']!r}."


def _place(loc: Sequence[int | str]) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).lstrip(".")
