"""Disturbed input: counted noise, and swaps against exhaustive search."""

from __future__ import annotations

import itertools

import pytest
import torch

from headwise.measure.robustness import Attack, greedily_swapped, noisy, sequence_losses
from tests import tiny

VOCAB, LENGTH = 11, 5


@pytest.fixture(scope="module")
def model():
    return tiny.stock("llama", vocab_size=VOCAB).requires_grad_(False)


@pytest.fixture
def rows():
    ids = torch.randint(VOCAB, (3, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1], ids[:, 1:]


def test_noise_changes_as_many_tokens_as_it_says():
    ids = torch.randint(VOCAB, (7, 40), generator=torch.Generator().manual_seed(1))
    made = noisy(ids, 0.2, VOCAB, seed=2)
    assert (made != ids).sum(1).tolist() == [8] * 7
    assert int(made.min()) >= 0
    assert int(made.max()) < VOCAB
    assert torch.equal(made, noisy(ids, 0.2, VOCAB, seed=2))
    assert not torch.equal(made, noisy(ids, 0.2, VOCAB, seed=3))
    assert torch.equal(noisy(ids, 0.0, VOCAB, seed=2), ids)


def test_losses_are_those_of_the_labels(model, rows):
    inputs, labels = rows
    p = model(input_ids=inputs).logits.log_softmax(-1)
    expected = [
        -sum(float(p[b, t, labels[b, t]]) for t in range(LENGTH)) / LENGTH for b in range(3)
    ]
    assert sequence_losses(model, inputs, labels).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_one_swap_with_all_proposals_is_the_worst_there_is(model, rows):
    inputs, labels = rows
    made = greedily_swapped(model, inputs, labels, Attack(1, LENGTH * VOCAB))
    found = sequence_losses(model, made, labels)
    for b in range(3):
        worst = -1.0
        for place, token in itertools.product(range(LENGTH), range(VOCAB)):
            other = inputs[b : b + 1].clone()
            other[0, place] = token
            worst = max(worst, float(sequence_losses(model, other, labels[b : b + 1])))
        assert float(found[b]) == pytest.approx(worst, rel=1e-5)


def test_swaps_only_hurt_and_beat_as_much_noise(model, rows):
    inputs, labels = rows
    clean = sequence_losses(model, inputs, labels)
    before = clean
    for swaps in (1, 2, 3):
        made = greedily_swapped(model, inputs, labels, Attack(swaps, 6))
        assert int((made != inputs).sum(1).max()) <= swaps
        losses = sequence_losses(model, made, labels)
        assert bool((losses >= before - 1e-6).all())
        before = losses
    noise = [
        sequence_losses(model, noisy(inputs, 3 / LENGTH, VOCAB, seed), labels).mean()
        for seed in range(20)
    ]
    assert float(before.mean()) > float(torch.stack(noise).mean())
    assert torch.equal(inputs, rows[0])


def test_more_swaps_than_tokens(model, rows):
    inputs, labels = rows
    made = greedily_swapped(model, inputs, labels, Attack(2 * LENGTH, 3))
    assert made.shape == inputs.shape
