"""What a report is about: the folder it is given, read and told apart by its `format`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.errors import HeadwiseError
from headwise.plan import Plan
from headwise.profile.format import RECORD, Profile
from headwise.training.metrics import read_rows
from headwise.training.run_folder import RunFolder

COMPARE_FORMAT, VERIFY_FORMAT = "headwise-compare/1", "headwise-verify/1"


@dataclass(frozen=True, slots=True)
class CutModel:
    """A cut checkpoint, and what lies beside it."""

    folder: Path
    plan: Plan
    record: dict[str, Any]  # headwise.json
    proof: dict[str, Any] | None  # verify.json
    profile: Profile | None
    compared: dict[str, Any] | None  # compare.json


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A run's record, plan and steps; `samples` are prompts and what the model wrote."""

    folder: RunFolder
    record: dict[str, Any]
    plan: Plan
    rows: list[dict[str, Any]]
    samples: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """A profile and where it is."""

    folder: Path
    profile: Profile


@dataclass(frozen=True, slots=True)
class ComparedRecipes:
    """The document of `headwise compare`."""

    document: dict[str, Any]


Source = CutModel | TrainingRun | ProfiledModel | ComparedRecipes


def read_report_source(
    path: Path, *, profile: Path | None = None, compare: Path | None = None
) -> Source:
    """What lies in a folder (or in a compare.json)."""
    compared = None if compare is None else read_comparison(compare)
    found: Source
    if (path / RECORD).is_file():
        found = ProfiledModel(path, Profile.read(path))
    elif (path / "run.json").is_file():
        found = _run(path)
    elif (path / "headwise.json").is_file():
        return _cut(path, profile, compared)
    elif path.name == "compare.json" or (path / "compare.json").is_file():
        found = ComparedRecipes(read_comparison(path))
    else:
        missing = "does not exist" if not path.exists() else "holds none of them"
        raise HeadwiseError(
            f"a report is made of a cut model, a profile, a training run or a comparison, but "
            f"{path} {missing}; give the folder that headwise wrote."
        )
    if profile is not None or compare is not None:
        raise HeadwiseError("--profile and --compare belong to the report of a cut model.")
    return found


def read_comparison(path: Path) -> dict[str, Any]:
    """The document of a comparison's folder or file."""
    file = path / "compare.json" if path.is_dir() else path
    return _document(file, COMPARE_FORMAT)


def _run(path: Path) -> TrainingRun:
    folder = RunFolder(path)
    record = folder.read_record()
    plan = Plan.from_json(_text(folder.plan), str(folder.plan))
    return TrainingRun(folder, record, plan, read_rows(folder.metrics))


def _cut(path: Path, profile: Path | None, compared: dict[str, Any] | None) -> CutModel:
    record = _json(path / "headwise.json")
    config = _json(path / "config.json")
    plan = Plan.from_dict(config.get("plan"), f"the plan in {path / 'config.json'}")
    proof = path / "verify.json"
    return CutModel(
        folder=path,
        plan=plan,
        record=record,
        proof=_document(proof, VERIFY_FORMAT) if proof.is_file() else None,
        profile=_profile_of(path, profile, record),
        compared=compared,
    )


def _profile_of(path: Path, given: Path | None, record: dict[str, Any]) -> Profile | None:
    """The profile the cut was made from: the given one, else the one beside it if it is that."""
    beside = path.resolve().with_name(f"{path.resolve().name}.profile")
    if given is None and not (beside / RECORD).is_file():
        return None
    found = Profile.read(given or beside)
    if found.sha256 == record.get("profile_sha256"):
        return found
    if given is None:
        return None
    raise HeadwiseError(
        f"{given} is not the profile that {path} was cut with; give that one, or leave it out."
    )


def _document(path: Path, expected: str) -> dict[str, Any]:
    found = _json(path)
    if found.get("format") != expected:
        raise HeadwiseError(
            f"{path} must have format {expected!r}, got {found.get('format', 'none')!r}; make it "
            "again with this version of headwise."
        )
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except ValueError as error:
        raise HeadwiseError(f"{path} is not valid JSON ({error}); restore it.") from error
    if not isinstance(found, dict):
        raise HeadwiseError(f"{path} must hold a JSON object; restore it.")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HeadwiseError(f"{path} cannot be read ({reason}); restore it.") from error
