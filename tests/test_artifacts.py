"""Outputs are whole or not there, and nothing good is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.artifacts import (
    atomic_file,
    atomic_folder,
    check_output,
    one_writer,
    sha256,
    sweep,
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
        (temporary / "run.json").write_text('{"format": "headwise-run/2"}')
    with pytest.raises(OutputError, match="exists already"), atomic_folder(path):
        pass
    with pytest.raises(RuntimeError), atomic_folder(path, force=True) as temporary:  # noqa: PT012
        (temporary / "new").write_text("2")
        raise RuntimeError
    assert sorted(p.name for p in path.iterdir()) == ["old", "run.json"]
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
    others = [tmp_path / n for n in (f".runs.{one}.old", f".runs.{dead.pid}-{one}.tmp", "kept")]
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
        "from headwise.artifacts import one_writer\n"
        "with one_writer(pathlib.Path(sys.argv[1])):\n"
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
            pytest.raises(OutputError, match="another run is using"),
            one_writer(tmp_path / "work"),
        ):
            pass
    finally:
        other.kill()  # the hold goes with the process, however it ends
        other.communicate()
    with one_writer(tmp_path / "work"):
        pass


def ours(path, name="headwise.json"):
    path.mkdir(parents=True)
    (path / name).write_text('{"format": "headwise-cut/1"}')
    return path


def test_force_replaces_only_what_headwise_wrote(tmp_path):
    foreign = tmp_path / "photos"
    foreign.mkdir()
    (foreign / "cat.png").write_text("cat")
    (foreign / "run.json").write_text('{"format": "another tool"}')
    with pytest.raises(OutputError, match=r"headwise did not write it .it contains cat.png, run"):
        check_output(foreign, force=True)
    check_output(ours(tmp_path / "cut"), force=True)
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty", force=True)


@pytest.mark.parametrize("given", ["model", "parent", "text"])
def test_force_never_replaces_an_input_or_its_parent(tmp_path, given):
    model = ours(tmp_path / "ours" / "model")
    (tmp_path / "ours" / "run.json").write_text('{"format": "headwise-run/2"}')
    text = tmp_path / "notes.txt"
    text.write_text("x")
    path = {"model": model, "parent": model.parent, "text": text}[given]
    with pytest.raises(OutputError, match=r"an input of this run"):
        check_output(path, force=True, inputs=[str(model), text])
    assert (model / "headwise.json").exists()


@pytest.mark.parametrize("where", ["the working directory", "your home"])
def test_force_never_replaces_special_places(tmp_path, monkeypatch, where):
    place = ours(tmp_path / "a")
    (place / "b").mkdir()
    if where == "your home":
        monkeypatch.setenv("HOME", str(place / "b"))
    else:
        monkeypatch.chdir(place / "b")
    with pytest.raises(OutputError, match=where):
        check_output(place, force=True)


def test_force_never_replaces_a_mount():
    with pytest.raises(OutputError, match=r"contains|mount point"):
        check_output(Path("/"), force=True)
    with pytest.raises(OutputError, match="it is a mount point"):
        check_output(Path("/proc"), force=True)


def test_a_symbolic_link_is_never_replaced(tmp_path):
    real = ours(tmp_path / "real")
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("link", "dangling"):
        with (
            pytest.raises(OutputError, match="symbolic link"),
            atomic_folder(tmp_path / name, force=True),
        ):
            pass
    assert (real / "headwise.json").exists()


def test_pipes_and_devices_are_not_outputs(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(OutputError, match="a device or a pipe"):
            check_output(path, force=True)


def test_a_file_in_the_way_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="is a file, so"):
        check_output(tmp_path / "file" / "out", force=False)


def test_what_was_there_comes_back_when_replacing_fails(tmp_path, monkeypatch):
    path = ours(tmp_path / "out")
    rename, calls = Path.rename, []

    def fail_second(self, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_second)
    with pytest.raises(OutputError, match="untouched"), atomic_folder(path, force=True) as new:
        (new / "new").touch()
    assert [p.name for p in path.iterdir()] == ["headwise.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_was_there_comes_back_after_a_kill_between_the_two_renames(tmp_path):
    aside = ours(tmp_path / f".out.{'0' * 32}.old")
    sweep(tmp_path / "out")
    assert not aside.exists()
    assert (tmp_path / "out" / "headwise.json").exists()
    ours(aside)
    sweep(tmp_path / "out")  # the new one has its name: the earlier one may go
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_a_place_beyond_a_folder_that_is_not_there_is_refused(tmp_path, force):
    """Making NEW would turn NEW/../notes.txt, which is nothing yet, into a file that is there."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "NEW" / ".." / "notes.txt", tmp_path / "a/b/../../notes.txt"):
        with pytest.raises(OutputError, match="leads through a folder that does not exist"):
            write_text(path, "theirs", force=force, inputs=())
        with (
            pytest.raises(OutputError, match="leads through a folder"),
            atomic_folder(path, force=force),
        ):
            pass
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"notes.txt", "there"}
    write_text(tmp_path / "there" / ".." / "new.txt", "new", inputs=())
    assert (tmp_path / "new.txt").read_text() == "new"
