"""Checks on files before they are opened: regular files of plausible size only.

Reading a pipe or a device may never end, and a file of absurd size would fill the memory. Libraries
that get a folder look for their own files in it, so all of those are checked first.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from headwise.errors import MOST_REASON, HeadwiseError, quoted

MOST_BYTES = 256 * 2**20  # of a JSON file, a tokenizer, a template: far above any
MOST_CONFIG = 4 * 2**20  # of a config.json, which transformers reads again and again
MOST_TEXT = 4 * 2**30  # of one text file, which is read into memory
MOST_WEIGHTS = 512 * 2**30  # of one file of weights
_LOOKED_FOR = frozenset(
    {".jinja", ".json", ".model", ".py", ".safetensors", ".tiktoken", ".txt", ".vocab"}
)


def user_path(name: str | Path) -> Path:
    """The path that the user named, `~` and `~name` written out."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise HeadwiseError(
            f"{quoted(str(name))} begins with the home of an unknown user; write the path out."
        ) from error


def check_file(path: Path, *, most: int = MOST_BYTES, advice: str = "check it") -> os.stat_result:
    """Raise unless `path` is a regular file of at most `most` bytes that is there."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise HeadwiseError(f"{path} does not exist; {advice}.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not a valid path"
        name = quoted(str(path)) if len(str(path)) > MOST_REASON else path
        raise HeadwiseError(f"{name} cannot be read ({reason}); {advice}.") from error
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "a device or a pipe"
        raise HeadwiseError(f"{path} must be a file, but it is {what}; {advice}.")
    if found.st_size > most:
        raise HeadwiseError(
            f"{path} has {found.st_size:,} bytes, more than the limit of {most:,}; {advice}."
        )
    return found


def file_text(path: Path, *, most: int = MOST_BYTES, advice: str = "check it") -> str:
    """The text of a regular UTF-8 file, every line end as one character; UnicodeDecodeError if not.

    Just as much is read as the system says is there: some files of /proc are without an end.
    """
    size = check_file(path, most=most, advice=advice).st_size
    with path.open("rb") as stream:
        text = stream.read(size).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_folder(folder: Path) -> None:
    """Raise if a file that a library may look for in a model's folder must not be read.

    The size of weights is checked against their own header, elsewhere.
    """
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        if path.suffix in _LOOKED_FOR and (path.exists() or not path.is_symlink()):
            if path.is_dir() and path.parent != folder:
                continue
            most = MOST_WEIGHTS if path.suffix == ".safetensors" else MOST_BYTES
            check_file(path, most=most, advice="restore or remove it")
