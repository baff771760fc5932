"""Files of a run that are read back: damaged ones are told in one sentence, or passed over."""

import json

import pytest

from headwise.errors import HeadwiseError
from headwise.training.checkpoint import (
    RunFolder,
    StepRecord,
    append_row,
    checkpoints_in,
    drop_rows_after,
    read_rows,
)
from headwise.training.loop import train_model
from tests import lanes

ROW = StepRecord(
    step=1, loss=0.5, lr=0.1, grad_norm=2.0, tokens=7, seconds=0.25, tokens_per_second=28.0
)
DEEP = "[" * 100_000


@pytest.fixture
def metrics(tmp_path):
    """Rows of three steps, the second with a validation and a scalar."""
    path = tmp_path / "metrics.jsonl"
    append_row(path, ROW)
    append_row(
        path, ROW.model_copy(update={"step": 2, "held_out_loss": 0.75, "scalars": {"kl": 3}})
    )
    append_row(path, ROW.model_copy(update={"step": 3}))
    return path


def test_rows_round_trip(metrics):
    rows = read_rows(metrics)
    assert [r.step for r in rows] == [1, 2, 3]
    assert rows[0] == ROW
    assert (rows[1].held_out_loss, rows[1].scalars) == (0.75, {"kl": 3.0})
    assert "held_out_loss" not in json.loads(metrics.read_text().splitlines()[0])


def test_a_row_torn_by_a_kill_is_left_out_and_later_rows_are_dropped(metrics):
    whole = metrics.read_text()
    metrics.write_text(whole[:-9])
    assert [r.step for r in read_rows(metrics)] == [1, 2]
    drop_rows_after(metrics, 1)
    assert metrics.read_text() == whole.splitlines(keepends=True)[0]
    assert read_rows(metrics.with_name("none.jsonl")) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 holds invalid JSON"),
        ("7", "line 2 is not valid"),
        (DEEP, "line 2"),
        ('{"step": 2}', "loss is missing"),
        (json.dumps({**ROW.row(), "loss": "x"}), "loss must be a number"),
        (json.dumps({**ROW.row(), "step": 0}), "step must be at least 1"),
        (json.dumps({**ROW.row(), "kl": [1]}), "kl must be a number"),
        (json.dumps(ROW.row())[:-1] + ', "step": 3}', "duplicate key 'step'"),
    ],
)
def test_a_damaged_row_is_one_sentence_with_its_line(metrics, line, message):
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([lines[0], line, lines[2]]) + "\n")
    with pytest.raises(HeadwiseError, match=message) as found:
        read_rows(metrics)
    assert str(metrics) in str(found.value)
    assert len(str(found.value)) < 600


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    lanes.slow_but(
        ("{", "state", None),
        ("", "{", "[]", DEEP, "{}", '{"format": "headwise-checkpoint/9"}', "state", None),
    ),
)
def test_a_checkpoint_with_a_damaged_state_gives_way(make_job, processes, tmp_path, content):
    folder = RunFolder(tmp_path / "r")
    train_model(make_job(), processes, folder=folder)
    before = folder.metrics.read_bytes()
    state = checkpoints_in(folder.checkpoints)[-1] / "state.json"
    data = json.loads(state.read_text())
    if content is None:
        state.unlink()
    else:
        state.write_text(json.dumps({**data, "step": "x"}) if content == "state" else content)
    ended = train_model(make_job(), processes, folder=folder)
    assert ended.position.step == 12
    assert json.loads(state.read_text())["sha256"] == data["sha256"]
    assert len(folder.metrics.read_bytes().splitlines()) == len(before.splitlines())


def test_checkpoints_that_a_killed_run_did_not_come_to_remove_are_removed(
    make_job, processes, tmp_path
):
    folder = RunFolder(tmp_path / "r")
    train_model(make_job(keep=9), processes, folder=folder)
    assert len(checkpoints_in(folder.checkpoints)) == 3
    train_model(make_job(keep=1), processes, folder=folder)
    assert [p.name for p in checkpoints_in(folder.checkpoints)] == ["step-00000012"]
