"""The checks that every test runs under can fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float

from headwise.theory.bottleneck import attention_pattern
from headwise.theory.saturation import jacobian_norm
from tests.annotations import checked


@checked
def product(A: Float[np.ndarray, "m n"], B: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "m k"]:
    return A @ B if A.shape != B.shape else A


@checked
def counted(words: Sequence[str], times: float) -> float:
    return len(words) * times


@checked
@dataclass(frozen=True, slots=True)
class Pair:
    one: Float[np.ndarray, " n"]
    other: Float[np.ndarray, " n"]


def wrong():
    return pytest.raises(BeartypeCallHintViolation)


def test_sizes_that_do_not_go_together_are_seen():
    assert product(np.ones((2, 3)), np.ones((3, 5))).shape == (2, 5)
    with wrong():
        product(np.ones((2, 3)), np.ones((2, 3)))
    with wrong():
        product(np.ones((2, 3)), np.ones(3))
    with wrong():
        product(np.ones((2, 3), dtype=np.int64), np.ones((3, 5)))
    with wrong():
        Pair(np.ones(3), np.ones(5))


def test_a_wrong_result_is_seen():
    @checked
    def square(x: Float[np.ndarray, "n m"]) -> Float[np.ndarray, "n n"]:
        return x

    with wrong():
        square(np.ones((2, 3)))


def test_other_types_are_seen_and_an_int_is_a_float():
    assert counted(("a", "b"), 3) == 6
    with wrong():
        counted(("a", "b"), "3")
    with wrong():
        counted(7, 3.0)


def test_the_library_is_checked():
    tokens = np.eye(3)
    with wrong():
        attention_pattern(tokens, np.ones((3, 2)), np.ones((3, 1)))
    with wrong():
        jacobian_norm("a row")
