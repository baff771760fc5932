"""The rules of the claims about language models, on made-up results: each can end either way."""

from __future__ import annotations

import numpy as np
import pytest

from headwise.reproduce import (
    later_layers,
    robustness,
    saturation_length,
    saturation_width,
    student_head,
)
from headwise.reproduce.answers import larger, verdict
from headwise.reproduce.attention_rows import Fall, doubled, exponents, fall_verdict
from headwise.reproduce.claim import Result, Results

SEEDS = (0, 1, 2)


def _results(claim, values, size="quick"):
    made = [Result(t, values(t), 1.0) for t in claim.trials(size, SEEDS)]
    return Results(size, tuple(made))


def _rows(trial, power, lengths=(4, 8, 16), layers=3, heads=2):
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
        "frequency_loss": 5.0,
    }


@pytest.mark.parametrize(
    ("power", "verdict"), [(-1.1, "holds"), (-0.4, "holds in part"), (0.2, "does not hold")]
)
def test_saturation_by_length(power, verdict):
    results = _results(saturation_length.CLAIM, lambda t: _rows(t, power))
    finding = saturation_length.judge(results)
    assert finding.verdict == verdict
    assert [row[0] for row in finding.table.rows] == ["early", "middle", "late"]
    assert saturation_length.figure(results).to_dict()


@pytest.mark.parametrize(
    ("powers", "verdict"),
    [
        ((-1.2, -1.1), "holds"),
        ((-1.2, -0.5), "holds in part"),
        ((-1.2, 0.1), "holds in part"),
        ((0.2, 0.1), "does not hold"),
    ],
)
def test_saturation_by_width(powers, verdict):
    by_width = dict(zip((4, 16), powers, strict=True))
    values = lambda t: _rows(t, by_width[t.parameters["width"]])  # noqa: E731
    results = _results(saturation_width.CLAIM, values)
    assert saturation_width.judge(results).verdict == verdict
    assert saturation_width.figure(results).to_dict()


def test_a_single_seed_decides_nothing_for_certain():
    assert fall_verdict([Fall((0.5,), (0.1,), (-2.0,))]) == "cannot be tested here"


def test_answers():
    assert larger([2.0, 2.1, 2.2], [1.0, 1.2, 1.1]) == "yes"
    assert larger([2.0, 2.1, 2.2], [2.0, 2.1, 2.21]) == "no"  # as good as equal
    assert larger([1.0, 1.2, 1.1], [2.0, 2.1, 2.2]) == "no"
    assert larger([2.0, 2.1, 2.2], [1.0, 3.0, 1.5]) == "open"
    assert larger([2.0], [1.0]) == "open"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["yes", "yes"], "holds"),
        (["yes", "no"], "holds in part"),
        (["yes", "open"], "holds in part"),
        (["no", "open"], "does not hold"),
        (["open", "open"], "cannot be tested here"),
    ],
)
def test_verdicts(answers, expected):
    assert verdict(answers) == expected


def test_models_that_learned_nothing_say_nothing():
    results = _results(saturation_width.CLAIM, lambda t: _rows(t, -1.1) | {"loss": 4.95})
    assert saturation_width.judge(results).verdict == "cannot be tested here"


def test_exponents_of_pure_powers():
    lengths = doubled(1024)
    assert lengths == (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    powers = np.array([[-1.0, -0.25], [0.5, 0.0], [2.0, -3.0]])
    rows = 0.7 * np.asarray(lengths)[None, :, None] ** powers[:, None, :]
    assert np.allclose(exponents(rows, lengths), powers)
    assert np.isfinite(exponents(np.zeros((1, len(lengths), 1)), lengths)).all()


def _students(errors):
    """`errors` of the three methods; a little different at every seed."""

    def values(trial):
        rows = [
            {"width": w, "method": m, "error": e * (1 + trial.seed / 50), "rise": e / 10}
            for w in trial.parameters["widths"]
            for m, e in zip(student_head.METHODS, errors, strict=True)
        ]
        return {"loss": 3.0, "removed": 0.2, "group": 0, "students": rows}

    return values


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [
        ((0.4, 0.05, 0.3), "holds"),
        ((0.4, 0.3, 0.5), "holds in part"),  # better than both, but not close
        ((0.4, 0.5, 0.3), "does not hold"),
    ],
)
def test_students(errors, verdict):
    results = _results(student_head.CLAIM, _students(errors))
    finding = student_head.judge(results)
    assert finding.verdict == verdict
    assert len(finding.table.rows) == 2 * 3 * 2
    assert student_head.figure(results).to_dict()


def _cuts(rise):
    def values(trial):
        rows = [
            {
                "third": third,
                "kept": kept,
                "way": way,
                "removed": 7,
                "rise": rise[way] * factor * (1 + trial.seed / 50),
            }
            for third, factor in zip(later_layers.THIRDS, rise["thirds"], strict=True)
            for kept in trial.parameters["groups_kept"]
            for way in ("width", "heads")
        ]
        return {"loss": 3.0, "groups": 3, "cuts": rows}

    return values


@pytest.mark.parametrize("size", ["quick", "full"])
@pytest.mark.parametrize(
    ("rise", "verdict"),
    [
        ({"thirds": (3, 2, 1), "width": 0.1, "heads": 0.2}, "holds"),
        ({"thirds": (1, 2, 3), "width": 0.1, "heads": 0.2}, "holds in part"),
        ({"thirds": (3, 2, 1), "width": 0.2, "heads": 0.1}, "holds in part"),
        ({"thirds": (1, 2, 3), "width": 0.2, "heads": 0.1}, "does not hold"),
    ],
)
def test_later_layers(rise, verdict, size):
    results = _results(later_layers.CLAIM, _cuts(rise), size)
    assert later_layers.judge(results).verdict == verdict
    assert later_layers.figure(results).to_dict()


def _robust(factors):
    def values(trial):
        kinds = {
            "dense and cut": ("dense", "cut"),
            "pretrained": ("pretrained", *robustness.PAIRS[2]),
        }
        names = kinds.get(trial.name, (trial.name,))
        spread = 1 + trial.seed / 50
        return {
            "models": {
                n: {
                    "clean": 2.0,
                    "params": 5,
                    "rises": {"noise": factors.get(n, 1.0) * spread, "swaps": spread},
                }
                for n in names
            }
        }

    return values


@pytest.mark.parametrize(
    ("factors", "answers", "verdict"),
    [
        ({}, ["as robust"] * 4, "holds"),
        ({"planned": 1.5}, ["weaker", "as robust", "as robust", "as robust"], "holds in part"),
    ],
)
def test_robustness(factors, answers, verdict):
    results = _results(robustness.CLAIM, _robust(factors))
    finding = robustness.judge(results)
    assert finding.verdict == verdict
    told = [row[-1] for row in finding.table.rows if row[0] in {"planned", "cut"}]
    assert told == answers
    assert robustness.figure(results).to_dict()


def test_robustness_does_not_hold_when_most_are_weaker():
    rises = {"uniform": {"noise": [1.0, 1.1, 1.2]}, "planned": {"noise": [2.0, 2.1, 2.2]}}
    (one,) = robustness.compared(rises)
    assert one.answer == "weaker"
    scattered = {"uniform": rises["uniform"], "planned": {"noise": [0.0, 1.2, 3.0]}}
    (other,) = robustness.compared(scattered)
    assert other.answer == "undecided"


def test_robustness_with_one_seed_cannot_be_tested():
    trials = robustness.CLAIM.trials("quick", (0,))
    results = Results("quick", tuple(Result(t, _robust({})(t), 1.0) for t in trials))
    assert robustness.judge(results).verdict == "cannot be tested here"


def test_full_size_has_the_pretrained_models():
    results = _results(robustness.CLAIM, _robust({}), "full")
    assert len(robustness.compared(robustness._rises(results))) == 6
    assert robustness.judge(results).verdict == "holds"
    assert robustness.figure(results).to_dict()


@pytest.mark.parametrize(
    "module", [saturation_length, saturation_width, student_head, later_layers, robustness]
)
@pytest.mark.parametrize("size", ["quick", "full"])
def test_trials_are_told_apart(module, size):
    trials = module.CLAIM.trials(size, SEEDS)
    keys = {t.key(1) for t in trials}
    assert len(keys) == len(trials)
    assert {t.claim for t in trials} == {module.CLAIM.id}
