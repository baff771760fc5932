import copy
import dataclasses
import os
import resource
import signal

import pytest
import torch

from headwise.errors import HeadwiseError, OutputError
from headwise.training.batches import next_token_loss
from headwise.training.checkpoint import TIME_FIELDS, RunFolder, checkpoints_in, read_rows
from headwise.training.loop import DivergenceError, Observer, train_model
from tests import lanes


class At(Observer):
    """Does something once, after a given step."""

    def __init__(self, step, action):
        self.step, self.action, self.notes = step, action, []

    def stepped(self, record):
        if record.step == self.step:
            self.action()

    def noted(self, message):
        self.notes.append(message)


class Killed(BaseException):
    pass


def _raise():
    raise Killed


def _weights(job):
    return {n: p.detach().clone() for n, p in job.model.named_parameters()}


def _same(a, b):
    return all(torch.equal(a[n], b[n]) for n in a)


def _timeless(folder):
    return [
        {k: v for k, v in record.row().items() if k not in TIME_FIELDS}
        for record in read_rows(folder.metrics)
    ]


@pytest.fixture
def whole(make_job, processes, tmp_path):
    """The run that is never stopped: its weights and its metrics."""
    job, folder = make_job(), RunFolder(tmp_path / "whole")
    outcome = train_model(job, processes, folder=folder)
    assert outcome.position.step == 12
    assert outcome.signal == 0
    return _weights(job), _timeless(folder)


def test_the_loss_falls_and_rows_are_complete(make_job, processes, tmp_path):
    job, folder = make_job(steps=60), RunFolder(tmp_path / "r")
    train_model(job, processes, folder=folder)
    rows = read_rows(folder.metrics)
    assert [r.step for r in rows] == list(range(1, 61))
    assert rows[-1].loss < 0.8 * rows[0].loss
    assert rows[-1].tokens == 60 * 6 * 7
    assert [r.step for r in rows if r.held_out_loss is not None] == list(range(5, 61, 5))
    assert [p.name for p in checkpoints_in(folder.checkpoints)] == [
        "step-00000055",
        "step-00000060",
    ]


def test_without_a_folder_nothing_is_written(make_job, processes, whole, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    job = make_job()
    train_model(job, processes)
    assert list(empty.iterdir()) == []
    assert _same(_weights(job), whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("step", lanes.slow_but((5, 7), (2, 5, 7, 11)))
def test_a_killed_run_goes_on_to_the_same_bits(make_job, processes, tmp_path, whole, step):
    folder = RunFolder(tmp_path / "r")
    with pytest.raises(Killed):
        train_model(make_job(), processes, folder=folder, observer=At(step, _raise))
    with folder.metrics.open("a") as stream:
        stream.write('{"step": 9, "lo')  # a torn row
    again = make_job()
    train_model(again, processes, folder=folder)
    assert _same(_weights(again), whole[0])
    assert _timeless(folder) == whole[1]


def test_another_seed_gives_other_bits(make_job, processes, whole):
    """The control: batches and dropout do depend on the seed."""
    job = make_job(seed=4)
    train_model(job, processes)
    assert not _same(_weights(job), whole[0])


def test_the_callers_random_numbers_are_left_alone(make_job, processes):
    job = make_job()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    train_model(job, processes)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(make_job, processes, tmp_path, whole):
    folder = RunFolder(tmp_path / "r")
    with pytest.raises(Killed):
        train_model(make_job(), processes, folder=folder, observer=At(11, _raise))
    victim = folder.checkpoints / "step-00000010" / "model.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    job, observer = make_job(), At(99, _raise)
    train_model(job, processes, folder=folder, observer=observer)
    assert "step-00000010 is damaged" in observer.notes[0]
    assert _same(_weights(job), whole[0])
    assert _timeless(folder) == whole[1]


def test_all_checkpoints_damaged_is_an_error(make_job, processes, tmp_path):
    folder = RunFolder(tmp_path / "r")
    train_model(make_job(), processes, folder=folder)
    for path in checkpoints_in(folder.checkpoints):
        (path / "state.json").write_text("{")
    with pytest.raises(HeadwiseError, match=r"every checkpoint .* is damaged"):
        train_model(make_job(), processes, folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_at_the_step_boundary(make_job, processes, tmp_path, whole, number):
    folder = RunFolder(tmp_path / "r")
    before = signal.getsignal(number)
    observer = At(6, lambda: os.kill(os.getpid(), number))
    outcome = train_model(make_job(), processes, folder=folder, observer=observer)
    assert outcome.signal == number
    assert outcome.position.step == 7
    assert checkpoints_in(folder.checkpoints)[-1].name == "step-00000007"
    assert signal.getsignal(number) is before
    job = make_job()
    train_model(job, processes, folder=folder)
    assert _same(_weights(job), whole[0])


def test_a_full_disk_loses_nothing(make_job, processes, tmp_path, whole):
    """The operating system itself refuses to write files beyond a few kilobytes."""
    folder = RunFolder(tmp_path / "r")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    observer = At(7, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard)))
    try:
        with pytest.raises(OutputError, match=r"could not be written \(.*os error.*free space"):
            train_model(make_job(), processes, folder=folder, observer=observer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in folder.checkpoints.iterdir()] == ["step-00000005"]
    job = make_job()
    train_model(job, processes, folder=folder)
    assert _same(_weights(job), whole[0])
    assert _timeless(folder) == whole[1]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_loss_that_is_no_number_stops_before_it_harms(make_job, processes, tmp_path, where):
    calls = []

    def poisoned(model, batch, /):
        loss, scalars = next_token_loss(model, batch)
        calls.append(model.training)
        bad = calls.count(True) == 8 and model.training
        if where == "gradient":
            # The value stays finite, its gradient is infinite: √0 has no slope.
            zero = model.lm_head.weight[0, 0] * 0
            return (loss + zero.abs().sqrt() if bad else loss), scalars
        return (loss * float("nan") if bad else loss), scalars

    job, folder = make_job(loss=poisoned), RunFolder(tmp_path / "r")
    states = []
    observer = At(7, lambda: states.append(_weights(job)))
    with pytest.raises(DivergenceError, match=r"at step 8, .*step-00000005"):
        train_model(job, processes, folder=folder, observer=observer)
    assert _same(_weights(job), states[0])
    assert [r.step for r in read_rows(folder.metrics)] == list(range(1, 8))


def test_accumulation_is_the_same_mean(make_job, processes):
    """Equal parts of a batch have the same mean; only rounding and dropout draws differ."""

    def losses(**changes):
        job = make_job(**changes)
        for module in job.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        seen = []
        observer = Observer()
        observer.stepped = lambda record: seen.append(record.loss)
        train_model(job, processes, observer=observer)
        return torch.tensor(seen)

    whole, parts = losses(), losses(accumulate=3)
    # fp32 sums in another order over 12 steps of Adam; the control is a slightly larger rate.
    torch.testing.assert_close(whole, parts, rtol=1e-4, atol=0)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(whole, losses(lr=0.011), rtol=1e-4, atol=0)


def test_a_batch_that_cannot_be_divided_is_refused(make_job, processes):
    with pytest.raises(HeadwiseError, match="multiple of processes × accumulate = 1 × 4, got 6"):
        train_model(make_job(accumulate=4), processes)


@pytest.mark.slow
def test_distillation_trains_only_what_requires_gradients(make_job, processes, tmp_path):
    """The loop as recovery uses it: a teacher's logits, scalars, some parameters frozen."""
    job = make_job()
    teacher = copy.deepcopy(job.model).eval()
    for name, p in job.model.named_parameters():
        p.requires_grad_("attn" in name)
    with torch.no_grad():
        for p in job.model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.3)

    def distillation(model, batch, /):
        with torch.no_grad():
            target = teacher(input_ids=batch["input_ids"]).logits.log_softmax(-1)
        logits = model(input_ids=batch["input_ids"]).logits.log_softmax(-1)
        kl = torch.nn.functional.kl_div(
            logits.flatten(0, 1), target.flatten(0, 1), log_target=True, reduction="batchmean"
        )
        return kl, {"kl": kl}

    folder, before = RunFolder(tmp_path / "r"), _weights(job)
    job = dataclasses.replace(
        job, loss=distillation, settings=dataclasses.replace(job.settings, steps=40)
    )
    train_model(job, processes, folder=folder)
    after, rows = _weights(job), read_rows(folder.metrics)
    assert rows[-1].scalars["kl"] < 0.8 * rows[0].scalars["kl"]
    for name in before:
        assert torch.equal(before[name], after[name]) != ("attn" in name)
