"""JSON files as frozen, versioned records; a damaged file gives a one-sentence error.

    class Verification(Record):
        format: Literal["headwise-verify/3"] = "headwise-verify/3"
        …

    write_record(path, verification)        atomically
    read_record(path, Verification)         or a HeadwiseError that names file and field

Every JSON file that headwise writes and reads back goes through here, so damaged, truncated, deeply
nested, foreign or outdated files are all reported in the same way.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from headwise.artifacts import write_text
from headwise.errors import HeadwiseError, did_you_mean, quoted
from headwise.inputs import MOST_BYTES, file_text

MAX_REPEAT = 100_000  # far above any model, in one list; a typing error must not fill the memory


class Frozen(BaseModel):
    """A value: frozen, hashable, no unknown keys, defaults left out of its JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_dict(self) -> dict[str, Any]:
        """The value as JSON-ready data, defaults left out."""
        return self.model_dump(mode="json", exclude_defaults=True)


class Record(Frozen):
    """A value that is a file of its own; a subclass narrows `format` to its one version."""

    format: str


AnyValue = TypeVar("AnyValue", bound=Frozen)
AnyRecord = TypeVar("AnyRecord", bound=Record)


def read_record(
    path: Path, kind: type[AnyRecord], *, advice: str = "restore it, or make it again"
) -> AnyRecord:
    """The record in a JSON file; errors name the file and the field."""
    return parse_record(read_json(path, advice=advice), kind, str(path), advice=advice)


def parse_record(
    data: Any, kind: type[AnyRecord], source: str, *, advice: str = "restore it, or make it again"
) -> AnyRecord:
    """The record in JSON-ready data; `source` names it in errors."""
    (wanted,) = get_args(kind.model_fields["format"].annotation)
    came = data.get("format", "no format") if isinstance(data, dict) else type(data).__name__
    if came != wanted:
        raise HeadwiseError(
            f"{source} must have the format {wanted!r}, got {quoted(came)}; {advice}."
        )
    return parse_value(data, kind, source, advice=advice)


def parse_value(
    data: Any, kind: type[AnyValue], source: str, *, advice: str = "restore it, or make it again"
) -> AnyValue:
    """The value in JSON-ready data; `source` names it in errors."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        problem = first_problem(error, kind, {}).rstrip(".")
        raise HeadwiseError(f"{source} is not valid: {problem}; {advice}.") from error
    except RecursionError as error:
        raise HeadwiseError(f"{source} is nested too deeply; {advice}.") from error


def write_record(
    path: Path,
    record: Record,
    *,
    force: bool = True,
    inputs: Sequence[Path | str] | None = None,
) -> None:
    """Write a record as JSON, whole or not at all; `inputs` as for `artifacts.atomic_file`."""
    write_text(path, record_text(record), force=force, inputs=inputs)


def record_text(record: Record) -> str:
    """A record as the text of its file."""
    return json.dumps(record.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"


def read_json(path: Path, *, advice: str = "restore it, or make it again") -> Any:
    """The data in a JSON file: a regular file of sane size, with no duplicate keys."""
    return parse_json(read_file(path, advice=advice), str(path), advice=advice)


def parse_json(text: str, source: str, *, advice: str = "restore it, or make it again") -> Any:
    """The data in the text of a JSON file; `source` names it in errors."""
    try:
        return json.loads(text, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        why = f"invalid JSON at line {line}" if line else f"invalid JSON ({quoted(error)})"
        raise HeadwiseError(f"{source} holds {why}; {advice}.") from error


def read_file(path: Path, *, most: int = MOST_BYTES, advice: str = "check it") -> str:
    """The text of a regular UTF-8 file; a device, a pipe or a huge file is refused unread."""
    try:
        return file_text(path, most=most, advice=advice)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise HeadwiseError(f"{path} cannot be read ({reason}); {advice}.") from error


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
        raise ValueError(f"duplicate key {quoted(twice)}")
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
    if problem["type"] == "literal_error":
        return (
            f"{_place(loc)} must be {problem['ctx']['expected']}, got {quoted(problem['input'])}."
        )
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{message}{f' ({_place(loc)})' if loc else ''}."
    wanted = message.removeprefix("Input should be ").split(", ")[0]
    for theirs, ours in _PLAINER.items():
        wanted = re.sub(theirs, ours, wanted)
    verb = " must be" if message.startswith("Input should be ") else ":"
    wanted = f"{_place(loc)}{verb} {wanted}"
    return f"{wanted}, got {quoted(problem['input'])}."


_PLAINER = {  # pydantic's words for what was expected
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
    r"valid dictionary or instance of \w+": "mapping of keys to values",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
}


def _place(loc: Sequence[int | str]) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).lstrip(".")
