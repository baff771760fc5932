"""The result files of a run: one per finished trial, whole or not there.

A file's name is the hash of its trial and of the claim's version, so a finished trial is found
without reading it and is never run twice. A file that does not hold what its name says (a damaged
disk, an edited number's spec) counts as missing and is run again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from headwise.artifacts import sole_writer, write_text
from headwise.reproduce.claim import Claim, ReproduceError, Result, Size, Trial
from headwise.reproduce.worker import Outcome

RUN_FORMAT = "headwise-reproduce-run"
TRIAL_FORMAT = "headwise-trial"
FORMAT_VERSION = 1
LOCK = ".lock"  # an empty file that the runner at work holds


@dataclass(frozen=True, slots=True)
class Run:
    """What a folder was asked for so far: its size, and the number of seeds of each claim."""

    size: Size
    seeds: dict[str, int]


@dataclass(frozen=True, slots=True)
class Stored:
    """A result with where it was measured."""

    result: Result
    versions: dict[str, str]
    cores: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A trial that failed when it was last tried."""

    name: str
    seed: int
    error: str
    unavailable: bool


class Store:
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self) -> Run | None:
        """What the folder holds; None if it is new."""
        path = self.folder / "run.json"
        if not path.is_file():
            if self.folder.is_file():
                raise ReproduceError(f"{self.folder} is a file; give a folder for the results.")
            if self.folder.is_dir() and not _holds_nothing(self.folder):
                raise ReproduceError(
                    f"{self.folder} is not empty and holds no results of reproduce; give a new "
                    "folder, or that of an earlier run to continue it."
                )
            return None
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            known = (document["format"], document["version"]) == (RUN_FORMAT, FORMAT_VERSION)
            run = Run(document["size"], {str(k): int(v) for k, v in document["seeds"].items()})
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            known = False
        if not known or run.size not in get_args(Size):
            raise ReproduceError(
                f"{path} is not a run of this version of headwise; give a new folder."
            )
        return run

    def begin(self, size: Size, seeds: dict[str, int]) -> Run:
        """Note what is asked for; a folder keeps its size, and its claims and seeds only grow."""
        before = self.run()
        if before is not None and before.size != size:
            raise ReproduceError(
                f"{self.folder} holds a {before.size} run, but a {size} one was asked for; give "
                "another folder."
            )
        merged = dict(before.seeds) if before else {}
        for name, count in seeds.items():
            merged[name] = max(count, merged.get(name, 0))
        document = {
            "format": RUN_FORMAT,
            "version": FORMAT_VERSION,
            "size": size,
            "seeds": dict(sorted(merged.items())),
        }
        write_text(self.folder / "run.json", _text(document), force=True)
        return Run(size, merged)

    def stored(self, claim: Claim, trial: Trial) -> Stored | None:
        """The result of a trial, if it has finished at the claim's version."""
        document = _read(self._path(claim, trial)) or {}
        wanted = (
            TRIAL_FORMAT, FORMAT_VERSION, claim.id, claim.version, trial.name, trial.seed,
            _plain(trial.parameters),
        )  # fmt: skip
        came = tuple(
            document.get(key)
            for key in (
                "format", "version", "claim", "claim_version", "name", "seed", "parameters",
            )
        )  # fmt: skip
        kinds = {"values": dict, "seconds": float | int, "versions": dict, "cores": int}
        if wanted != came or not all(isinstance(document.get(k), t) for k, t in kinds.items()):
            return None
        result = Result(trial, document["values"], float(document["seconds"]))
        return Stored(result, document["versions"], document["cores"])

    def put(self, claim: Claim, trial: Trial, came: Outcome) -> None:
        """Write a finished trial, or the error of one that failed."""
        path = self._path(claim, trial)
        failed = path.with_suffix(".failed.json")
        document: dict[str, Any] = {
            "format": TRIAL_FORMAT,
            "version": FORMAT_VERSION,
            "claim": claim.id,
            "claim_version": claim.version,
            "name": trial.name,
            "seed": trial.seed,
            "parameters": _plain(trial.parameters),
        }
        if came.values is None:
            document |= {
                "error": came.error,
                "unavailable": came.unavailable,
                "trace": list(came.trace),
            }
            write_text(failed, _text(document), force=True)
            return
        document |= {
            "values": came.values,
            "seconds": round(came.seconds, 3),
            "versions": dict(came.versions),
            "cores": came.cores,
        }
        write_text(path, _text(document), force=True)
        failed.unlink(missing_ok=True)

    def failure(self, claim: Claim, trial: Trial) -> Failure | None:
        """How a trial failed when it was last tried."""
        document = _read(self._path(claim, trial).with_suffix(".failed.json"))
        if document is None:
            return None
        error, unavailable = str(document.get("error")), bool(document.get("unavailable"))
        return Failure(trial.name, trial.seed, error, unavailable)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Refuse a second runner in the same folder; a killed one leaves nothing in the way.

        The folder is made if need be; into one that is not ours nothing is written, not even this.
        """
        self.run()
        with sole_writer(self.folder, LOCK):
            yield

    def _path(self, claim: Claim, trial: Trial) -> Path:
        return self.folder / "trials" / claim.id / f"{trial.key(claim.version)}.json"


def _holds_nothing(folder: Path) -> bool:
    """Whether a folder is empty but for what a run leaves that was killed at once."""
    return all(path.name == LOCK or path.name.startswith(".run.json.") for path in folder.iterdir())


def _plain(value: Any) -> Any:
    """As it reads after a trip through JSON."""
    return json.loads(json.dumps(value))


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
