"""The statistics: by hand, against simulation, and with nothing to find."""

import math

import numpy as np
import pytest

from headwise.papers.harness.judging import (
    holm,
    larger,
    larger_by_factor,
    line,
    lowest,
    more_often,
    paired_difference,
    share_difference,
    summary,
)


def test_summary_by_hand():
    found = summary([1.0, 2.0, 6.0])
    assert (found.mean, found.n) == (3.0, 3)
    assert found.sd == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert str(found) == "3 ± 2.6"
    assert str(summary([0.12345])) == "0.1235"


def test_paired_difference_by_hand_and_not_without_pairs():
    # Differences 1, 2, 3: mean 2, sd 1, t(0.975; 2) = 4.3027, half-width 4.3027/√3.
    a, b = [11.0, 102.0, 1003.0], [10.0, 100.0, 1000.0]
    found = paired_difference(a, b)
    assert found.mean == pytest.approx(2)
    assert found.high - 2 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert not found.positive
    assert paired_difference([2.0, 2.1, 2.05], [1.0, 1.1, 1.04]).positive
    assert paired_difference([1.0, 1.1, 1.04], [2.0, 2.1, 2.05]).negative
    # The same numbers paired wrongly: the spread between seeds hides the difference.
    assert not paired_difference(a, [1000.0, 10.0, 100.0]).positive


def test_one_seed_separates_nothing():
    found = paired_difference([5.0], [1.0])
    assert not found.positive
    assert not found.negative
    low = lowest({1: [5.0], 8: [1.0]})
    assert low.at == 8
    assert not low.certain
    assert str(paired_difference([2.0], [1.0])) == "+1 (one seed: no interval)"


def test_lowest_outside_and_within_the_spread():
    curve = {1: [9.0, 9.5, 9.1], 8: [1.0, 1.5, 1.1], 16: [1.1, 1.4, 1.3]}
    low = lowest(curve)
    assert (low.at, low.tied) == (8, (16,))
    curve[16] = [2.0, 2.5, 2.11]
    assert lowest(curve).certain


def test_errors_are_compared_by_their_powers_of_ten():
    # Ten times the error at every seed, though the spread of the larger is as wide as itself.
    small, large = [1e-6, 2e-6, 1e-6, 1e-6], [8e-6, 9e-5, 1e-5, 1e-5]
    curve = {2: small, 16: large, 4: [1.1e-6, 1.9e-6, 1e-6, 1.2e-6], 1: [0.5] * 4}
    low = lowest(curve)
    assert (low.at, low.tied, low.wins, low.seeds) == (2, (4,), 3, 4)
    assert str(low) == "within the spread of 4; lowest at 3 of 4 seeds"
    assert lowest({1: [0.0, 0.0], 2: [1.0, 1.1]}).certain  # nothing at all is less than anything
    assert larger_by_factor(large, small) == "yes"
    assert larger(large, small) == "open"
    assert larger_by_factor([1.0, 2.0], [0.95, 1.91]) == "no"  # certain, but under a tenth
    assert larger_by_factor([1.0, 2.0], [1.5, 1.0]) == "open"


def test_pure_noise_is_rarely_called_a_winner():
    rng = np.random.default_rng(0)
    certain = sum(
        lowest({k: np.exp(rng.standard_normal(5)).tolist() for k in range(4)}).certain
        for _ in range(400)
    )
    # The lowest of 4 was picked after looking, so a little more than 5% would be no surprise.
    assert certain < 0.08 * 400
    shifted = sum(
        lowest({k: np.exp(rng.standard_normal(5) + 6 * (k > 0)).tolist() for k in range(4)}).certain
        for _ in range(100)
    )
    assert shifted > 70


def test_line_by_hand():
    found = line([1, 2, 3], [2, 4, 6])
    assert (found.slope, found.intercept) == (pytest.approx(2), pytest.approx(0, abs=1e-12))
    assert found.r_squared == pytest.approx(1)
    # y = 0, 3, 0 on x = 1, 2, 3: the best line is flat.
    assert line([1, 2, 3], [0, 3, 0]).r_squared == pytest.approx(0, abs=1e-12)
    assert line([1, 2], [5, 5]).r_squared == 0


def test_shares_by_hand():
    # Fisher: of the 20 choose 5 ways to have five successes, one has them all in the first ten.
    assert more_often(5, 0, 10) == pytest.approx(math.comb(10, 5) / math.comb(20, 5))
    assert more_often(3, 3, 10) > 0.5
    assert more_often(0, 5, 10) == 1
    # Holm: 3 × 0.01, 2 × 0.02, then never less than before.
    assert holm([0.02, 0.01, 0.03]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    # Newcombe (1998), method 10, of 56/70 − 48/80 has unequal sizes; here 0/10 − 10/10.
    gap = share_difference(0, 10, 10)
    assert gap.mean == -1
    assert (gap.low, gap.high) == pytest.approx((-1, -1 + math.hypot(0.27753, 0.27753)), abs=1e-4)
    equal = share_difference(20, 20, 20)
    assert equal.high == pytest.approx(0.1611, abs=1e-3)


def test_fishers_test_finds_nothing_where_there_is_nothing():
    rng = np.random.default_rng(0)
    draws = rng.binomial(20, 0.5, (500, 2)).tolist()
    assert sum(more_often(a, b, 20) < 0.05 for a, b in draws) <= 0.05 * 500
