"""The rules of the claims on saturation, width and depth, and of answers, on made-up results."""

from __future__ import annotations

import numpy as np
import pytest

from headwise.papers.claims.allocation import depth, saturation, width_returns
from headwise.papers.claims.allocation.saturation import NormFall, doubled, exponents, fall_verdict
from headwise.papers.harness.judging import larger, verdict


def _rows(trial, power, lengths=(4, 8, 16), layers=3, heads=2, pair_loss=5.0):
    """A model whose norm goes as L^power, its height a little different at every seed."""
    curve = [(1 + trial.seed / 100) * length ** (power + trial.seed / 1000) for length in lengths]
    return {
        "lengths": list(lengths),
        "jacobian_norm": [curve] * layers,
        "rest_norm": [[2 * x for x in curve]] * layers,
        "score_spread": [[1.0, 1.1, 1.2]] * layers,
        "effective_share": [[0.9, 0.8, 0.7]] * layers,
        "jacobian_exponents": [[power] * heads] * layers,
        "score_exponents": [[0.1] * heads] * layers,
        "untrained_exponent": -1.0,
        "loss": 2.0,
        "pair_loss": pair_loss,
    }


@pytest.mark.parametrize(
    ("power", "verdict"),
    [
        (-1.1, "holds"),
        (-0.4, "holds in part"),  # it falls, but slower than 1/L
        (-0.03, "does not hold"),  # for certain, but by less than a tenth
        (0.2, "does not hold"),
    ],
)
def test_saturation_by_length(power, verdict, made_up):
    results = made_up(saturation.SATURATION_LENGTH, lambda t: _rows(t, power))
    finding = saturation.judge_length(results)
    assert finding.verdict == verdict
    assert [row[0] for row in finding.table.rows] == ["early", "middle", "late"]
    assert saturation.draw_length(results).to_dict()


@pytest.mark.parametrize(
    ("powers", "verdict"),
    [
        ((-1.2, -1.1), "holds"),
        ((-1.2, -0.5), "holds in part"),  # slower than 1/L at one of them
        ((-1.2, -0.02), "holds in part"),  # less than a tenth is no fall
        ((-1.2, 0.1), "holds in part"),
        ((0.2, 0.1), "does not hold"),
    ],
)
def test_saturation_by_width(powers, verdict, made_up):
    by_width = dict(zip((4, 16), powers, strict=True))
    values = lambda t: _rows(t, by_width[t.parameters["width"]])  # noqa: E731
    results = made_up(saturation.SATURATION_WIDTH, values)
    assert saturation.judge_width(results).verdict == verdict
    assert saturation.draw_width(results).to_dict()


def test_models_that_need_no_attention_say_nothing(made_up):
    results = made_up(saturation.SATURATION_WIDTH, lambda t: _rows(t, -1.1, pair_loss=2.05))
    assert saturation.judge_width(results).verdict == "cannot be tested here"


def test_a_single_seed_decides_nothing_for_certain():
    assert fall_verdict([NormFall((0.5,), (0.1,), (-2.0,))]) == "cannot be tested here"


def test_answers():
    assert larger([2.0, 2.1, 2.2], [1.0, 1.2, 1.1]) == "yes"
    assert larger([2.0, 2.1, 2.2], [2.0, 2.1, 2.21]) == "no"  # as good as equal
    assert larger([1.0, 1.2, 1.1], [2.0, 2.1, 2.2]) == "no"
    assert larger([2.0, 2.1, 2.2], [1.0, 3.0, 1.5]) == "open"
    assert larger([2.0], [1.0]) == "open"
    assert larger([2.0, 2.1, 2.2], [1.9, 2.0, 2.1]) == "no"  # certain, but not worth speaking of
    assert larger([2.0, 2.1, 2.2], [1.9, 2.0, 2.1], margin=0.01) == "yes"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["yes", "yes"], "holds"),
        (["yes", "no"], "holds in part"),
        (["yes", "open"], "holds in part"),
        (["no", "no"], "does not hold"),
        (["no", "open"], "cannot be tested here"),  # open may still become yes: in part
        (["no", "open", "open"], "cannot be tested here"),
        (["open", "open"], "cannot be tested here"),
    ],
)
def test_verdicts(answers, expected):
    assert verdict(answers) == expected


def test_models_that_learned_nothing_say_nothing(made_up):
    results = made_up(saturation.SATURATION_WIDTH, lambda t: _rows(t, -1.1) | {"loss": 4.95})
    assert saturation.judge_width(results).verdict == "cannot be tested here"


def test_exponents_of_pure_powers():
    lengths = doubled(1024)
    assert lengths == (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    powers = np.array([[-1.0, -0.25], [0.5, 0.0], [2.0, -3.0]])
    rows = 0.7 * np.asarray(lengths)[None, :, None] ** powers[:, None, :]
    assert np.allclose(exponents(rows, lengths), powers)
    assert np.isfinite(exponents(np.zeros((1, len(lengths), 1)), lengths)).all()


# --- returns of width, dominance by depth, spectra ----------------------------------------------


def _returns(short, long, wobble=0.001):
    """Errors at the narrowest, the middle and the widest, at the shortest and at longer lengths."""

    def values(trial):
        p = trial.parameters
        ends = short if p["length"] == 8 else long
        error = ends[0] if p["width"] == 1 else ends[1] if p["width"] <= 4 else ends[2]
        return {"error": error * (1 + wobble * trial.seed), "metric": error}

    return values


@pytest.mark.slow
@pytest.mark.parametrize("size", ["quick", "full"])
@pytest.mark.parametrize(
    ("short", "long", "verdict"),
    [
        ((0.9, 0.5, 0.3), (0.9, 0.4, 0.35), "holds"),
        ((0.9, 0.5, 0.45), (0.9, 0.5, 0.3), "holds in part"),  # diminishing, but less so for long
        ((0.9, 0.5, 0.3), (0.9, 0.85, 0.75), "holds in part"),  # the other way round
        ((0.9, 0.8, 0.75), (0.9, 0.8, 0.6), "does not hold"),
        ((0.9, 0.899, 0.899), (0.9, 0.899, 0.899), "cannot be tested here"),  # no gain anywhere
    ],
)
def test_returns_of_width(short, long, verdict, size, made_up):
    results = made_up(width_returns.CLAIM, _returns(short, long), size)
    finding = width_returns.judge(results)
    assert finding.verdict == verdict
    assert ("no width brings" in finding.reasons[0]) == (verdict == "cannot be tested here")
    assert width_returns.figure(results).to_dict()


def test_returns_within_the_spread_are_open(made_up):
    ends = (0.9, 0.5, 0.3), (0.9, 0.4, 0.35)
    for results in (
        made_up(width_returns.CLAIM, _returns(*ends, wobble=3.0)),
        made_up(width_returns.CLAIM, _returns(*ends), seeds=(0,)),
    ):
        assert width_returns.judge(results).verdict == "cannot be tested here"


def _counting(output, loss):
    def values(trial):
        wobble = 1 + 0.01 * trial.seed
        found = {"output": output, "loss": loss}
        made = {name: [x * wobble for x in c] for name, c in found.items()}
        return {**made, "output_first": [0.4] * 6, "loss_first": [0.3] * 6, "heads": 9}

    return values


FEWER, MORE, SAME = [6, 6, 5, 5, 3, 3], [3, 3, 5, 5, 6, 6], [5, 5, 5, 5, 4.9, 4.9]


@pytest.mark.parametrize(
    ("output", "loss", "verdict"),
    [
        (FEWER, FEWER, "holds"),
        (FEWER, SAME, "holds in part"),
        (MORE, FEWER, "holds in part"),
        (SAME, MORE, "does not hold"),
    ],
)
def test_dominance(output, loss, verdict, made_up):
    results = made_up(depth.HEAD_DOMINANCE, _counting(output, loss))
    assert depth.judge_dominance(results).verdict == verdict
    assert depth.draw_dominance(results).to_dict()
    one = made_up(depth.HEAD_DOMINANCE, _counting(output, loss), seeds=(0,))
    assert "one seed" in depth.judge_dominance(one).reasons[0]


@pytest.mark.parametrize(
    ("qk", "vo", "verdict"),
    [
        (20, 20, "holds"),
        (20, 40, "holds in part"),
        (49.5, 50, "does not hold"),  # as random ones
    ],
)
def test_spectra(qk, vo, verdict, made_up):
    def values(trial):
        random = [50 + 0.1 * trial.seed] * 3
        trained = {"qk": [qk] * 3, "vo": [vo] * 3}
        return {
            "layers": [0, 10, 20],
            "width": 64,
            "random_qk": random,
            "random_vo": random,
        } | trained

    results = made_up(depth.HEAD_SPECTRA, values)
    assert depth.judge_spectra(results).verdict == verdict
    assert depth.draw_spectra(results).to_dict()


def test_directions_are_those_of_the_whole_matrix():
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(31, 7)), rng.normal(size=(31, 7)) * np.logspace(0, -2, 7)
    squares = np.linalg.svd(a @ b.T, compute_uv=False) ** 2
    for energy in (0.5, 0.9, 0.99):
        count = depth.directions(a, b, energy)
        assert squares[:count].sum() >= energy * squares.sum() > squares[: count - 1].sum()
    assert depth.directions(a[:, :2], b[:, :2], 0.9999) == 2
