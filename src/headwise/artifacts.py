"""Atomic outputs: complete or absent, and never written over something that must be kept.

An output is written next to its destination under a temporary name and renamed in one step, so a
kill, a full disk or an error leaves what was there before.

    .OUT.1234-….tmp   being written                 ─┐ renamed
    OUT               the output                    ◄┘
    .OUT.….old        what OUT was before, until the new one has its name; put back after a kill

Nothing is overwritten without `force`. Even then a folder is replaced only if headwise
wrote it (its record says so) and if it is not an input of the run, a parent of one, the working
directory, a home or a mount point. A file is replaced only if it is a kind of file that headwise
writes, and neither an input of the run nor inside one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from headwise.errors import OutputError
from headwise.inputs import user_path

# safetensors and tokenizers report a full disk as errors of their own, with these words in them.
_RUST_OS_ERROR = re.compile(r"\(os error \d+\)")
_LEFTOVER = re.compile(r"\..+\.(\d+-[0-9a-f]{32}\.tmp|[0-9a-f]{32}\.old)")
# The files by which a folder says that headwise wrote it: JSON with a "format" of ours.
RECORDS = ("headwise.json", "profile.json", "run.json", "inputs.json", "export.json")
_MAX_RECORD = 64 * 2**20  # bytes; a record is far smaller
# What verbs add to a folder that they read: a verification and a report belong to their model.
ADDED = frozenset({"verify.json", "report.html"})
_PICTURES = frozenset({".html", ".png", ".svg"})
GGUF_MARK = b"headwise.key"  # metadata by which a GGUF file says that headwise wrote it
_HEAD = 64 * 2**10  # bytes of a GGUF file in which the mark stands
Kind = Literal["file", "page", "folder"]  # a page is also a drawing


def check_output(
    path: Path, *, force: bool, inputs: Sequence[Path | str] = (), kind: Kind | None = None
) -> None:
    """Raise if `path` may not be written; call it before long work.

    `inputs` are the files and folders the run reads: they are never replaced. `kind` says whether a
    file or a folder will be written, if only one of them is possible.
    """
    _check_kind(path, kind)
    if str(path).startswith("~"):
        raise OutputError(f"{path} begins with the home of an unknown user; write the path out.")
    if path.is_symlink():
        raise OutputError(
            f"{path} is a symbolic link, which is never replaced; give its target or another path."
        )
    if not path.exists():
        _check_parent(path)
        return
    if not path.is_dir() and not stat.S_ISREG(path.stat().st_mode):
        raise OutputError(f"{path} is a device or a pipe; give a file or a folder to write.")
    if not force:
        sweep(path)
        raise OutputError(f"{path} exists already; give another name, or --force to overwrite it.")
    reason = _why_precious(path, inputs, kind)
    if reason is not None:
        raise OutputError(
            f"{path} is not replaced, even with --force: {reason}; give another path."
        )


def is_headwise_output(folder: Path) -> bool:
    """Whether a folder holds a record that says headwise wrote it."""
    return any(_is_record(folder / name) for name in RECORDS)


@contextlib.contextmanager
def atomic_file(
    path: Path,
    *,
    force: bool = False,
    inputs: Sequence[Path | str] | None = None,
    kind: Kind = "file",
) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; on success it becomes `path`.

    `inputs` are what the run reads, if the user named `path`. Without them it is a file inside a
    folder that headwise owns, where `force` may replace anything.
    """
    _check_kind(path, kind)
    inside = inputs is None and force and path.is_file() and not path.is_symlink()
    if not inside:
        check_output(path, force=force, inputs=inputs or (), kind=kind)
    sweep(path)
    with _beside(path) as temporary:
        yield temporary
        _flush(temporary)
        if force:
            temporary.replace(path)
        else:
            _take_free_place(temporary, path)


@contextlib.contextmanager
def atomic_folder(
    path: Path, *, force: bool = False, inputs: Sequence[Path | str] = (), inside: bool = False
) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it becomes `path`.

    `inside` is for folders inside one that headwise owns (a checkpoint of a run): they have no
    record of their own.
    """
    _check_kind(path, "folder")
    if not inside:
        check_output(path, force=force, inputs=inputs)
    elif path.exists() and not force:
        raise OutputError(f"{path} exists already.")
    sweep(path)
    with _beside(path) as temporary:
        temporary.mkdir()
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _flush(file)
        replace_folder(path, temporary)


def replace_folder(path: Path, new: Path) -> None:
    """Put the folder `new` in the place of `path`; a failure leaves the earlier one there."""
    if not path.exists():
        new.rename(path)
        return
    # Two renames: for an instant neither is there, but `sweep` puts the earlier one back.
    old = path.with_name(f".{path.name}.{uuid.uuid4().hex}.old")
    path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old)


def beside(output: Path, name: str) -> Path:
    """A place beside an output; `name` says how it is called, with {} for the output's name."""
    place = output.resolve() if output.name in ("", "..") else output
    return place.parent / name.format(place.name)


def discard(folder: Path) -> None:
    """Remove a folder; killed within, it leaves a temporary name that `sweep` removes."""
    gone = _temporary(folder)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def is_leftover(path: Path) -> bool:
    """Whether a killed process left this behind: a temporary name, or what was moved aside."""
    return _LEFTOVER.fullmatch(path.name) is not None


def sweep(path: Path) -> None:
    """Clean up after a process that was killed while it wrote or replaced `path`."""
    temporary = re.compile(re.escape(f".{path.name}.") + r"(\d+)-[0-9a-f]{32}\.tmp")
    earlier = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{32}\.old")
    for found in sorted(path.parent.iterdir()) if path.parent.is_dir() else ():
        match = temporary.fullmatch(found.name)
        if match and not _is_another_process(int(match[1])):
            if found.is_dir():
                shutil.rmtree(found, ignore_errors=True)
            else:
                found.unlink(missing_ok=True)
        elif earlier.fullmatch(found.name):
            if path.exists():
                shutil.rmtree(found, ignore_errors=True)
            else:
                found.rename(path)


def write_text(
    path: Path,
    text: str,
    *,
    force: bool = False,
    inputs: Sequence[Path | str] | None = None,
    kind: Kind = "file",
) -> None:
    """Write `text` to `path`, whole or not at all; `inputs` and `kind` as for `atomic_file`."""
    with atomic_file(path, force=force, inputs=inputs, kind=kind) as temporary:
        temporary.write_text(text, encoding="utf-8")


def gguf_key(path: Path) -> str | None:
    """The key of the inputs that a GGUF file of ours was made from; None for any other file."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as stream:
            head = stream.read(_HEAD)
    except OSError:
        return None
    _, mark, rest = head.partition(GGUF_MARK)
    found = rest[12:76]  # after the type and the length of a string
    if not head.startswith(b"GGUF") or not mark or not re.fullmatch(rb"[0-9a-f]{64}", found):
        return None
    return found.decode()


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def versions(
    packages: Sequence[str] = ("headwise", "numpy", "scipy"),
) -> tuple[tuple[str, str], ...]:
    """Name and version of Python and of the installed ones among `packages`."""
    found = [("python", platform.python_version())]
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append((name, importlib.metadata.version(name)))
    return tuple(found)


@contextlib.contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Lock `folder`, creating it if needed; raise if another process holds the lock.

    Two runs in one folder would destroy each other's work. The system releases the lock when a
    process ends, however it ends. Where folders cannot be locked, nothing is checked.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise OutputError(
            f"{folder} could not be written ({error.strerror}); choose another place."
        ) from error
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"another run is using {folder}; wait for it, or give another output."
            ) from None
        except OSError:  # a file system without locks
            pass
        if not folder.exists() or folder.stat().st_ino != os.fstat(opened).st_ino:
            raise OutputError(
                f"another run has just finished in {folder}; run the same command again."
            )
        yield
    finally:
        os.close(opened)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A free temporary name beside `path`, removed on failure; OS errors become one sentence."""
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
    except Exception as error:
        if not isinstance(error, OSError) and not _RUST_OS_ERROR.search(str(error)):
            raise
        reason = getattr(error, "strerror", None) or error
        raise OutputError(
            f"{path} could not be written ({reason}); what was there before is untouched; free "
            "space, or choose another place."
        ) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex}.tmp")


def _why_precious(path: Path, inputs: Sequence[Path | str], kind: Kind | None) -> str | None:
    """Why something that is there may not be replaced; None if it may."""
    place = path.resolve()
    for one in inputs:
        given = user_path(one)
        if given.exists() and place in (given.resolve(), *given.resolve().parents):
            return f"it is or contains {given}, an input of this run"
    if not path.is_dir():
        return _why_file_precious(path, inputs, kind)
    for name, special in (("the working directory", Path.cwd()), ("your home", Path.home())):
        if place in (special.resolve(), *special.resolve().parents):
            return f"it is or contains {name}"
    if place.is_mount():
        return "it is a mount point"
    if not is_headwise_output(path) and any(path.iterdir()):
        there = ", ".join(sorted(p.name for p in path.iterdir())[:3])
        return f"headwise did not write it (it contains {there})"
    return None


def _why_file_precious(path: Path, inputs: Sequence[Path | str], kind: Kind | None) -> str | None:
    place = path.resolve()
    for one in inputs:
        folder = user_path(one)
        inside = folder.is_dir() and folder.resolve() in place.parents
        if inside and path.name not in ADDED:
            return f"it is in {folder}, an input of this run"
    drawn = kind == "page" and path.suffix in _PICTURES
    ours = drawn or _is_record(path) or gguf_key(path) is not None
    if not ours and path.stat().st_size:
        return "it is not a kind of file that headwise writes there"
    return None


def _check_kind(path: Path, kind: Kind | None) -> None:
    if kind in ("file", "page") and path.is_dir():
        raise OutputError(f"{path} is a folder, but a file is to be written; give a file name.")
    if kind == "folder" and path.is_file():
        raise OutputError(f"{path} is a file, but a folder is to be written; give another name.")


def _take_free_place(temporary: Path, path: Path) -> None:
    """Give a file its name unless another process has just written one of that name."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise OutputError(
            f"another run has just written {path}; give another name, or --force to overwrite it."
        ) from None
    except OSError:  # a file system without hard links
        temporary.replace(path)


def _check_parent(path: Path) -> None:
    """Raise if `path`, which is not there, could not come to be where its name says."""
    for parent in path.absolute().parents:
        if parent.exists():
            if not parent.is_dir():
                raise OutputError(f"{parent} is a file, so {path} cannot be inside it.")
            # Making NEW would turn NEW/../OUT, which is nothing yet, into an OUT that is there.
            if ".." in path.absolute().relative_to(parent).parts:
                raise OutputError(
                    f"{path} leads through a folder that does not exist; write the place itself."
                )
            return


def _is_record(path: Path) -> bool:
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_RECORD:
            return False
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and str(data.get("format", "")).startswith("headwise-")


def _is_another_process(pid: int) -> bool:
    if pid == os.getpid():  # it is ours again, as after a restart in a container
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is there, and not ours to ask
        return True
    return True


def _flush(path: Path) -> None:
    """Force a file to disk before it takes its final name."""
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())
