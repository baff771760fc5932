"""The rules of both saturation claims and of answers in general, on made-up results."""

from __future__ import annotations

import numpy as np
import pytest

from headwise.papers.claims.allocation import saturation
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
