import pytest

from headwise.errors import HeadwiseError, OutputError
from headwise.training.run_folder import RunFolder


def test_the_record_is_written_whole_and_updated(tmp_path):
    folder = RunFolder(tmp_path / "r")
    folder.write_record({"status": "running", "seed": 3})
    folder.update_record(status="finished")
    assert folder.read_record() == {"format": "headwise-run/1", "status": "finished", "seed": 3}


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "headwise-run/9"}'])
def test_a_bad_record_is_one_sentence(tmp_path, content):
    folder = RunFolder(tmp_path)
    folder.record.write_text(content)
    with pytest.raises(HeadwiseError, match=r"run\.json"):
        folder.read_record()


def test_only_a_run_is_ever_removed(tmp_path):
    folder = RunFolder(tmp_path / "r")
    folder.write_record({})
    (folder.path / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError, match=r"no run wrote \(thesis\.tex\)"), folder.replaced():
        pass
    assert (folder.path / "thesis.tex").exists()
    (folder.path / "thesis.tex").unlink()
    with folder.replaced():
        assert not folder.path.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_be_replaced_is_back(tmp_path):
    folder = RunFolder(tmp_path / "r")
    folder.write_record({"seed": 3})
    with pytest.raises(OutputError, match="full"), folder.replaced():  # noqa: PT012
        folder.write_record({"seed": 4})
        raise OutputError("full")
    assert folder.read_record()["seed"] == 3
    assert list(tmp_path.iterdir()) == [folder.path]


def test_what_a_kill_left_behind_is_swept(tmp_path):
    folder = RunFolder(tmp_path)
    (folder.checkpoints / ".step-00000005.abc.tmp").mkdir(parents=True)
    (folder.checkpoints / ".step-00000005.abc.tmp" / "model.safetensors").write_text("half")
    (folder.checkpoints / "step-00000004").mkdir()
    (tmp_path / ".run.json.abc.tmp").write_text("half")
    folder.sweep()
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["checkpoints", "step-00000004"]
