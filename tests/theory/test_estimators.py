"""Spectra and lag kernels recovered from tokens whose answer is known."""

import math

import numpy as np
import pytest

from headwise.errors import TheoryError
from headwise.theory.allocation import allocate
from headwise.theory.estimators import Spectrum, lag_kernel, token_spectrum


def white(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def test_tail_by_hand():
    spectrum = Spectrum((1.0, 9.0, 4.0, 2.0))  # in any order
    assert spectrum.eigenvalues == (9.0, 4.0, 2.0, 1.0)
    widths = np.array([0, 1, 2, 3, 4, 99.0])
    expected = np.sqrt(np.array([16, 7, 3, 1, 0, 0]) / 16)
    np.testing.assert_allclose(spectrum.tail(widths), expected, atol=1e-15)
    assert float(spectrum.tail(2.5)) == pytest.approx(math.sqrt(2 / 16))


@pytest.mark.parametrize("token_dim", [1, 2, 7, 16, 31])
def test_isotropic_tail_is_the_formula(token_dim):
    widths = np.linspace(0, token_dim, 29)
    expected = np.sqrt(1 - widths / token_dim)
    np.testing.assert_allclose(Spectrum.isotropic(token_dim).tail(widths), expected, atol=1e-7)
    assert Spectrum.isotropic(token_dim).rank == token_dim


def test_tokens_of_an_exact_spectrum():
    """Rows ±e_i have covariance I/d: measured and assumed isotropy agree."""
    X = np.vstack([np.eye(7), -np.eye(7)])
    measured = token_spectrum(X)
    widths = np.arange(8.0)
    np.testing.assert_allclose(measured.tail(widths), Spectrum.isotropic(7).tail(widths), atol=1e-7)
    assert pairs_of(allocate(97, measured, (1, 2))) == pairs_of(allocate(97, 7, (1, 2)))


def pairs_of(allocation):
    return [(group.heads, group.head_dim) for group in allocation.groups]


def test_white_noise_tends_to_isotropy():
    widths = np.arange(6.0)
    expected = Spectrum.isotropic(5).tail(widths)
    few, many = (
        np.abs(token_spectrum(white(n, 5)).tail(widths) - expected).max() for n in (11, 20011)
    )
    assert many < 0.02
    assert few > 0.05  # negative control: few tokens look less isotropic than they are


def test_the_mean_is_no_direction():
    X = white(997, 5)
    shifted = token_spectrum(X + 100.0)
    np.testing.assert_allclose(shifted.eigenvalues, token_spectrum(X).eigenvalues, rtol=1e-9)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_low_rank_tokens_have_no_tail_beyond_their_rank(dtype):
    X = (white(53, 3) @ white(3, 11, seed=1)).astype(dtype)
    spectrum = token_spectrum(X)
    assert spectrum.rank == 3
    assert float(spectrum.tail(3)) == 0.0
    assert float(spectrum.tail(2)) > 0.01


def test_a_faint_direction_is_not_rounded_away():
    X = white(53, 5) * np.array([1, 1, 1, 1, 1e-5])
    assert token_spectrum(X).rank == 5


@pytest.fixture
def known():
    """Noise-free targets of lags 1 and 3: y_t = x_t·rho_1 + x_{t-2}·rho_3."""
    X, rho = white(601, 5), white(3, 5, 2, seed=2)
    rho[1] = 0.0
    Y = np.zeros((601, 2))
    Y += X @ rho[0]
    Y[2:] += X[:-2] @ rho[2]
    return X, Y, rho


def test_a_known_kernel_is_recovered(known):
    X, Y, rho = known
    kernel = lag_kernel(X[2:] + 3.0, Y[2:] - 7.0, 3)  # offsets are no part of the kernel
    np.testing.assert_allclose(kernel.matrices, rho, atol=1e-11)
    expected = [np.linalg.svd(matrix)[1][0] for matrix in rho]
    np.testing.assert_allclose(kernel.norms, expected, atol=1e-11)
    assert kernel.unexplained < 1e-20
    centred = X[2:] - X[2:].mean(axis=0)
    assert kernel.radius == pytest.approx(math.sqrt((centred**2).sum(axis=1).max()))
    assert kernel.weights == tuple(norm * kernel.radius for norm in kernel.norms)


def test_broken_order_is_noticed(known):
    """Negative control: shuffled tokens explain nothing, too short a window not everything."""
    X, Y, rho = known
    shuffled = np.random.default_rng(3).permutation(X)
    assert lag_kernel(shuffled, Y, 3).unexplained > 0.9
    assert 0.05 < lag_kernel(X, Y, 2).unexplained < 0.95
    assert not np.allclose(lag_kernel(X[::-1].copy(), Y, 3).matrices, rho, atol=0.1)


def test_noisy_targets_are_recovered_roughly(known):
    X, Y, rho = known
    kernel = lag_kernel(X, Y + 0.1 * white(601, 2, seed=4), 3)
    np.testing.assert_allclose(kernel.matrices, rho, atol=0.05)
    assert 0 < kernel.unexplained < 0.02


def test_without_targets_the_next_token_is_predicted():
    A, noise = np.diag([0.9, 0.5, -0.3]), white(5003, 3)
    X = np.zeros((5003, 3))
    for t in range(1, len(X)):
        X[t] = X[t - 1] @ A + noise[t]
    kernel = lag_kernel(X, None, 2)
    np.testing.assert_allclose(kernel.matrices[0], A, atol=0.05)
    np.testing.assert_allclose(kernel.norms, [0.9, 0.0], atol=0.06)
    np.testing.assert_allclose(kernel.matrices, lag_kernel(X[:-1], X[1:], 2).matrices)


def test_directions_without_tokens_get_no_weight():
    X = white(101, 5)
    X[:, 3] = 0.0
    Y = X @ white(5, 2, seed=5)
    kernel = lag_kernel(X, Y, 2)
    np.testing.assert_allclose(kernel.matrices[0][3], 0.0, atol=1e-12)
    assert kernel.unexplained < 1e-20


def test_a_measured_kernel_and_spectrum_can_be_allocated(known):
    X, Y, _ = known
    result = allocate(128, token_spectrum(X), lag_kernel(X[2:], Y[2:], 4).weights)
    assert result.lags == 3  # lag 2 has no weight but stands before lag 3; lag 4 has none
    assert not result.vacuous


nan = white(11, 2)
nan[3, 1] = np.nan


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: token_spectrum(white(1, 5)), "At least 2 token vectors"),
        (lambda: token_spectrum(nan), "1 NaN or infinite"),
        (lambda: token_spectrum(np.full((11, 3), 0.1)), "11 equal rows"),
        (lambda: lag_kernel(nan, None, 1), "NaN or infinite"),
        (lambda: lag_kernel(white(11, 2), nan, 1), "target vectors must be finite"),
        (lambda: lag_kernel(white(13, 2), white(11, 3), 1), "13 tokens and 11 targets"),
        (lambda: lag_kernel(white(11, 2), None, 0), "number of lags"),
        (lambda: lag_kernel(white(8, 2), white(8, 1), 3), "need at least 9"),
        (lambda: lag_kernel(white(11, 2), np.ones((11, 1)), 1), "equal rows"),
        (lambda: Spectrum(()), "finite eigenvalues"),
        (lambda: Spectrum((1.0, -0.1)), "finite eigenvalues"),
        (lambda: Spectrum((0.0, 0.0)), "finite eigenvalues"),
        (lambda: Spectrum((1.0, math.nan)), "finite eigenvalues"),
        (lambda: Spectrum((math.inf, 1.0)), "finite eigenvalues"),
        (lambda: Spectrum.isotropic(0), "token width"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, words):
    with pytest.raises(TheoryError, match=words):
        call()


def test_the_least_number_of_tokens_is_enough():
    assert len(lag_kernel(white(9, 2), white(9, 1, seed=1), 3).norms) == 3
