import numpy as np
import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.training.batches import WindowBatches, held_out_batches, mixed_batches


def _batches(seed=0, n=101):
    return WindowBatches(np.arange(n, dtype=np.uint32), context=5, batch_size=3, seed=seed)


def test_labels_are_the_inputs_one_token_on():
    batch = _batches()(4)
    assert batch["input_ids"].shape == batch["labels"].shape == (3, 5)
    assert (batch["labels"] == batch["input_ids"] + 1).all()


def test_an_epoch_deals_every_window_once_without_overlap():
    batches = _batches()
    assert batches.windows == 19
    dealt = np.concatenate([batches.starts(s) for s in range(20)])
    for epoch in (0, 1):
        starts = np.sort(dealt[epoch * 19 : (epoch + 1) * 19])
        assert (np.diff(starts) == 5).all()
        assert starts[-1] + 5 <= 100
    assert list(dealt[:19]) != list(dealt[19:38])


def test_a_batch_depends_on_seed_and_step_only():
    forward, backward = _batches(), _batches()
    there = [list(forward.starts(s)) for s in range(15)]
    back = [list(backward.starts(s)) for s in reversed(range(15))]
    assert there == back[::-1]
    assert there != [list(_batches(seed=1).starts(s)) for s in range(15)]


def test_a_text_of_exactly_one_window_is_enough_and_one_token_less_is_not():
    assert list(_batches(n=6).starts(0)) == [0, 0, 0]
    with pytest.raises(HeadwiseError, match=r"5 tokens, fewer than one window of 5 \+ 1"):
        _batches(n=5)


def test_held_out_windows_are_spread_and_do_not_overlap():
    tokens = np.arange(101)
    rows = np.concatenate(
        [b["input_ids"] for b in held_out_batches(tokens, context=5, batch_size=2, most=3)]
    )
    assert list(rows[:, 0]) == [0, 50, 95]  # windows 0, 9.5 → 10 and 19 of 20
    all_rows = held_out_batches(tokens, context=5, batch_size=7, most=1000)
    assert [len(b["labels"]) for b in all_rows] == [7, 7, 6]


def test_short_held_out_text_is_one_short_window_or_none():
    (batch,) = held_out_batches(np.arange(3), context=5, batch_size=2, most=9)
    assert batch["input_ids"].tolist() == [[0, 1]]
    assert held_out_batches(np.arange(1), context=5, batch_size=2, most=9) == ()


def test_several_streams_are_dealt_by_weight_and_begin_anew():
    streams = [np.arange(1000), np.arange(5000, 5040)]
    batches = mixed_batches(streams, [3, 1], context=8, batch_size=4, seed=1)
    seen = [batches(step)["input_ids"] for step in range(20)]
    for ids in seen:
        of_second = ids[:, 0] >= 5000
        assert of_second.sum() == 1
        assert ((ids[:, -1] >= 5000) == of_second).all()
    again = mixed_batches(streams, [3, 1], context=8, batch_size=4, seed=1)
    assert torch.equal(again(17)["input_ids"], seen[17])
    other = mixed_batches(streams, [3, 1], context=8, batch_size=4, seed=2)
    assert not torch.equal(other(17)["input_ids"], seen[17])


def test_one_stream_alone_is_dealt_as_ever():
    alone = WindowBatches(np.arange(999), context=8, batch_size=4, seed=7)
    mixed = mixed_batches([np.arange(999)], [0.3], context=8, batch_size=4, seed=7)
    assert torch.equal(mixed(31)["input_ids"], alone(31)["input_ids"])
