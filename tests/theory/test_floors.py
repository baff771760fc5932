"""Floors by hand, by random projection, and by the entropy they are derived from."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.spatial.distance import pdist

from headwise.errors import TheoryError
from headwise.theory.floors import ENTROPY_COEFFICIENT, Floor, entropy_floor, jl_floor


def test_the_popular_example_needs_289_not_72() -> None:
    floor = jl_floor(8192, 0.5)
    assert floor.threshold == pytest.approx(288.349, abs=1e-3)
    assert floor.width == 289
    assert 8 * math.log(8192) == pytest.approx(72.09, abs=0.01)


@pytest.mark.parametrize("eps", [1, 1.0, 1.5, 0, 0.0, -0.5, math.nan, math.inf])
def test_a_distortion_outside_the_lemma_is_refused_with_the_reason(eps: float) -> None:
    with pytest.raises(TheoryError, match=r"between 0 and 1, got .* 72 for 8192 .* eps = 1"):
        jl_floor(8192, eps)


def test_a_threshold_that_is_an_integer_is_not_itself_enough() -> None:
    floor = Floor(32.0)
    assert floor.width == 33
    assert not floor.is_met(32)
    assert floor.is_met(33)
    assert jl_floor(1, 0.5) == Floor(0.0)


def worst_distortion(width: int) -> float:
    rng = np.random.default_rng(17)
    points = rng.normal(size=(31, 499))
    images = points @ rng.normal(size=(499, width)) / math.sqrt(width)
    return float(np.abs(pdist(images) / pdist(points) - 1).max())


def test_a_random_projection_above_the_floor_keeps_all_distances() -> None:
    assert worst_distortion(jl_floor(31, 0.5).width) < 0.5
    assert worst_distortion(7) > 0.5  # and far below it, does not


def test_the_entropy_floor_is_where_the_entropy_of_a_pair_runs_out() -> None:
    def saved(d: int) -> float:
        """d·E cos θ − ln E e^{d·cos θ}, θ the angle of two random directions, by quadrature."""

        def moment(weight: bool, tilt: float) -> float:
            def density(theta: float) -> float:
                tilted = math.exp(
                    tilt * (math.cos(theta) - 1) + (d - 2) * math.log(math.sin(theta))
                )
                return tilted * (math.cos(theta) if weight else 1.0)

            value, _ = quad(density, 1e-9, math.pi - 1e-9, limit=500)
            return value

        tilted = moment(False, d)
        return d * moment(True, d) / tilted - d - math.log(tilted / moment(False, 0.0))

    limit = (saved(1009) - saved(503)) / (1009 - 503)
    assert limit == pytest.approx(math.log((1 + math.sqrt(5)) / 2) / 2, rel=5e-3)
    assert 2 / limit == pytest.approx(ENTROPY_COEFFICIENT, rel=1e-2)


def test_the_entropy_floor_by_hand() -> None:
    assert entropy_floor(8192).threshold == pytest.approx(8.33 * 13 * math.log(2))
    assert entropy_floor(8192).width == 76
    assert entropy_floor(1).width == 1


@pytest.mark.parametrize("count", [0, -3])
def test_counts_below_one_are_refused(count: int) -> None:
    with pytest.raises(TheoryError, match="at least 1 of points"):
        jl_floor(count, 0.5)
    with pytest.raises(TheoryError, match="at least 1 of tokens"):
        entropy_floor(count)
