import itertools
import math

import pytest

from headwise.errors import HeadwiseError
from headwise.training.settings import RecoverSettings, TrainSettings, learning_rate, steps_for


def _resolved(**changes):
    return TrainSettings(**changes).resolved(context=64, device="cpu", dtype="fp32")


def test_open_values_are_filled_in():
    settings = _resolved(steps=200, lr=0.02)
    assert (settings.context, settings.min_lr, settings.warmup) == (64, 0.002, 10)
    assert settings.tokens_per_step == 32 * 64
    kept = _resolved(context=8, min_lr=0.0, warmup=0)
    assert (kept.context, kept.min_lr, kept.warmup) == (8, 0.0, 0)
    assert TrainSettings.from_dict(settings.to_dict(), "x") == settings


def test_the_rate_rises_and_falls_to_the_floor():
    settings = _resolved(steps=15, warmup=4, lr=1.0, min_lr=0.1)
    rates = [learning_rate(i, settings) for i in range(15)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[9] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert rates[14] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (2, 1), (3, 5)])
def test_very_short_runs_have_a_rate(steps, warmup):
    settings = _resolved(steps=steps, warmup=warmup, lr=1.0, min_lr=0.1)
    assert all(0 < learning_rate(i, settings) <= 1 for i in range(steps))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"batch_size": -1}, "batch-size must be"),
        ({"lr": 0.0}, "lr must be a number above 0"),
        ({"lr": math.nan}, "lr must be a number above 0"),
        ({"lr": 0.1, "min_lr": 0.2}, "min-lr must be from 0 to lr"),
        ({"weight_decay": -0.1}, "weight-decay must be 0 or more"),
        ({"split": 1.0}, "split must be a share"),
        ({"dtype": "fp16"}, "dtype must be one of auto, fp32, bf16"),
        ({"device": "tpu"}, "device must be one of"),
        ({"keep": 0}, "keep must be"),
        ({"warmup": -1}, "warmup must be"),
        ({"tokens": 0}, "tokens must be"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seed": 2**64}, "seed must be from 0"),
    ],
)
def test_bad_values_are_one_sentence(changes, message):
    with pytest.raises(HeadwiseError, match=message):
        TrainSettings(**changes)


def test_unknown_settings_in_a_file_are_refused():
    with pytest.raises(HeadwiseError, match=r"unknown setting 'stepz'\. Did you mean 'steps'"):
        TrainSettings.from_dict({"stepz": 3}, "run.json")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"lr": "fast"}, "lr must be a number"),
        ({"dtype": 8}, "dtype must be "),
        ({"keep": 0}, "keep must be"),
    ],
)
def test_wrong_settings_in_a_file_are_one_sentence(data, message):
    with pytest.raises(HeadwiseError, match=message):
        TrainSettings.from_dict(data, "run.json")


def test_tokens_stand_for_steps():
    settings = _resolved(tokens=10_000, batch_size=3, context=7)
    assert (settings.steps, settings.warmup, settings.tokens) == (477, 23, None)


def test_a_recovery_warms_up_slowly_and_decays_nothing():
    asked = RecoverSettings(tokens=6400, length=32, batch_size=8, device="cpu", dtype="fp32")
    made = asked.on_this_machine()
    assert (made.steps, made.warmup, made.context) == (25, 3, 32)
    assert (made.lr, made.lr_relative, made.weight_decay) == (2e-3, True, 0.0)
    assert (made.device, made.dtype) == ("cpu", "fp32")


@pytest.mark.parametrize(("own", "expected"), [(True, "bf16"), (False, "fp32")])
def test_a_recovery_multiplies_in_bf16_where_the_device_does(monkeypatch, own, expected):
    monkeypatch.setattr("headwise.training.settings.has_bf16_products", lambda device: own)
    assert RecoverSettings(device="cpu").on_this_machine().dtype == expected
    assert RecoverSettings(device="cpu", dtype="fp32").on_this_machine().dtype == "fp32"


def test_steps_for_tokens_round_up():
    assert steps_for(100, batch_size=3, context=7) == 5
    assert steps_for(105, batch_size=3, context=7) == 5
    assert steps_for(1, batch_size=3, context=7) == 1
