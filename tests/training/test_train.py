"""`headwise.training.train` as a library: typed results, nothing printed, one model built."""

import json
import os
import signal

import pytest
import transformers

from headwise.data.mixture import Mixture, Share
from headwise.data.text import Text
from headwise.errors import HeadwiseError, OutputError
from headwise.models import build
from headwise.plan import Plan
from headwise.runs import read_run, update_run
from headwise.training.loop import Observer
from headwise.training.settings import TrainSettings
from headwise.training.train import read_training, resume_training, train
from tests import tiny

SHAPE = tiny.SHAPE
PLAN = Plan.uniform(SHAPE)
TEXT = Text("made up", ("some text to learn\n" * 99,))
SETTINGS = TrainSettings(steps=5, batch_size=2, save_every=2, eval_every=3, device="cpu")


class Stop(Observer):
    """Asks a run to stop after a step, as Ctrl-C does."""

    def __init__(self, step):
        self.step, self.notes = step, []

    def stepped(self, record):
        if record.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)

    def noted(self, message):
        self.notes.append(message)


def test_a_text_and_a_plan_become_a_model(tmp_path, capsys):
    transformers.logging.disable_progress_bar()  # what transformers prints is the caller's choice
    told = []
    result = train(
        *(PLAN, TEXT, tmp_path / "run"), settings=SETTINGS, progress=lambda *a: told.append(a)
    )
    assert (result.status, result.signal, result.last.step) == ("finished", 0, 5)
    assert (result.model / "model.safetensors").is_file()
    assert result.text.train_tokens > 100
    what, done, total = told[0]
    assert what == "tokenising (characters)"
    assert 0 < done <= total
    assert capsys.readouterr() == ("", "")
    record = read_training(tmp_path / "run")
    assert (record.status, record.details.last) == ("finished", result.last)
    assert train(PLAN, TEXT, tmp_path / "run", settings=SETTINGS) == result


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_several_texts_are_trained_on_by_their_weights(tmp_path, causal):
    family = {} if causal else {"family": "bert", "causal": False, "n_kv_heads": 3}
    plan = Plan.uniform(SHAPE.model_copy(update=family))
    letters, digits = (Text(name, (f"{name} " * 400,)) for name in ("abcde", "12345"))
    text = Mixture((Share(letters, 3.0), Share(digits)))
    result = train(plan, text, tmp_path / "run", settings=SETTINGS)
    assert result.text.documents == 2
    record = read_training(tmp_path / "run")
    assert record.inputs.text.sources == ("3:abcde", "12345")
    assert record.details.weights == (3.0, 1.0)
    streams = sorted(p.name for p in (tmp_path / "run/tokens").iterdir())
    assert streams == ["held-out-0.npy", "held-out-1.npy", "train-0.npy", "train-1.npy"]
    # The same texts in other shares are another run, and a resumed one ends in the same weights.
    with pytest.raises(OutputError, match=r"text.s"):
        train(plan, Mixture((Share(letters), Share(digits))), tmp_path / "run", settings=SETTINGS)
    weights = (result.model / "model.safetensors").read_bytes()
    train(plan, text, tmp_path / "half", settings=SETTINGS, observer=Stop(2))
    ended = resume_training(tmp_path / "half")
    assert (ended.model / "model.safetensors").read_bytes() == weights


def test_the_model_is_built_once(tmp_path, monkeypatch):
    made, whole = [], build.build_model

    def counted(*args, **options):
        made.append(1)
        return whole(*args, **options)

    monkeypatch.setattr(build, "build_model", counted)
    train(PLAN, TEXT, tmp_path / "run", settings=SETTINGS)
    assert len(made) == 1


@pytest.mark.slow
def test_an_interrupted_run_is_resumed_with_or_without_its_inputs(tmp_path):
    whole = train(PLAN, TEXT, tmp_path / "whole", settings=SETTINGS)
    weights = (whole.model / "model.safetensors").read_bytes()
    for name, again in (
        ("same", lambda out: train(PLAN, TEXT, out, settings=SETTINGS)),
        ("bare", resume_training),
    ):
        out, stop = tmp_path / name, Stop(2)
        half = train(PLAN, TEXT, out, settings=SETTINGS, observer=stop)
        assert (half.status, half.signal, half.model) == ("interrupted", signal.SIGINT, None)
        assert half.last.step == 3
        assert "tokens to train on" in stop.notes[0]
        ended = again(out)
        assert (ended.model / "model.safetensors").read_bytes() == weights


def test_a_run_is_replaced_by_force_unless_the_new_one_cannot_begin(tmp_path):
    out = tmp_path / "run"
    train(PLAN, TEXT, out, settings=SETTINGS)
    with pytest.raises(OutputError, match=r"text.sources \(.*made up.* → .*other.*\)"):
        train(PLAN, Text("other", TEXT.documents), out, settings=SETTINGS)
    before = (out / "run.json").read_bytes()
    with pytest.raises(HeadwiseError, match="fewer than one window"):
        train(PLAN, Text("other", ("x",)), out, settings=SETTINGS, force=True)
    assert (out / "run.json").read_bytes() == before
    assert train(PLAN, Text("other", TEXT.documents), out, settings=SETTINGS, force=True).model
    assert read_training(out).inputs.text.source == "other"
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_run_stopped_before_its_text_was_stored_asks_for_it(tmp_path):
    out = tmp_path / "run"
    train(PLAN, TEXT, out, settings=SETTINGS)
    update_run(out, status="running", details={})
    with pytest.raises(HeadwiseError, match="run the full command again"):
        resume_training(out)
    assert train(PLAN, TEXT, out, settings=SETTINGS).status == "finished"


def test_tokens_that_changed_are_refused(tmp_path):
    out = tmp_path / "run"
    train(PLAN, TEXT, out, settings=SETTINGS, observer=Stop(1))
    path = out / "tokens" / "train.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(HeadwiseError, match=r"train\.npy is missing or damaged"):
        resume_training(out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "headwise-run/9"}, "must have the format"),
        ({"kind": "compare"}, "must be of a training run, got 'compare'"),
        ({"inputs": {}}, "`inputs` in .*settings is missing"),
        ({"details": {"text": 7}}, "`details` in .*text must be a mapping"),
        ({"status": "odd"}, "status must be "),
    ],
)
def test_a_damaged_record_is_one_sentence(tmp_path, change, message):
    out = tmp_path / "run"
    train(PLAN, TEXT, out, settings=SETTINGS)
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(record | change))
    with pytest.raises(HeadwiseError, match=message):
        resume_training(out)


def test_settings_in_a_record_are_checked(tmp_path):
    out = tmp_path / "run"
    train(PLAN, TEXT, out, settings=SETTINGS)
    inputs = read_run(out).inputs
    for name, value, message in (
        ("steps", 1.5, "steps must"),
        ("lr", "x", "lr must"),
        ("odd", 1, "odd"),
    ):
        update_run(out, inputs={**inputs, "settings": {**inputs["settings"], name: value}})
        with pytest.raises(HeadwiseError, match=message):
            resume_training(out)
