from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import pytest

from headwise.errors import TheoryError
from headwise.theory.relu_skip import (
    absorb,
    absorbable_example,
    absorbable_set,
    redundant_neurons,
    relu_mlp,
)
from headwise.theory.reparametrization import AttentionStack, fold, logits, random_stack
from tests import lanes

SIZES = [(1, 3), (2, 3), (2, 7), (2, 11), (3, 5), (3, 13), (5, 5), (5, 19), (7, 29), (17, 67)]


def brute_force(W_up: np.ndarray, W_down: np.ndarray) -> list[tuple[int, ...]]:
    hidden, d = W_up.shape
    subsets = chain.from_iterable(combinations(range(hidden), size) for size in range(hidden + 1))
    return [s for s in subsets if np.array_equal(W_down[:, list(s)] @ W_up[list(s)], -np.eye(d))]


def gaussian(d: int, hidden: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((hidden, d)), rng.standard_normal((d, hidden)) / hidden**0.5


def test_a_skip_absorbed_by_hand() -> None:
    # x + 2·relu(3x) − relu(x) : flipping the second neuron gives 2·relu(3x) − relu(−x).
    W_up, W_down = np.array([[3.0], [1.0]]), np.array([[2.0, -1.0]])
    assert absorbable_set(W_up, W_down) == (1,)
    new_up, new_down = absorb(W_up, W_down, (1,))
    np.testing.assert_array_equal(new_up, [[3.0], [-1.0]])
    np.testing.assert_array_equal(new_down, W_down)
    x = np.array([[-5.0], [7.0]])  # −5 + 0 − 0 and 7 + 42 − 7
    np.testing.assert_array_equal(relu_mlp(new_up, new_down, x), [[-5.0], [42.0]])


@pytest.mark.parametrize(("d", "hidden"), SIZES)
def test_the_constructed_example_is_found_and_absorbed(d: int, hidden: int) -> None:
    for seed in range(20):
        mlp = absorbable_example(d, hidden, seed)
        assert len(mlp.flipped) >= d
        assert absorbable_set(mlp.W_up, mlp.W_down) == mlp.flipped
        x = np.random.default_rng(seed).standard_normal((31, d))
        with_skip = x + relu_mlp(mlp.W_up, mlp.W_down, x)
        without = relu_mlp(*absorb(mlp.W_up, mlp.W_down, mlp.flipped), x)
        assert np.abs(without - with_skip).max() <= 1e-12 * np.abs(with_skip).max()


@pytest.mark.slow
@pytest.mark.parametrize(("d", "hidden"), SIZES)
def test_random_and_perturbed_weights_never_absorb(d: int, hidden: int) -> None:
    for seed in range(50):
        assert absorbable_set(*gaussian(d, hidden, seed)) is None
        mlp = absorbable_example(d, hidden, seed)
        noise = 1e-3 * np.random.default_rng(seed).standard_normal(mlp.W_down.shape)
        assert absorbable_set(mlp.W_up, mlp.W_down + noise) is None
        with pytest.raises(TheoryError, match="leave a linear term"):
            absorb(mlp.W_up, mlp.W_down + noise, mlp.flipped)


@pytest.mark.parametrize(
    ("d", "hidden"),
    lanes.slow_but(((1, 5), (2, 5), (3, 7)), ((1, 5), (1, 9), (2, 5), (2, 8), (3, 7), (3, 11))),
)
def test_brute_force_agrees_on_small_integers(d: int, hidden: int) -> None:
    # Entries −1, 0, 1: zero, repeated and dependent neurons abound; the products are exact.
    rng = np.random.default_rng(d * 100 + hidden)
    found = 0
    trials = 60 if hidden < 11 else 12
    for _ in range(trials):
        W_up, W_down = (
            rng.integers(-1, 2, size).astype(float) for size in ((hidden, d), (d, hidden))
        )
        if d == 3:  # or there would hardly ever be a set: plant one
            W_up[:3], W_down[:, :3] = np.eye(3), -np.eye(3)
            W_down[rng.integers(3), rng.integers(3)] *= rng.choice([1.0, 2.0])
        sets, answer = brute_force(W_up, W_down), absorbable_set(W_up, W_down)
        assert (answer is None) == (not sets)
        found += answer is not None
        if answer is not None:
            np.testing.assert_array_equal(W_down[:, list(answer)] @ W_up[list(answer)], -np.eye(d))
    assert 0 < found < trials


def test_the_answer_does_not_depend_on_the_scale_shared_by_a_neuron() -> None:
    mlp = absorbable_example(5, 19, 3)
    scale = np.geomspace(1e-4, 1e4, 19)
    assert absorbable_set(mlp.W_up * scale[:, None], mlp.W_down / scale) == mlp.flipped


def test_redundant_neurons_are_the_exception_to_only_if() -> None:
    # x + 2·relu(x) + 5·relu(−x) = 3·relu(x) + 4·relu(−x), though no set of flips gives it.
    W_up, W_down = np.array([[1.0], [-1.0]]), np.array([[2.0, 5.0]])
    x = np.linspace(-3, 3, 13)[:, None]
    assert absorbable_set(W_up, W_down) is None
    np.testing.assert_allclose(
        relu_mlp(W_up, np.array([[3.0, 4.0]]), x), x + relu_mlp(W_up, W_down, x), atol=1e-15
    )
    assert redundant_neurons(W_up, W_down) == (0, 1)


def test_redundant_neurons_by_hand() -> None:
    W_up = np.array([[1.0, 2.0], [3.0, 1.0], [0.0, 0.0], [-2.0, -4.0], [1.0, 1.0], [2.0, 2.0]])
    W_down = np.ones((2, 6))
    W_down[:, 5] = 0.0
    assert redundant_neurons(W_up, W_down) == (0, 2, 3, 5)  # 5 is dead, so 4 is alone on its line
    assert redundant_neurons(*gaussian(7, 29, 0)) == ()


def test_absorbed_skips_open_the_way_to_folding() -> None:
    # Both skips and unshared layers: refused, until each MLP has swallowed its skip.
    stack = random_stack(11, d_model=15, hidden=31, skip="both", n_layers=2)

    def with_mlps(absorbed: bool) -> AttentionStack:
        layers = []
        for seed, layer in enumerate(stack.layers):
            mlp = absorbable_example(15, 31, seed)
            up, down = mlp.W_up, mlp.W_down
            if absorbed:
                up, down = absorb(up, down, mlp.flipped)
            layers.append(replace(layer, W_up=up.T, W_down=down.T))
        return replace(stack, layers=tuple(layers), skip="attention" if absorbed else "both")

    before, after = with_mlps(absorbed=False), with_mlps(absorbed=True)
    with pytest.raises(TheoryError, match="both attention and MLP"):
        fold(before)
    ids = np.random.default_rng(0).integers(0, 13, (5, 7))
    wanted, got = logits(before, ids), logits(fold(after), ids)
    assert np.abs(got - wanted).max() < 1e-10 * np.abs(wanted).max()


def test_bad_input_is_named() -> None:
    with pytest.raises(TheoryError, match="hidden width of at least d"):
        absorbable_example(5, 3, 0)
    with pytest.raises(TheoryError, match=r"at most 20 neurons.*got 39 of 40"):
        absorbable_set(*gaussian(1, 40, 0))
    W_up, W_down = gaussian(2, 7, 0)
    with pytest.raises(TheoryError, match="different neurons from 0 to 6"):
        absorb(W_up, W_down, (1, 7))
    with pytest.raises(TheoryError, match="leave a linear term"):
        absorb(W_up, W_down, ())
    with pytest.raises(TheoryError, match="nan or infinity"):
        absorbable_set(W_up, W_down * np.inf)
