"""Result files: found by their trial, refused when they hold something else."""

import dataclasses
import errno
import json
import os

import pytest

from headwise.errors import HeadwiseError, OutputError
from headwise.papers.harness.claim import ReproduceError, Trial
from headwise.papers.harness.store import Store
from headwise.papers.harness.workers import TrialOutcome
from headwise.runs import read_run

DONE = TrialOutcome({"y": 3}, 1.25, (("python", "3.11.1"),), 2)
FAILED = TrialOutcome(None, 0.5, error="ValueError: no", trace=("a.py:3 f",))


@pytest.fixture
def store(tmp_path, toy):
    store = Store(tmp_path / "run")
    with store.resumed("quick", {"toy": 2}):
        store.put(toy.CLAIM, Trial("toy", "begun", 0), DONE)
    (store.folder / "trials" / "toy.jsonl").unlink()
    return Store(tmp_path / "run")


def test_a_result_is_found_again_by_its_trial_and_version(store, toy):
    trial = Trial("toy", "a", 1, {"widths": (2, 3)})
    assert store.stored(toy.CLAIM, trial) is None
    store.put(toy.CLAIM, trial, DONE)
    found = store.stored(toy.CLAIM, trial)
    assert found.result.values == {"y": 3}
    assert (found.result.seconds, found.cores) == (1.25, 2)
    for other in (
        dataclasses.replace(trial, seed=2),
        dataclasses.replace(trial, name="b"),
        dataclasses.replace(trial, parameters={"widths": (2, 5)}),
    ):
        assert store.stored(toy.CLAIM, other) is None
    newer = dataclasses.replace(toy.CLAIM, version=2)
    assert store.stored(newer, trial) is None
    # The expected cost is for the clock and decides nothing.
    assert store.stored(toy.CLAIM, dataclasses.replace(trial, cost=9.0)) is not None


def test_a_failure_is_kept_until_the_trial_succeeds(store, toy):
    trial = Trial("toy", "a", 1)
    store.put(toy.CLAIM, trial, FAILED)
    assert store.stored(toy.CLAIM, trial) is None
    assert store.failure(toy.CLAIM, trial).error == "ValueError: no"
    store.put(toy.CLAIM, trial, DONE)
    assert store.failure(toy.CLAIM, trial) is None


def only_line(store):
    """The text of the one line there is."""
    (line,) = (store.folder / "trials" / "toy.jsonl").read_text().splitlines()
    return line


def rewritten(store, text):
    """A store that reads this text in the place of the claim's lines."""
    (store.folder / "trials" / "toy.jsonl").write_text(text)
    return Store(store.folder)


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"values": {"y": 3}, "seconds": 1}', "\ud800"])
def test_a_damaged_result_counts_as_missing_and_spoils_no_other(store, toy, damage):
    one, other = Trial("toy", "a", 1), Trial("toy", "b", 1)
    store.put(toy.CLAIM, one, DONE)
    whole = only_line(store)
    assert rewritten(store, f"{whole}\n").stored(toy.CLAIM, one) is not None
    path = store.folder / "trials" / "toy.jsonl"
    path.write_bytes(f"{damage}\n{whole}\n".encode("utf-8", "surrogatepass"))
    again = Store(store.folder)
    assert again.stored(toy.CLAIM, one).result.values == {"y": 3}
    again.put(toy.CLAIM, other, DONE)
    assert Store(store.folder).stored(toy.CLAIM, other) is not None
    path.write_bytes(f"{damage}\n".encode("utf-8", "surrogatepass"))
    assert Store(store.folder).stored(toy.CLAIM, one) is None


@pytest.mark.parametrize(
    "key",
    ["format", "claim_version", "values", "seconds", "versions", "cores", "name", "seed",
     "parameters"],
)  # fmt: skip
def test_a_result_that_lacks_something_counts_as_missing(store, toy, key):
    trial = Trial("toy", "a", 1)
    store.put(toy.CLAIM, trial, DONE)
    document = json.loads(only_line(store))
    again = rewritten(store, json.dumps(document) + "\n")
    assert again.stored(toy.CLAIM, trial) is not None
    del document[key]
    assert rewritten(store, json.dumps(document) + "\n").stored(toy.CLAIM, trial) is None


def test_a_result_of_another_trial_is_not_taken_for_this_one(store, toy):
    one, other = Trial("toy", "a", 1), Trial("toy", "a", 2)
    store.put(toy.CLAIM, one, DONE)
    document = json.loads(only_line(store)) | {"seed": 2}
    again = rewritten(store, json.dumps(document) + "\n")
    assert again.stored(toy.CLAIM, one) is None
    assert again.stored(toy.CLAIM, other) is not None


@pytest.mark.slow
def test_a_line_torn_anywhere_is_dropped_and_run_again(store, toy):
    one, two = Trial("toy", "a", 1), Trial("toy", "ω", 2, {"widths": [2, 3]})
    store.put(toy.CLAIM, one, DONE)
    path = store.folder / "trials" / "toy.jsonl"
    first = path.read_bytes()
    store.put(toy.CLAIM, two, DONE)
    both = path.read_bytes()
    for end in range(len(first), len(both)):
        path.write_bytes(both[:end])
        torn = Store(store.folder)
        assert torn.stored(toy.CLAIM, one) is not None
        assert torn.stored(toy.CLAIM, two) is None, end
        torn.put(toy.CLAIM, two, DONE)
        assert path.read_bytes() == both


def test_a_full_disk_leaves_whole_lines_and_one_sentence(store, toy, monkeypatch):
    one, two = Trial("toy", "a", 1), Trial("toy", "b", 1)
    store.put(toy.CLAIM, one, DONE)
    path = store.folder / "trials" / "toy.jsonl"
    before = path.read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"toy\.jsonl could not be written \(No space left"):
        store.put(toy.CLAIM, two, DONE)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert store.stored(toy.CLAIM, two) is None
    store.put(toy.CLAIM, two, DONE)
    assert Store(store.folder).stored(toy.CLAIM, two) is not None


def test_a_finished_trial_stays_finished(store, toy):
    trial = Trial("toy", "a", 1)
    store.put(toy.CLAIM, trial, DONE)
    path = store.folder / "trials" / "toy.jsonl"
    done = path.read_text()
    failed = rewritten(store, "")
    failed.put(toy.CLAIM, trial, FAILED)
    assert failed.failure(toy.CLAIM, trial) is not None
    again = rewritten(store, done + path.read_text())
    assert again.stored(toy.CLAIM, trial) is not None
    assert again.failure(toy.CLAIM, trial) is None


def test_a_folder_keeps_its_size_and_its_seeds_only_grow(store):
    with store.resumed("quick", {"toy": 1, "new": 3}):
        assert read_run(store.folder).status == "running"
    assert store.asked().seeds == {"toy": 2, "new": 3}
    assert read_run(store.folder).status == "finished"
    with (
        pytest.raises(ReproduceError, match="holds a quick run, but a full one"),
        store.resumed("full", {"toy": 1}),
    ):
        pass
    assert store.asked().seeds == {"toy": 2, "new": 3}


def test_folders_that_are_not_ours_are_refused(tmp_path):
    (tmp_path / "letter.txt").write_text("Dear")
    with (
        pytest.raises(OutputError, match=r"headwise did not write it \(it contains letter\.txt\)"),
        Store(tmp_path).resumed("quick", {}),
    ):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]
    for text in ("{", "{}", json.dumps({"format": "x", "size": "quick", "seeds": {}})):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(HeadwiseError, match=r"run\.json .*give another folder"):
            Store(tmp_path).asked()
    wrong = {"format": "headwise-run/2", "kind": "reproduce", "inputs": {"size": "huge"}}
    (tmp_path / "run.json").write_text(json.dumps(wrong))
    with pytest.raises(HeadwiseError, match=r"run\.json .*; give a new folder"):
        Store(tmp_path).asked()
    (tmp_path / "run.json").write_text(json.dumps(wrong | {"kind": "train"}))
    with pytest.raises(ReproduceError, match="holds a run of train, not of reproduce"):
        Store(tmp_path).asked()


def test_a_second_runner_is_refused_until_the_first_ends(store):
    with (
        store.resumed("quick", {"toy": 1}),
        pytest.raises(OutputError, match="another run is using"),
        store.resumed("quick", {"toy": 1}),
    ):
        pass
    with store.resumed("quick", {"toy": 1}):
        pass


def test_a_runner_that_wrote_nothing_leaves_a_folder_that_can_be_used(tmp_path):
    store = Store(tmp_path / "a" / "run")

    def stopped():
        with store.resumed("full", {"toy": 5}):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert not store.folder.exists()
    with store.resumed("quick", {"toy": 1}):
        pass
    assert store.asked().seeds == {"toy": 1}


def test_a_place_that_cannot_be_a_folder_is_one_sentence(tmp_path):
    (tmp_path / "letter.txt").write_text("Dear")
    place = Store(tmp_path / "letter.txt" / "run")
    with pytest.raises(OutputError, match=r"letter\.txt"), place.resumed("quick", {}):
        pass


def test_a_file_is_no_folder_for_results(tmp_path):
    (tmp_path / "letter.txt").write_text("Dear")
    with (
        pytest.raises(OutputError, match=r"letter\.txt is a file, but a folder is to be written"),
        Store(tmp_path / "letter.txt").resumed("quick", {}),
    ):
        pass
    assert (tmp_path / "letter.txt").read_text() == "Dear"


def test_a_kill_while_the_first_file_is_written_is_not_in_the_way(tmp_path):
    (tmp_path / ".run.json.123-0123456789abcdef0123456789abcdef.tmp").write_text("{")
    assert Store(tmp_path).asked() is None
    with Store(tmp_path).resumed("quick", {"toy": 1}):
        pass
    assert Store(tmp_path).asked().seeds == {"toy": 1}


def test_a_file_system_without_locks_can_be_used(store, monkeypatch):
    import errno
    import fcntl

    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with store.resumed("quick", {"toy": 1}):
        assert store.asked() is not None
