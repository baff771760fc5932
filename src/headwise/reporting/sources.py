"""The source of a report: a folder, read as typed records."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from headwise.baselines.record import COMPARE_RECORD, ComparisonRecord, read_comparison
from headwise.errors import HeadwiseError
from headwise.measure.record import Verification, read_verification
from headwise.models.record import CUT_RECORD, CutRecord, read_cut_record
from headwise.plan import Plan
from headwise.profiling.format import RECORD, Profile
from headwise.profiling.worth import kept_directions
from headwise.records import read_json
from headwise.runs import RUN
from headwise.training.checkpoint import RunFolder, StepRecord, read_rows
from headwise.training.train import TrainDetails, TrainingRecord, read_plan, read_training

PROMPTS = ("", "The ", "def ")
NEW_TOKENS = 80


@dataclass(frozen=True, slots=True)
class CutModel:
    """A cut checkpoint with its profile and comparison, if there are any."""

    folder: Path
    plan: Plan
    record: CutRecord
    verification: Verification | None
    profile: Profile | None
    compared: ComparisonRecord | None


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A run's record, plan and steps; `samples` are prompts and what the model wrote."""

    folder: Path
    record: TrainingRecord  # run.json
    details: TrainDetails
    plan: Plan
    rows: tuple[StepRecord, ...]
    samples: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """A profile and where it is."""

    folder: Path
    profile: Profile


ReportSource = CutModel | TrainingRun | ProfiledModel | ComparisonRecord


def read_report_source(
    path: Path, *, profile: Path | None = None, compare: Path | None = None
) -> ReportSource:
    """The contents of a folder (or of a compare.json)."""
    compared = None if compare is None else read_comparison(compare)
    found: ReportSource
    if (path / RECORD).is_file():
        found = ProfiledModel(path, Profile.read(path))
    elif (path / CUT_RECORD).is_file():
        return _read_cut(path, profile, compared)
    elif path.name == COMPARE_RECORD or (path / COMPARE_RECORD).is_file():
        found = read_comparison(path)
    elif (path / RUN).is_file():
        found = _read_training(path)
    else:
        missing = "does not exist" if not path.exists() else "holds none of them"
        raise HeadwiseError(
            f"a report is made of a cut model, a profile, a training run or a comparison, but "
            f"{path} {missing}; give the folder that headwise wrote."
        )
    if profile is not None or compare is not None:
        raise HeadwiseError("--profile and --compare are for the report of a cut model.")
    return found


def with_samples(run: TrainingRun) -> TrainingRun:
    """The run with samples of its model; unchanged if it is unfinished or bidirectional."""
    if not (run.folder / "model").is_dir() or not run.plan.shape.causal:
        return run
    from headwise.measure.generation import continuation
    from headwise.source import open_source

    source = open_source(run.folder / "model")
    model = source.load("causal-lm", device="cpu", dtype="fp32")
    most = min(NEW_TOKENS, run.plan.shape.context // 2)
    found = []
    for seed, prompt in enumerate(PROMPTS):
        try:
            made = continuation(model, source.tokenizer, prompt, max_new_tokens=most, seed=seed)
        except HeadwiseError:  # a tokenizer without a start token cannot begin from nothing
            continue
        found.append((prompt, made.text))
    return replace(run, samples=tuple(found))


def _read_training(path: Path) -> TrainingRun:
    folder = RunFolder(path)
    record = read_training(path)
    if record.details is None:
        raise HeadwiseError(
            f"{path / RUN} belongs to a run that has not started training; run its command again."
        )
    plan, rows = read_plan(folder.plan), read_rows(folder.metrics)
    return TrainingRun(path, record, record.details, plan, tuple(rows))


def _read_cut(path: Path, profile: Path | None, compared: ComparisonRecord | None) -> CutModel:
    record = read_cut_record(path)
    config = read_json(path / "config.json")
    data = config.get("plan") if isinstance(config, dict) else None
    plan = Plan.from_dict(data, f"the plan in {path / 'config.json'}")
    found = _profile_of(path, profile, record)
    if found is not None:
        for i, layer in enumerate(found.plan.layers):
            for j in range(len(layer.heads)):
                kept_directions(found, plan, i, j)  # refuses a plan of other heads
    return CutModel(
        folder=path,
        plan=plan,
        record=record,
        verification=read_verification(path),
        profile=found,
        compared=compared,
    )


def _profile_of(path: Path, given: Path | None, record: CutRecord) -> Profile | None:
    """The profile the cut was made from: the given one, else the one beside it if it is that."""
    beside = path.resolve().with_name(f"{path.resolve().name}.profile")
    if given is None and not (beside / RECORD).is_file():
        return None
    found = Profile.read(given or beside)
    if found.sha256 == record.profile_sha256:
        return found
    if given is None:
        return None
    raise HeadwiseError(
        f"{given} is not the profile that {path} was cut with; give that one, or leave it out."
    )
