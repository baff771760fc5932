"""Outputs are whole or not there, and nothing good is lost."""

import os
import subprocess
import sys

import pytest

from headwise.artifacts import (
    atomic_file,
    atomic_folder,
    sha256,
    sole_writer,
    versions,
    write_text,
)
from headwise.errors import OutputError


def test_an_existing_file_is_not_overwritten(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "first")
    with pytest.raises(OutputError, match=r"exists already; give another name, or --force"):
        write_text(path, "second")
    assert path.read_text() == "first"
    write_text(path, "second", force=True)
    assert path.read_text() == "second"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_write_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "a.json"
    write_text(path, "first")
    with pytest.raises(error), atomic_file(path, force=True) as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise error
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text() == "first"


def test_a_full_disk_is_said_in_one_sentence(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(OutputError, match=r"be written .No space left"), atomic_file(path):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_replaced_whole(tmp_path):
    path = tmp_path / "run"
    with atomic_folder(path) as temporary:
        (temporary / "old").write_text("1")
    with pytest.raises(OutputError, match="exists already"), atomic_folder(path):
        pass
    with pytest.raises(RuntimeError), atomic_folder(path, force=True) as temporary:  # noqa: PT012
        (temporary / "new").write_text("2")
        raise RuntimeError
    assert [p.name for p in path.iterdir()] == ["old"]
    with atomic_folder(path, force=True) as temporary:
        (temporary / "new").write_text("2")
    assert [p.name for p in path.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_file_is_not_a_folder(tmp_path):
    with pytest.raises(OutputError, match="is a folder, but a file"):
        write_text(tmp_path, "x", force=True)
    (tmp_path / "file").touch()
    with (
        pytest.raises(OutputError, match="is a file, but a folder"),
        atomic_folder(tmp_path / "file", force=True),
    ):
        pass


def test_hash_and_versions(tmp_path):
    write_text(tmp_path / "x", "abc")
    assert sha256(tmp_path / "x").startswith("ba7816bf8f01cfea")
    found = dict(versions(("numpy", "no-such-package")))
    assert set(found) == {"python", "numpy"}


def test_what_a_killed_process_left_is_swept_and_nothing_else(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    one = "0" * 32
    stale, alive = (tmp_path / f".run.{pid}-{one}.tmp" for pid in (dead.pid, os.getppid()))
    others = [tmp_path / n for n in (f".run.{one}.old", f".runs.{dead.pid}-{one}.tmp", "kept")]
    for folder in (stale, alive, *others):
        folder.mkdir()
        (folder / "file").touch()
    with atomic_folder(tmp_path / "run") as temporary:
        (temporary / "new").touch()
    assert not stale.exists()
    assert {p.name for p in tmp_path.iterdir()} == {"run", alive.name, *(p.name for p in others)}


def test_a_folder_has_one_writer_at_a_time(tmp_path):
    held = (
        "import sys, pathlib\n"
        "from headwise.artifacts import sole_writer\n"
        "with sole_writer(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", held, str(tmp_path / "work")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "held\n"
        with (
            pytest.raises(OutputError, match="another run is at work in"),
            sole_writer(tmp_path / "work"),
        ):
            pass
    finally:
        other.kill()  # the hold goes with the process, however it ends
        other.communicate()
    with sole_writer(tmp_path / "work"):
        pass
