"""The results of a run on disk: one JSON Lines file per claim, one line per finished trial.

    folder/run.json             size, claims and seeds asked for so far (`headwise.runs`)
    folder/trials/CLAIM.jsonl   {"name": …, "seed": …, "parameters": …, "values": …}   finished
                                {"name": …, "seed": …, "parameters": …, "error": …}    failed
                                {"name": …, "se                                        torn

A line is found by what decides its numbers (its trial and the claim's version), so a finished trial
is never run twice. A line is appended in one piece by the one process that holds the folder. A kill
in the middle of it leaves a torn last line, which counts as missing, is cut off before the next
line is written, and whose trial runs again. So does a line that was damaged or changed later.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, model_validator

from headwise.errors import HeadwiseError, OutputError
from headwise.inputs import MOST_TEXT, check_file
from headwise.papers.harness.claim import Claim, ReproduceError, Size, Trial, TrialResult
from headwise.papers.harness.workers import TrialOutcome
from headwise.records import Frozen, Record, parse_json, parse_record, parse_value
from headwise.runs import RUN, read_run, resume_in_place, update_run

KIND = "reproduce"


class ReproduceInputs(Frozen):
    """What a folder was asked for so far: its size, and the number of seeds of each claim."""

    size: Size
    seeds: dict[str, int] = Field(default_factory=dict)

    def joined(self, seeds: Mapping[str, int]) -> ReproduceInputs:
        """With what is asked for now; claims and seeds only grow."""
        most = {name: max(seeds.get(name, 0), self.seeds.get(name, 0)) for name in self.seeds}
        return ReproduceInputs(size=self.size, seeds=dict(sorted({**seeds, **most}.items())))


class TrialLine(Record):
    """One line: a finished trial with its values, or a failed one with its error."""

    format: Literal["headwise-trial/2"] = "headwise-trial/2"
    claim_version: int
    name: str
    seed: int
    parameters: dict[str, JsonValue]
    seconds: float = Field(ge=0)
    versions: dict[str, str]
    cores: int
    values: dict[str, JsonValue] | None = None
    error: str | None = None
    trace: tuple[str, ...] = ()
    unavailable: bool = False

    @model_validator(mode="after")
    def _is_finished_or_failed(self) -> TrialLine:
        if (self.values is None) == (self.error is None):
            raise ValueError("a trial has either values or an error")
        return self


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A result with where it was measured."""

    result: TrialResult
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
    """A folder of results; lines are read once and then remembered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lines: dict[str, dict[str, TrialLine]] = {}  # by claim and by key of the trial

    def asked(self) -> ReproduceInputs | None:
        """What the folder was asked for so far; None if it holds no run."""
        if not (self.folder / RUN).is_file():
            return None
        record = read_run(self.folder)
        if record.kind != KIND:
            raise ReproduceError(
                f"{self.folder} holds a run of {record.kind}, not of {KIND}; give another folder."
            )
        where = f"`inputs` in {self.folder / RUN}"
        return parse_value(record.inputs, ReproduceInputs, where, advice="give a new folder")

    @contextlib.contextmanager
    def resumed(self, size: Size, seeds: Mapping[str, int]) -> Iterator[None]:
        """Hold the folder to run trials in it, and note what is asked for.

        A folder keeps its size, and its claims and seeds only grow. It is made if need be; one
        that is not ours is refused untouched.
        """
        before = self.asked()
        if before is not None and before.size != size:
            raise ReproduceError(
                f"{self.folder} holds a {before.size} run, but a {size} one was asked for; give "
                "another folder."
            )
        with resume_in_place(self.folder, KIND, {"size": size}, free=("seeds",)):
            now = self.asked()  # as it is now that no other process can change it
            assert now is not None
            update_run(self.folder, status="running", inputs=now.joined(seeds).to_dict())
            yield
            update_run(self.folder, status="finished")

    def stored(self, claim: Claim, trial: Trial) -> StoredTrial | None:
        """The result of a trial, if it has finished at the claim's version."""
        line = self._read(claim).get(trial.key(claim.version))
        if line is None or line.values is None:
            return None
        return StoredTrial(TrialResult(trial, line.values, line.seconds), line.versions, line.cores)

    def failure(self, claim: Claim, trial: Trial) -> Failure | None:
        """How a trial failed when it was last tried; None once it has finished."""
        line = self._read(claim).get(trial.key(claim.version))
        if line is None or line.error is None:
            return None
        return Failure(trial.name, trial.seed, line.error, line.unavailable)

    def put(self, claim: Claim, trial: Trial, outcome: TrialOutcome) -> None:
        """Append a finished trial, or the error of one that failed."""
        line = TrialLine(
            claim_version=claim.version,
            name=trial.name,
            seed=trial.seed,
            parameters=json.loads(json.dumps(trial.parameters)),  # tuples become lists
            values=outcome.values,
            seconds=round(outcome.seconds, 3),
            versions=dict(outcome.versions),
            cores=outcome.cores,
            error=outcome.error,
            trace=outcome.trace,
            unavailable=outcome.unavailable,
        )
        lines = self._read(claim)
        _append(self._path(claim), line_text(line))
        lines[trial.key(claim.version)] = line

    def _path(self, claim: Claim) -> Path:
        return self.folder / "trials" / f"{claim.id}.jsonl"

    def _read(self, claim: Claim) -> dict[str, TrialLine]:
        """The last line of every trial; a finished trial stays finished."""
        if claim.id not in self._lines:
            found: dict[str, TrialLine] = {}
            for line in _whole_lines(self._path(claim)):
                trial = Trial(claim.id, line.name, line.seed, line.parameters)
                key = trial.key(line.claim_version)
                if line.values is not None or key not in found or found[key].values is None:
                    found[key] = line
            self._lines[claim.id] = found
        return self._lines[claim.id]


def line_text(line: TrialLine) -> str:
    """A line as it is written: ASCII, so that a torn one is still text, and no defaults."""
    document = {"format": line.format, **line.to_dict()}
    return json.dumps(document, allow_nan=False) + "\n"


def _whole_lines(path: Path) -> Iterator[TrialLine]:
    """The lines of a file that hold a trial; a torn or damaged one is skipped."""
    if not path.exists():
        return
    check_file(path, most=MOST_TEXT, advice="restore it, or give another folder")
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise HeadwiseError(f"{path} cannot be read ({error.strerror}).") from error
    *whole, _ = text.split("\n")
    for line in whole:
        with contextlib.suppress(HeadwiseError):
            yield parse_record(parse_json(line, str(path)), TrialLine, str(path))


def _append(path: Path, text: str) -> None:
    """Add whole lines to a file, after whatever a kill tore off at its end is gone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+", buffering=0) as stream:
            stream.seek(0)
            end = stream.read().rfind(b"\n") + 1
            stream.truncate(end)
            try:
                written = stream.write(text.encode("ascii"))
                if written != len(text):
                    raise OSError(None, "the disk is full")  # noqa: TRY301
                os.fsync(stream.fileno())
            except OSError:
                stream.truncate(end)
                raise
    except OSError as error:
        raise OutputError(
            f"{path} could not be written ({error.strerror}); free space or choose another folder."
        ) from error
