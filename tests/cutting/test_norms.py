"""Norms over kept columns: what is missing from the mean of the squares is estimated."""

import pytest
import torch

from headwise.cutting.refit import NormRegression

EPS = 1e-6
KEPT = (0, 2, 3)  # of seven columns


def fitted(x, columns=(KEPT,)):
    found = NormRegression(columns, x.shape[-1], EPS)
    for part in x.split(50):
        found.add(part[None])
    share, rest = found.solution()
    return float(share[0]), float(rest[0])


@pytest.fixture
def x():
    generator = torch.Generator().manual_seed(3)
    size = torch.rand(211, 1, generator=generator) * 4 + 0.2
    return size * torch.randn(211, 7, generator=generator)


def test_nothing_missing_is_the_norm_itself(x):
    assert fitted(x, (tuple(range(7)),)) == pytest.approx((1.0, EPS))


def test_what_follows_from_the_kept_columns_is_found(x):
    """Dropped columns that are constant are in the rest; zeros and copies are not."""
    dropped = [1, 4, 5, 6]
    x[:, dropped] = 0.0
    assert fitted(x) == pytest.approx((3 / 7, EPS), rel=1e-3, abs=EPS)
    x[:, dropped] = x[:, [0, 2, 3, 0]]
    x[:, 6] = (x[:, list(KEPT)].square().mean(-1)).sqrt()
    assert fitted(x) == pytest.approx((1.0, EPS), rel=1e-3, abs=EPS)
    x[:, dropped] = 2.0
    assert fitted(x) == pytest.approx((3 / 7, 4 / 7 * 4), rel=0.15)  # between points of the grid


def test_the_fit_misses_less_than_zeros_do(x):
    full = x.square().mean(-1) + EPS
    kept = x[:, list(KEPT)].square().mean(-1)

    def missed(share, rest):
        return float((kept * (full.rsqrt() - (share * kept + rest).rsqrt()).square()).sum())

    share, rest = fitted(x)
    assert missed(share, rest) < 0.5 * missed(3 / 7, EPS)
    for factor in (0.8, 1.25):  # the least there is
        assert missed(share * factor, rest * factor) > missed(share, rest)


def test_heads_that_are_zero_divide_by_no_zero():
    share, rest = fitted(torch.zeros(9, 7))
    assert share == pytest.approx(3 / 7)
    assert rest == pytest.approx(EPS)


def test_a_norm_over_all_heads_takes_columns_of_all(x):
    """Two heads side by side: kept columns of both make one mean."""
    both = torch.cat([x, 3 * x], -1)
    found = NormRegression(((0, 2, 3, 7, 9, 10),), 14, EPS)
    found.add(both[None])
    share, rest = found.solution()
    one = fitted(x)
    assert float(share[0]) == pytest.approx(one[0], rel=0.2)
    assert float(rest[0]) >= EPS
