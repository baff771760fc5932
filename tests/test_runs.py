"""One way to resume: parts survive, other inputs are refused, nothing is left behind."""

import json

import numpy as np
import pytest

from headwise import runs
from headwise.errors import HeadwiseError, OutputError

INPUTS = {"model": "m", "settings": {"tokens": 7, "length": 5}}


def begin(output, inputs=INPUTS, **options):
    return runs.resume(output, "profile", inputs, record="result.json", **options)


def finish(run):
    with run.finish() as folder:
        record = {"format": "headwise-test/1", "key": run.key}
        (folder / "result.json").write_text(json.dumps(record))
        (folder / "run.json").write_text(json.dumps(record))


def test_finished_parts_are_there_after_a_failure(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), begin(out) as run:  # noqa: PT012
        run.put("0", {"x": np.arange(3)}, {"error": 0.5})
        raise KeyboardInterrupt
    with begin(out) as run:
        assert run.has("0")
        assert not run.has("1")
        assert run.get("0", "np")["x"].tolist() == [0, 1, 2]
        assert run.note("0") == {"error": 0.5}
        finish(run)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_damaged_part_is_made_again(tmp_path):
    with begin(tmp_path / "out") as run:
        run.put("0", {"x": np.arange(3)})
        run.path("0").write_bytes(run.path("0").read_bytes()[:-1])
        with pytest.raises(HeadwiseError, match="cannot be read"):
            run.get("0")
        assert not run.has("0")
        assert not run.path("0").exists()


def test_other_inputs_are_refused_by_name_and_replaced_by_force(tmp_path):
    out = tmp_path / "out"
    with begin(out) as run:
        run.put("0", {"x": np.arange(3)})
    other = {"model": "m", "settings": {"tokens": 9, "length": 5}}
    with pytest.raises(OutputError, match=r"settings.tokens \(7 → 9\);"), begin(out, other):
        pass
    with begin(out) as run:
        assert run.has("0")
    with begin(out, other, force=True) as run:
        assert not run.has("0")


def test_a_whole_output_is_not_made_again_without_force(tmp_path):
    out = tmp_path / "out"
    with begin(out) as run:
        finish(run)
    with pytest.raises(OutputError, match="exists already"), begin(out):
        pass
    with begin(out, force=True) as run:
        assert not run.finished
        finish(run)


def test_a_kill_after_the_output_has_its_name_is_tidied_up(tmp_path):
    out = tmp_path / "out"
    with begin(out) as run:
        finish(run)
    partial = runs.partial_of(out)
    partial.mkdir()
    (partial / "run.json").write_text("{}")
    with begin(out) as run:
        assert run.finished
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    # The same with a last file (a report) missing, and its control.
    with begin(out, last=["report.html"]) as run:
        assert run.finished
        (out / "report.html").touch()
    with pytest.raises(OutputError, match="exists already"), begin(out, last=["report.html"]):
        pass


def test_an_output_of_other_inputs_is_not_taken_for_finished(tmp_path):
    out = tmp_path / "out"
    with begin(out) as run:
        finish(run)
    runs.partial_of(out).mkdir()
    with pytest.raises(OutputError, match="exists already"), begin(out, {"model": "other"}):
        pass


def test_a_foreign_folder_of_that_name_is_refused(tmp_path):
    partial = runs.partial_of(tmp_path / "out")
    partial.mkdir()
    (partial / "diary.txt").write_text("dear")
    for force in (False, True):
        with pytest.raises(OutputError, match=r"diary\.txt"), begin(tmp_path / "out", force=force):
            pass
    assert (partial / "diary.txt").read_text() == "dear"


def test_work_that_grows_in_its_output(tmp_path):
    out = tmp_path / "out"
    inputs = {"model": "m", "keep": 2, "profile": None}
    options = {"free": {"keep"}, "later": {"profile"}}
    with runs.resume_in_place(out, "compare", inputs, **options) as run:
        run.put("cell", {"x": np.ones(2)})
    with runs.resume_in_place(
        out, "compare", {**inputs, "keep": 5, "profile": "p"}, **options
    ) as r:
        assert r.has("cell")
    assert runs.read_run(out).inputs == {"model": "m", "keep": 5, "profile": "p"}
    with (
        pytest.raises(OutputError, match="differs in model"),
        runs.resume_in_place(out, "compare", {**inputs, "model": "n"}, **options),
    ):
        pass
    with runs.resume_in_place(out, "compare", {"model": "n"}, force=True) as run:
        assert not run.has("cell")
    with (
        pytest.raises(OutputError, match="differs in kind"),
        runs.resume_in_place(out, "train", {"model": "n"}),
    ):
        pass


def test_growing_work_leaves_foreign_folders_alone(tmp_path):
    (tmp_path / "cat.png").write_text("cat")
    for force in (False, True):
        with (
            pytest.raises(OutputError, match=r"headwise did not write"),
            runs.resume_in_place(tmp_path, "train", {}, force=force),
        ):
            pass
    assert (tmp_path / "cat.png").exists()


def test_two_runs_at_once_are_refused(tmp_path):
    with (
        begin(tmp_path / "out"),
        pytest.raises(OutputError, match="another run is using"),
        begin(tmp_path / "out"),
    ):
        pass


def test_tensors_of_torch_are_kept_bit_for_bit(tmp_path):
    import torch

    base = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
    tensors = {"q": base[:, :3], "k": base, "again": base}  # views of one memory
    with begin(tmp_path / "out") as run:
        run.put("3", tensors, {"loss": 0.5})
        found = run.get("3")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name].view(torch.int16), tensor.contiguous().view(torch.int16))


def test_a_replaced_output_is_back_if_the_new_work_fails_before_it_begins(tmp_path):
    out = tmp_path / "out"
    with runs.resume_in_place(out, "train", {"seed": 3}) as run:
        run.put("0", {"x": np.arange(3)})
    again = {"seed": 4}
    with (
        pytest.raises(OutputError, match="no text"),
        runs.resume_in_place(out, "train", again, force=True),
    ):
        raise OutputError("no text")
    assert runs.read_run(out).inputs == {"seed": 3}
    assert run.has("0")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def waiting(tmp_path, name=".out.replaced"):
    return runs.read_run(tmp_path / name).inputs


def test_a_replaced_output_waits_until_the_new_one_is_whole(tmp_path):
    """Also after an error, a kill, and another beginning."""
    out, again = tmp_path / "out", {"seed": 4}
    with runs.resume_in_place(out, "train", {"seed": 3}) as run:
        run.put("0", {"x": np.arange(3)})
        runs.complete(out)
    with (  # noqa: PT012
        pytest.raises(OutputError, match="full disk"),
        runs.resume_in_place(out, "train", again, force=True) as run,
    ):
        run.put("1", {"x": np.arange(3)})
        raise OutputError("full disk")
    assert waiting(tmp_path) == {"seed": 3}
    # The same command resumes the new one, with --force and without.
    for force in (True, False):
        with runs.resume_in_place(out, "train", again, force=force) as run:
            assert (run.has("0"), run.has("1")) == (False, True)
        assert waiting(tmp_path) == {"seed": 3}
    # A third one takes the place of the second, which was never whole; the first one still waits.
    with runs.resume_in_place(out, "train", {"seed": 5}, force=True) as run:
        assert not run.has("1")
        run.put("2", {"x": np.arange(3)})
        assert waiting(tmp_path) == {"seed": 3}
        runs.complete(out)
    assert runs.read_run(out).inputs == {"seed": 5}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_kill_between_the_renames_puts_the_replaced_output_back(tmp_path):
    out = tmp_path / "out"
    with runs.resume_in_place(out, "train", {"seed": 3}) as run:
        run.put("0", {"x": np.arange(3)})
    out.rename(tmp_path / ".out.replaced")
    with runs.resume_in_place(out, "train", {"seed": 3}) as run:
        assert run.has("0")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_foreign_folder_where_an_output_would_wait_is_left_alone(tmp_path):
    out, foreign = tmp_path / "out", tmp_path / ".out.replaced"
    with runs.resume_in_place(out, "train", {"seed": 3}) as run:
        run.put("0", {"x": np.arange(3)})
    foreign.mkdir()
    (foreign / "diary.txt").write_text("dear")
    with (
        pytest.raises(OutputError, match=r"would be kept in .*\.out\.replaced"),
        runs.resume_in_place(out, "train", {"seed": 4}, force=True),
    ):
        pass
    runs.complete(out)
    assert (foreign / "diary.txt").read_text() == "dear"
    assert run.has("0")


def test_growing_work_that_fails_before_it_begins_leaves_nothing(tmp_path):
    for out in (tmp_path / "new", tmp_path / "empty"):
        if out.name == "empty":
            out.mkdir()
        with (
            pytest.raises(OutputError, match="no text"),
            runs.resume_in_place(out, "train", {}),
        ):
            raise OutputError("no text")
    assert [p.name for p in tmp_path.rglob("*")] == ["empty"]


def test_what_a_kill_in_the_first_write_left_is_no_foreign_file(tmp_path):
    leftover = tmp_path / "out" / "deep" / f".run.json.123-{'0' * 32}.tmp"
    leftover.parent.mkdir(parents=True)
    (tmp_path / "out" / f".run.json.123-{'0' * 32}.tmp").write_text("{")
    leftover.parent.rmdir()
    with runs.resume_in_place(tmp_path / "out", "train", {}) as run:
        leftover.parent.mkdir()
        leftover.touch()
        run.put("0", {"x": np.arange(3)})
    with runs.resume_in_place(tmp_path / "out", "train", {}):
        pass
    assert not leftover.exists()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["deep", "parts", "run.json"]


def test_the_key_may_be_in_a_section_of_the_record(tmp_path):
    record = tmp_path / "r.json"
    record.write_text(json.dumps({"key": "a", "recovery": {"key": "b"}, "other": [1]}))
    sections = (None, "recovery", "other", "none")
    assert [runs.made_from(record, s) for s in sections] == ["a", "b", None, None]
