"""Memory told beforehand: the sums, the early stop, and one model at a time where it is short.

The estimates themselves are measured in benchmarks/bench_memory.py, on models whose weights
outweigh everything else; here one small model shows that they are of the right size.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import headwise as hw
from headwise import memory
from headwise.errors import HeadwiseError
from headwise.measure.comparison import StoredLogits, text_comparison
from headwise.plan import ModelShape, Plan
from headwise.planning.cost import cost
from tests import tiny

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bench_memory.py"
SHAPE = ModelShape(
    n_layers=3,
    d_model=64,
    context=128,
    n_heads=4,
    n_kv_heads=4,
    qk_dim=16,
    vo_dim=16,
    ffn_dim=96,
    vocab_size=1009,
)


def test_weights_are_counted_once_and_in_their_numbers():
    plan = Plan.uniform(SHAPE)
    wide, narrow = (memory.profile_need(plan, tokens=64, number=n) for n in (4, 2))
    assert wide.weights == 4 * cost(plan).params
    assert narrow.weights == 2 * cost(plan).params
    both = memory.verify_need((plan, plan), tokens=64)
    assert both.weights == 2 * memory.verify_need((plan, plan), tokens=64, in_turns=True).weights
    assert memory.profile_need(plan, tokens=128).work == 2 * wide.work
    assert wide.peak == wide.held + wide.more


def test_the_caches_of_the_speed_points_count_where_they_fit(monkeypatch):
    plan = Plan.uniform(SHAPE)
    weights = 4 * cost(plan).params

    def caches(left, **how):
        monkeypatch.setattr(memory, "available", lambda: left)
        need = memory.verify_need((plan, plan), tokens=1, most=1, timed=True, **how)
        return need.work / weights

    assert caches(None) == 16  # three caches of four times the weights, and a copy of one
    assert caches(2 * weights + 2 * 12 * weights) == 16
    assert caches(2 * weights + 2 * 12 * weights - 1) == 4
    assert caches(2 * weights + 2 * 3 * weights - 1) < 1
    assert caches(None, in_turns=True) < 1  # many sequences are not timed then


def test_this_machine_says_what_is_left():
    left = memory.available()
    assert left is None or left > 2**20
    assert memory.size(5 * 2**20) == "5 MiB"
    assert memory.size(3 * 2**29) == "1.5 GiB"


def test_a_system_that_says_nothing_is_not_asked(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: None)
    told = []
    need = memory.profile_need(Plan.uniform(SHAPE), tokens=10**12)
    progress = need.check(lambda *words: told.append(words), advice="")
    assert told == []  # until the work begins
    progress("profiling", 0, 3)
    progress("profiling", 1, 3)
    assert told == [(need.sentence, 0, 0), ("profiling", 0, 3), ("profiling", 1, 3)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    tiny.write_llama(tmp_path, characters=6_000)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SIZES = {"tokens": 96, "length": 16, "text": "text.txt", "device": "cpu"}


def cut(**more):
    return hw.compress("model", out="cut", attn_params="60%", multiple_of=2, **SIZES, **more)


@pytest.mark.slow
def test_every_step_tells_its_peak_before_it_begins(place):
    told = []

    def progress(what, done, total):
        if total == 0:
            told.append(what.split()[0])

    cut(recover=64, verify_tokens=64, progress=progress)
    steps = [word for word in told if word in {"Profiling", "Cutting", "Recovering", "Verifying"}]
    assert steps == ["Profiling", "Cutting", "Recovering", "Verifying"]


@pytest.mark.slow
def test_a_wrong_option_is_told_alone(place):
    cut(verify=False, recover=0)
    told, how = [], {"against": "model", "text": "text.txt"}
    how["progress"] = lambda *words: told.append(words)
    for words in ({"window": 10**6}, {"window": 16, "stride": 17}, {"max_ratio": 2, "tokens": 0}):
        with pytest.raises(HeadwiseError):
            hw.verify("cut", **how, **words)
    for words in ({"length": 10**6}, {"tokens": 10**9, "length": 4096}):
        with pytest.raises(HeadwiseError):
            hw.recover("cut", out="recovered", device="cpu", **how, **words)
    assert told == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "short",
    ["Profiling", "Cutting", "Recovering", "Verifying"],
)
def test_a_step_that_does_not_fit_stops_early(place, monkeypatch, short):
    fits, check = memory.Need.fits, memory.Need.check

    def left(step):
        return 10 if step == short else None

    def checked(need, progress, *, advice):
        monkeypatch.setattr(memory, "available", lambda: left(need.step))
        return check(need, progress, advice=advice)

    monkeypatch.setattr(memory.Need, "fits", property(lambda need: left(need.step) is None))
    monkeypatch.setattr(memory.Need, "check", checked)
    with pytest.raises(HeadwiseError, match=f"{short} will need about .* MiB.*0 MiB are available"):
        cut(recover=64, verify_tokens=64)
    monkeypatch.setattr(memory.Need, "fits", fits)
    monkeypatch.setattr(memory.Need, "check", check)
    monkeypatch.setattr(memory, "available", lambda: None)
    assert cut(recover=64, verify_tokens=64).verification is not None


@pytest.mark.slow
def test_one_model_at_a_time_finds_the_same(place, monkeypatch):
    cut(verify=False)
    how = {"against": "model", "text": "text.txt", "tokens": 128, "window": 32, "stride": 11}
    together = hw.verify("cut", **how, repeats=1)
    plans = [hw.open_source(name).plan for name in ("cut", "model")]
    need = memory.verify_need(tuple(plans), tokens=32, most=128, in_turns=True)
    monkeypatch.setattr(memory, "available", lambda: need.more)
    told = []
    apart = hw.verify("cut", **how, repeats=1, progress=lambda *words: told.append(words[0]))
    assert "Memory is short: loading one model at a time." in told
    assert apart.texts == together.texts
    assert apart.size == together.size
    assert apart.speed.decode is not None
    monkeypatch.setattr(memory, "available", lambda: need.more - 1)
    with pytest.raises(HeadwiseError, match="Verifying will need"):
        hw.verify("cut", **how)


@pytest.mark.parametrize(("window", "stride"), [(16, None), (13, 5), (200, None)])
def test_stored_logits_are_the_logits(tmp_path, window, stride):
    stream = np.random.default_rng(3).integers(0, tiny.VOCAB, 60).astype(np.uint32)
    model, reference = tiny.stock("llama", seed=7), tiny.stock("llama", seed=8)
    live = text_comparison(model, reference, stream, window=window, stride=stride)
    stored = StoredLogits.of(reference, stream, tmp_path / "x", window=window, stride=stride)
    assert text_comparison(model, stored, stream, window=window, stride=stride) == live
    assert not list(tmp_path.iterdir())
    other = tiny.stock("llama", seed=9)  # another model's logits are seen to be others
    stored = StoredLogits.of(other, stream, tmp_path / "x", window=window, stride=stride)
    assert text_comparison(model, stored, stream, window=window, stride=stride) != live


def test_predictions_that_the_disk_has_no_room_for(tmp_path, monkeypatch):
    stream = np.arange(60, dtype=np.uint32)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Disk", (), {"free": 10}))
    with pytest.raises(HeadwiseError, match="only one of the two models"):
        StoredLogits.of(tiny.stock("llama"), stream, tmp_path / "x", window=16)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's peak memory")
def test_the_estimates_of_a_small_model():
    command = [sys.executable, str(BENCHMARK), "--sizes", "small"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
