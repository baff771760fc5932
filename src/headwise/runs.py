"""Resumable runs: long work whose finished parts survive a kill.

    with resume(output, "profile", inputs, record="profile.json") as run:
        if not run.finished:
            for name in parts:
                if not run.has(name):
                    run.put(name, tensors)
            with run.finish() as folder:
                …                           # write the result; it becomes `output`

    OUT.partial/run.json              the kind of work and its inputs
                parts/NAME.safetensors   a finished part, written atomically
    OUT                               the result, present only when complete

Run the same command again after a kill: finished parts are reused. The same output
from other inputs is refused, and so is a second process on the same output. Work that
writes into its output folder as it goes (a training run, a comparison) keeps its parts there; the
output that it replaces is kept next to it until it is complete:

    OUT               the new work
    .OUT.replaced     the old OUT; removed when the new work is complete
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from headwise.artifacts import (
    Kind,
    atomic_file,
    atomic_folder,
    beside,
    check_output,
    discard,
    is_headwise_output,
    is_leftover,
    one_writer,
    sweep,
    versions,
)
from headwise.errors import HeadwiseError, OutputError
from headwise.records import Record, read_json, read_record, write_record

RUN = "run.json"
_PARTS = "parts"
_PACKAGES = ("headwise", "numpy", "torch", "transformers", "accelerate", "tokenizers")
MOST_WORDS = 60  # of a difference; longer ones are only named
Status = Literal["running", "interrupted", "diverged", "finished"]


class RunRecord(Record):
    """The content of run.json: the kind of work, its inputs, and its status.

    `inputs` decide the result and are compared when the run is resumed; `details` do not.
    """

    format: Literal["headwise-run/2"] = "headwise-run/2"
    kind: str
    inputs: dict[str, Any]
    status: Status = "running"
    command: str = ""
    details: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)


def key_of(kind: str, inputs: Mapping[str, Any]) -> str:
    """A fingerprint of a kind of work and all its inputs."""
    text = json.dumps([kind, inputs], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def partial_of(output: Path) -> Path:
    """The folder of the unfinished work whose result will be `output`."""
    return beside(output, "{}.partial")


def replaced_by(output: Path) -> Path:
    """Where an earlier output waits while the one that replaces it grows in its place.

    Hidden, so that nobody gives an output of theirs this name.
    """
    return beside(output, ".{}.replaced")


@dataclass
class Run:
    """The finished parts of one piece of work, and the way to its result."""

    output: Path
    folder: Path  # where the parts are
    key: str
    finished: bool = False  # `output` is whole and made from these inputs
    force: bool = False
    inputs_read: tuple[Path | str, ...] = field(default=())

    @classmethod
    def beside(cls, output: Path) -> Run:
        """The parts of work that another process of the same job holds open."""
        folder = partial_of(output)
        return cls(output, folder, "", finished=not (folder / RUN).exists())

    def path(self, name: str) -> Path:
        """Where a part lies, or will."""
        return self.folder / _PARTS / f"{name}.safetensors"

    def has(self, name: str) -> bool:
        """Whether a part is there and whole; a damaged one is removed."""
        path = self.path(name)
        if not path.exists():
            return False
        try:
            with _opened(path, "np"):
                return True
        except (ValueError, OSError):
            path.unlink(missing_ok=True)
            return False

    def put(
        self, name: str, tensors: Mapping[str, Any], note: Mapping[str, Any] | None = None
    ) -> None:
        """Save a part, whole or not at all, with a JSON-ready note beside its tensors."""
        metadata = {"note": json.dumps(dict(note or {}), allow_nan=False)}
        with atomic_file(self.path(name), force=True) as temporary:
            _save(tensors, temporary, metadata)

    def get(self, name: str, framework: Literal["np", "pt"] = "pt") -> dict[str, Any]:
        """The tensors of a part."""
        try:
            with _opened(self.path(name), framework) as file:
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (ValueError, OSError) as error:
            raise self._damaged(name, error) from error

    def tensor(self, name: str, key: str) -> Any:
        """One array of a part."""
        try:
            with _opened(self.path(name), "np") as file:
                return file.get_tensor(key)
        except (ValueError, OSError) as error:
            raise self._damaged(name, error) from error

    def note(self, name: str) -> dict[str, Any]:
        """What was noted with a part."""
        try:
            with _opened(self.path(name), "np") as file:
                found: dict[str, Any] = json.loads((file.metadata() or {})["note"])
        except (ValueError, KeyError, OSError) as error:
            raise self._damaged(name, error) from error
        return found

    @contextlib.contextmanager
    def finish(self) -> Iterator[Path]:
        """Yield a folder that becomes the output when it is whole."""
        with atomic_folder(self.output, force=self.force, inputs=self.inputs_read) as folder:
            yield folder
        self.finished = True

    def _damaged(self, name: str, error: Exception) -> HeadwiseError:
        return HeadwiseError(
            f"{self.path(name)} cannot be read ({error}); remove it and run the same command again."
        )


@contextlib.contextmanager
def resume(
    output: Path,
    kind: str,
    inputs: Mapping[str, Any],
    *,
    record: str,
    force: bool = False,
    reads: Sequence[Path | str] = (),
    last: Collection[str] = (),
    section: str | None = None,
    command: str = "",
    writes: Kind = "folder",
    made: str | None = None,
) -> Iterator[Run]:
    """Begin the work that ends in `output`, or resume it where a kill stopped it.

    `record` is the file in `output` whose "key" (of its `section`, if one is given) tells from
    which inputs it was made; of an output that is a file, `made` is that key. `last` are the files
    that callers add to a whole output (a report), so that an output without them counts as
    unfinished. `reads` are the inputs on disk: they are never replaced.
    """
    sweep(output)
    run = Run(output, partial_of(output), key_of(kind, inputs), force=force)
    run.inputs_read = tuple(reads)
    made = made_from(output / record, section) if writes == "folder" else made
    made_so = made == run.key
    complete = made_so and not run.folder.exists() and all((output / n).exists() for n in last)
    if made_so and not complete:
        run.finished = True
    else:
        check_output(output, force=force, inputs=reads, kind=writes)
    with one_writer(run.folder):
        fresh = not (run.folder / RUN).exists()
        try:
            if not run.finished:
                _begin(
                    run.folder, RunRecord(kind=kind, inputs=dict(inputs), command=command), force
                )
            yield run
        finally:
            # Finished work leaves nothing behind, nor does work that has no part yet.
            if run.finished or (fresh and _holds_nothing(run.folder)):
                shutil.rmtree(run.folder, ignore_errors=True)


@contextlib.contextmanager
def resume_in_place(
    output: Path,
    kind: str,
    inputs: Mapping[str, Any],
    *,
    force: bool = False,
    reads: Sequence[Path | str] = (),
    free: Collection[str] = (),
    later: Collection[str] = (),
    command: str = "",
) -> Iterator[Run]:
    """Begin or resume work that grows in `output` itself.

    Inputs named in `free` may change between runs; those in `later` may be filled in later (None
    agrees with anything). With `force` an earlier output is replaced: it waits in .OUT.replaced
    until `complete` is called, and comes back if the new work fails before it has written anything.
    """
    sweep(output)
    sweep(replaced_by(output))
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        check_output(output, force=True, kind="folder")
    earlier = replaced_by(output)
    if not output.exists():
        check_output(output, force=True)
        if _waits(earlier):  # of a process that was killed between its two renames
            earlier.rename(output)
    there = output.is_dir() and not all(map(is_leftover, output.iterdir()))
    if there and (force or not is_headwise_output(output)):
        check_output(output, force=True, inputs=reads)
    created = not output.exists()
    wanted = RunRecord(kind=kind, inputs=dict(inputs), command=command)
    with contextlib.ExitStack() as held:
        run = Run(output, output, key_of(kind, inputs), force=force)
        if there and force and not _is_begun(output, wanted, free, later):
            _make_way(output, earlier)
            created = True
        held.enter_context(one_writer(output))
        fresh = not (output / RUN).exists()
        _begin(output, wanted, force=False, free=free, later=later)
        try:
            yield run
        except BaseException:
            if fresh and _holds_nothing(output):
                _clear(output)
                if created:
                    output.rmdir()
                    if _waits(earlier):
                        earlier.rename(output)
            raise


def _is_begun(
    output: Path, wanted: RunRecord, free: Collection[str], later: Collection[str]
) -> bool:
    """Whether `output` is this work, begun in the place of an earlier output, and unfinished."""
    if not _waits(replaced_by(output)):
        return False
    try:
        found = read_run(output)
    except HeadwiseError:
        return False
    return (
        found.status != "finished"
        and found.kind == wanted.kind
        and not _differing(found, wanted, free, later)
    )


def _make_way(output: Path, earlier: Path) -> None:
    """Move an output aside; work that has begun in its place and is not whole is given up."""
    if earlier.exists() and not _waits(earlier):
        raise OutputError(
            f"{output} would be kept in {earlier} until its replacement is complete, but headwise "
            "did not write what is there; move it away, or give another output."
        )
    with one_writer(output):
        if not earlier.exists():
            output.rename(earlier)
        elif _status(output) == "finished":  # killed before the last but one was removed
            discard(earlier)
            output.rename(earlier)
        else:
            discard(output)


def _waits(earlier: Path) -> bool:
    """Whether an output of headwise lies where one waits for its replacement."""
    return earlier.is_dir() and not earlier.is_symlink() and is_headwise_output(earlier)


def _status(folder: Path) -> str | None:
    try:
        return read_run(folder).status
    except HeadwiseError:
        return None


def complete(output: Path) -> None:
    """Work that grows in `output` is whole: its record says so, and what it replaced goes."""
    if read_run(output).status != "finished":
        update_run(output, status="finished")
    earlier = replaced_by(output)
    if _waits(earlier):
        discard(earlier)


def drop_partial(output: Path) -> None:
    """Remove the parts of an output that is whole, if a kill left them there."""
    parts = partial_of(output)
    if parts.exists():
        with one_writer(parts):
            shutil.rmtree(parts, ignore_errors=True)


def update_run(folder: Path, **changes: Any) -> RunRecord:
    """Change some fields of a run.json."""
    record = read_run(folder)
    changed = record.model_copy(update=changes)
    write_record(folder / RUN, changed)
    return changed


def read_run(folder: Path) -> RunRecord:
    """The record of a run."""
    return read_record(
        folder / RUN, RunRecord, advice="start again with --force, or give another folder"
    )


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], later: Collection[str] = ()
) -> dict[str, str]:
    """What differs: the dotted names of the inputs, with `old → new` where that is short."""
    found: dict[str, str] = {}
    for name in sorted({*old, *new}):
        a, b = old.get(name), new.get(name)
        if a == b or (name in later and None in (a, b)):
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found |= {f"{name}.{inner}": words for inner, words in differences(a, b).items()}
        else:
            words = f"{a} → {b}"
            found[name] = words if len(words) <= MOST_WORDS else ""
    return found


def _differing(
    found: RunRecord, wanted: RunRecord, free: Collection[str], later: Collection[str]
) -> dict[str, str]:
    """The inputs in which two runs differ, those apart that may."""
    wanted = RunRecord.model_validate_json(wanted.model_dump_json())  # tuples become lists
    differ = differences(found.inputs, wanted.inputs, later)
    return {n: v for n, v in differ.items() if not {n, n.split(".")[-1]} & {*free}}


def _begin(
    folder: Path,
    wanted: RunRecord,
    force: bool,
    free: Collection[str] = (),
    later: Collection[str] = (),
) -> None:
    """Write run.json, or check that the one that is there is of the same work."""
    wanted = RunRecord.model_validate_json(wanted.model_dump_json())  # tuples become lists
    wanted = wanted.model_copy(update={"versions": dict(versions(_PACKAGES))})
    for path in sorted(folder.rglob(".*")):  # of a killed process, for we hold the folder
        if is_leftover(path) and path.exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if (folder / RUN).exists():
        try:
            found = read_run(folder)
        except HeadwiseError:
            if not force:
                raise
        else:
            differ = _differing(found, wanted, free, later)
            if found.kind != wanted.kind:
                differ = {"kind": f"{found.kind} → {wanted.kind}"}
            if not differ:
                given = {n: v for n, v in wanted.inputs.items() if v is not None}
                kept = found.model_copy(
                    update={"inputs": {**wanted.inputs, **found.inputs, **given}}
                )
                if kept != found:
                    write_record(folder / RUN, kept)
                return
            if not force:
                words = ", ".join(f"{n} ({v})" if v else n for n, v in differ.items())
                raise OutputError(
                    f"{folder} holds work that differs in {words}; resume it with its own "
                    "settings, remove it, or give --force to start again."
                )
        _clear(folder)
    elif any(folder.iterdir()):
        there = sorted(p.name for p in folder.iterdir())
        raise OutputError(
            f"{folder} holds files that headwise did not write ({', '.join(there[:3])}); give "
            "another output, or remove them."
        )
    write_record(folder / RUN, wanted)


def _holds_nothing(folder: Path) -> bool:
    """Whether there is nothing but the record of work that has not begun."""
    return all(path.name == RUN for path in folder.iterdir())


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def made_from(record: Path, section: str | None = None) -> str | None:
    """The key of the inputs that an output was made from, as its record (a part of it) says."""
    try:
        data = read_json(record)
    except HeadwiseError:
        return None
    if section is not None and isinstance(data, dict):
        data = data.get(section)
    found = data.get("key") if isinstance(data, dict) else None
    return found if isinstance(found, str) else None


@contextlib.contextmanager
def _opened(path: Path, framework: str) -> Iterator[Any]:
    """A safetensors file; whatever is wrong with it is a ValueError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework=framework) as file:
            yield file
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def _save(tensors: Mapping[str, Any], path: Path, metadata: dict[str, str]) -> None:
    if all(type(t).__module__ == "numpy" for t in tensors.values()):
        import numpy as np
        from safetensors.numpy import save_file as save_arrays

        save_arrays({n: np.ascontiguousarray(t) for n, t in tensors.items()}, path, metadata)
    else:
        from safetensors.torch import save_file

        # Copies, because safetensors refuses views of one memory.
        own = {n: t.detach().cpu().clone().contiguous() for n, t in tensors.items()}
        save_file(own, path, metadata)
