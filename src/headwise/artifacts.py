"""Files that are either whole or not there.

An output is written beside its place under a temporary name and moved over it in one step, so
a kill, a full disk or an error leaves whatever stood there before. Nothing is overwritten unless
`force` says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from headwise.errors import OutputError

# safetensors and tokenizers report a full disk as errors of their own, with these words in them.
_RUST_OS_ERROR = re.compile(r"\(os error \d+\)")


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raise if `path` exists and may not be overwritten; call it before long work."""
    if path.exists() and not force:
        raise OutputError(f"{path} exists already; give another name, or --force to overwrite it.")


@contextlib.contextmanager
def atomic_file(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; on success it becomes `path`."""
    refuse_existing(path, force=force)
    if path.is_dir():
        raise OutputError(f"{path} is a folder, but a file is to be written; give a file name.")
    with _beside(path) as temporary:
        yield temporary
        _flush(temporary)
        temporary.replace(path)


@contextlib.contextmanager
def atomic_folder(path: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it becomes `path`."""
    refuse_existing(path, force=force)
    if path.is_file():
        raise OutputError(f"{path} is a file, but a folder is to be written; give another name.")
    _sweep(path)
    with _beside(path) as temporary:
        temporary.mkdir()
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _flush(file)
        if path.exists():
            # Two renames: for an instant neither is there, but each is whole under some name.
            old = path.with_name(f".{path.name}.{uuid.uuid4().hex}.old")
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.rename(path)


def write_text(path: Path, text: str, *, force: bool = False) -> None:
    """Write `text` to `path`, whole or not at all."""
    with atomic_file(path, force=force) as temporary:
        temporary.write_text(text, encoding="utf-8")


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
def _beside(path: Path) -> Iterator[Path]:
    """A free temporary name beside `path`, removed on failure; OS errors become one sentence."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
    except Exception as error:
        if not isinstance(error, OSError) and not _RUST_OS_ERROR.search(str(error)):
            raise
        reason = getattr(error, "strerror", None) or error
        raise OutputError(
            f"{path} could not be written ({reason}); what stood there before is "
            "untouched; free space or choose another place."
        ) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def sole_writer(folder: Path, name: str = "lock") -> Iterator[None]:
    """Hold `folder`, which is made if need be, by a file in it; raise if another process does.

    Two runs that go on in one folder of unfinished work would mix theirs. The system lets go of
    the hold when a process ends, however it ends. Where files cannot be held, nothing is checked.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / name).open("w")
    except OSError as error:
        raise OutputError(
            f"{folder} could not be written ({error.strerror}); choose another place."
        ) from error
    with opened as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(
                f"another run is at work in {folder}; wait for it, or give another output."
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


def _sweep(path: Path) -> None:
    """Remove temporary folders of `path` whose process was killed while it wrote them."""
    name = re.compile(re.escape(f".{path.name}.") + r"(\d+)-[0-9a-f]{32}\.tmp")
    for old in path.parent.iterdir() if path.parent.is_dir() else ():
        match = name.fullmatch(old.name)
        if match and not _is_another_process(int(match[1])):
            shutil.rmtree(old, ignore_errors=True)


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
