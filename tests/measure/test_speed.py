"""Points of speed, what is left out and why, peak memory, and sequences that fit."""

import pytest
import torch
from transformers import DynamicCache

from headwise.errors import HeadwiseError
from headwise.measure import speed
from headwise.measure.size import (
    cache_bytes,
    parse_bytes,
    peak_bytes,
    sequence_bytes,
    sequences_that_fit,
)
from headwise.measure.speed import FilledCache, Workload, decoding_bytes, speed_points, timed_point
from headwise.models.build import convert, plan_of
from tests import tiny

SMOLLM2 = {"weight_bytes": 538_000_000, "token_bytes": 46_080}


def test_cache_and_weights_weigh_the_same_then_four_times_as_much():
    points = speed_points(prompt=512, decode_after=128, context=8192, **SMOLLM2)
    assert [(p.name, p.batch, p.context) for p in points] == [
        ("prefill", 1, 512),
        ("decode", 1, 128),
        ("serving", 16, 730),
        ("serving, longer", 16, 2920),
    ]
    weighed = [p.batch * p.context * 46_080 / 538_000_000 for p in points[2:]]
    assert weighed == pytest.approx([1, 4], rel=1e-3)


def test_a_short_context_is_served_to_more_sequences():
    points = speed_points(prompt=512, decode_after=128, context=256, **SMOLLM2)
    assert [(p.batch, p.context) for p in points[:2]] == [(1, 256), (1, 128)]
    serving, longer = points[2:]
    assert serving.batch == longer.batch == 184
    assert longer.context == 4 * serving.context <= 254
    assert serving.batch * serving.context * 46_080 / 538_000_000 == pytest.approx(1, rel=0.02)


def test_rounding_does_not_leave_the_serving_points_out():
    """108 sequences of 63.5 tokens: 64 of them, four times as long, would not fit in 254."""
    points = speed_points(
        prompt=512, decode_after=128, context=256, weight_bytes=393_277_440, token_bytes=57_344
    )
    assert [(p.batch, p.context) for p in points[2:]] == [(108, 63), (108, 252)]


@pytest.fixture
def turns(monkeypatch):
    """Calls in their order; model a takes 2 seconds, b takes 4."""
    calls, clock = [], [0.0]

    def repetition(model, point, inputs):
        def run():
            calls.append(model.name)
            clock[0] += {"a": 2.0, "b": 4.0}[model.name]
            return {"a": 2.0, "b": 4.0}[model.name]

        return run

    monkeypatch.setattr(speed, "_repetition", repetition)
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])
    return calls


class Named:
    """Stands for a model."""

    device = torch.device("cpu")

    def __init__(self, name):
        self.name = name


PAIR = (Named("a"), Named("b"))


def test_models_take_turns(turns):
    found = timed_point(PAIR, Workload("prefill", 1, 128, 0), repeats=3)
    assert turns == ["a", "b", "a", "b", "b", "a", "a", "b"]  # one warmup each, then in turns
    assert [rate.median for rate in found.rates] == [64, 32]
    assert found.repeats == 3


def test_a_point_ends_with_its_time(turns):
    point = Workload("prefill", 1, 128, 0)
    assert timed_point(PAIR, point, repeats=9, seconds=13).repeats == 2
    assert "more than 5 seconds" in timed_point(PAIR, point, repeats=9, seconds=5)


def test_a_point_without_memory_is_left_out(monkeypatch):
    model = tiny.stock("llama")
    monkeypatch.setattr(speed, "free_memory", lambda device: 2**20)
    said = timed_point((model,), Workload("serving", 64, 60, 2), repeats=1)
    assert "serving was skipped: 64 sequences of 60 tokens need" in said


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_filled_caches_are_as_large_as_real_ones_and_can_be_used_again(family):
    model = tiny.stock(family)
    filled = FilledCache(model, 3, 41)
    ids = torch.ones(3, 41, dtype=torch.long)
    real = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=real, use_cache=True)
    for _ in range(2):
        with filled.filled() as cache, torch.inference_mode():
            shapes = [layer.keys.shape for layer in cache.layers]
            assert shapes == [layer.keys.shape for layer in real.layers]
            assert cache.get_seq_length() == 41
            model(input_ids=filled.first, past_key_values=cache, use_cache=True)
            assert cache.get_seq_length() == 42


def test_real_models_are_timed_at_every_point():
    stock = tiny.stock("llama")
    models = (tiny.narrowed(convert(stock)), stock)
    for point in (
        Workload("prefill", 1, 11, 0),
        Workload("decode", 1, 7, 2),
        Workload("serving", 5, 13, 2),
    ):
        found = timed_point(models, point, repeats=2)
        assert all(r.low <= r.median <= r.high and r.low > 0 for r in found.rates)


def test_the_peak_counts_what_lives_at_one_time():
    def call():
        a = torch.zeros(1000)
        b = a + 1
        del a
        c = b.view(10, 100) * 2
        del b
        return c

    assert peak_bytes(call) == 8000
    held = torch.zeros(500)
    assert peak_bytes(call, [held]) == 10000
    owner = [torch.zeros(500)]

    def replace():
        owner[0] = torch.zeros(700)
        owner[0] = torch.zeros(900)

    assert peak_bytes(replace, iter(owner)) == 700 * 4 + 900 * 4  # the first is gone by then


def test_a_smaller_cache_has_a_lower_peak():
    stock = tiny.stock("llama")
    point = Workload("serving", 5, 53, 2)
    dense, cut = (decoding_bytes(m, point) for m in (stock, tiny.narrowed(convert(stock))))
    cache = cache_bytes(stock) * 5 * 53
    assert cache < dense < 3 * cache  # one layer's copy and the activations beside it
    assert cut < dense


def test_sequences_that_fit():
    plan = plan_of(convert(tiny.stock("llama")))
    each = sequence_bytes(plan, 67, 4)
    assert each == 67 * 4 * 3 * 2 * 2 * 10  # tokens, bytes, layers, keys and values, heads, width
    assert sequences_that_fit(1000 + 3 * each, 1000, each) == 3
    assert sequences_that_fit(999 + 3 * each, 1000, each) == 2
    assert sequences_that_fit(500, 1000, each) == 0


def test_windows_keep_less():
    plan = plan_of(convert(tiny.stock("gemma3_text")))
    assert plan.shape.windows
    assert sequence_bytes(plan, 60, 2) < 60 * sequence_bytes(plan, 1, 2)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("24GiB", 24 * 2**30), ("80gb", 80 * 10**9), ("1.5 MiB", 3 * 2**19), ("1e9", 10**9)],
)
def test_amounts_of_memory(text, amount):
    assert parse_bytes(text) == amount


@pytest.mark.parametrize("text", ["", "much", "-1GB", "1.2.3GB", "0", "9e99"])
def test_wrong_amounts_are_one_sentence(text):
    with pytest.raises(HeadwiseError, match="--memory must be"):
        parse_bytes(text)
