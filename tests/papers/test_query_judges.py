"""The rules of both query-free claims, on made-up results: each can end any way."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from headwise.papers.claims.query_free import query_free, query_free_decay
from headwise.papers.claims.query_free.query_free import (
    FULL,
    FULL_LOW,
    PAPER,
    SPREAD,
    WIDER,
    WIDER_SPREAD,
)
from headwise.papers.harness.judging import Difference
from tests.papers.figures import assert_drawn

ONE_SEED = (0,)
TRUE = {PAPER: 0.004, WIDER: -0.02}  # what the paper says; the other scale is far off
FALSE = {PAPER: 0.02, SPREAD: 0.03, WIDER: 0.02, WIDER_SPREAD: 0.0}


def _clean(finding):
    return json.dumps(asdict(finding), allow_nan=False)


def _losses(gains, wobble=0.0001):
    """Relative losses above the full model at the usual decay (0.5 unless given)."""

    def values(trial):
        full = trial.name in (FULL, FULL_LOW)
        gain = gains.get(trial.name, 0.0 if full else 0.5)
        loss = 4.0 * (1 + gain + (0.0 if full else wobble * (trial.seed - 1)))
        return {
            "steps": [5, 10], "losses": [6.0, loss], "loss": loss, "diverged": False,
            "attn_params": 300 if "W_Q" in trial.name else 400, "total_params": 1200,
        }  # fmt: skip

    return values


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        (TRUE, "holds"),
        ({SPREAD: 0.004, WIDER_SPREAD: -0.02}, "holds"),  # the scale is not the claim
        ({PAPER: 0.004, WIDER_SPREAD: -0.02}, "holds in part"),  # not at one scale
        ({PAPER: 0.004, WIDER: 0.02}, "holds in part"),
        ({PAPER: 0.02, WIDER: -0.02}, "holds in part"),
        (FALSE, "does not hold"),
        ({**TRUE, FULL_LOW: -0.03}, "does not hold"),  # as well as full at one decay only
        ({**TRUE, FULL_LOW: -0.003}, "holds"),
        ({PAPER: 0.004, WIDER: -0.0005}, "holds in part"),  # a gain of nothing
    ],
)
def test_query_free(gains, verdict, made_up):
    results = made_up(query_free.CLAIM, _losses(gains))
    finding = query_free.judge(results)
    assert finding.verdict == verdict
    assert "Open" not in finding.reasons[0]
    assert "25% fewer" in finding.reasons[2]
    assert_drawn(query_free.figure, results)


def test_query_free_shows_both_full_models(made_up):
    finding = query_free.judge(made_up(query_free.CLAIM, _losses({**TRUE, FULL_LOW: -0.01})))
    rows = {row[0]: row for row in finding.table.rows}
    assert rows[PAPER][2].startswith("+0.40%")
    assert rows[PAPER][3].startswith("+1.41%")
    assert rows[FULL][2] is None
    assert rows[FULL_LOW][3] is None


@pytest.mark.parametrize("gains", [TRUE, FALSE])
def test_query_free_decides_nothing_within_the_spread(gains, made_up):
    for results, why in (
        (made_up(query_free.CLAIM, _losses(gains, wobble=0.1)), "the spread hides the answer"),
        (made_up(query_free.CLAIM, _losses(gains), seeds=ONE_SEED), "one seed"),
    ):
        finding = query_free.judge(results)
        assert finding.verdict == "cannot be tested here"
        assert why in finding.reasons[0]
        assert "inf" not in _clean(finding)
        assert_drawn(query_free.figure, results)


@pytest.mark.parametrize(
    ("low", "high", "same", "less"),
    [
        (-0.02, -0.01, "yes", "yes"),
        (-0.02, 0.005, "yes", "open"),
        (-0.0005, -0.0002, "yes", "no"),
        (-0.02, 0.02, "open", "open"),
        (0.002, 0.02, "open", "no"),
        (0.011, 0.02, "no", "no"),
    ],
)
def test_query_free_answers_against_both(low, high, same, less):
    gap, fine = Difference((low + high) / 2, low, high), Difference(-0.5, -0.6, -0.4)
    for gaps in ((gap, fine), (fine, gap)):
        assert query_free.as_well(gaps) == same
        assert query_free.better(gaps) == less


@pytest.mark.parametrize(
    ("diverged", "losses", "expected"),
    [
        (False, [6.0, 4.0, 3.0], True),
        (True, [6.0, 4.0, 3.0], False),
        (True, [], False),
        (False, [6.0, 3.0, 3.3], False),  # rose again
        (False, [6.0, 5.9, 5.8], False),  # never better than frequencies
    ],
)
def test_stability(diverged, losses, expected):
    values = {"diverged": diverged, "losses": losses, "frequency_loss": 5.0}
    assert query_free_decay.stable(values) is expected


LOW, HIGH = query_free_decay.RATES["full"]
FULL_LOSES = {("full", LOW, 0.01): 2, ("full", LOW, 0.0): 3}  # so many of three seeds
FULL_LOSES_HIGH = {("full", HIGH, d): 3 for d in (0.05, 0.03125, 0.01, 0.0)}
W_Q_LOSES = {("W_Q = I", HIGH, 0.05): 2}
BOTH_LOSE = {(m, HIGH, 0.0): 3 for m in ("full", "W_Q = I")}


def _decaying(unstable):
    """By model, rate and decay, how many seeds are unstable (the first ones)."""

    def values(trial):
        course = trial.parameters["course"]
        place = (trial.parameters["model"], course["lr"], course["weight_decay"])
        bad = trial.seed < unstable.get(place, 0)
        return {"stable": not bad, "loss": 3.0 + trial.seed + bad}

    return values


@pytest.mark.parametrize(
    ("unstable", "verdict"),
    [
        ({**FULL_LOSES, **FULL_LOSES_HIGH}, "holds"),
        (FULL_LOSES, "holds in part"),  # nothing to cure at the higher rate
        ({**FULL_LOSES, **W_Q_LOSES}, "holds in part"),
        ({**FULL_LOSES_HIGH, ("full", LOW, 0.1): 1}, "holds"),  # the lower rate is left out
        ({}, "holds in part"),
        (W_Q_LOSES, "does not hold"),
        ({**W_Q_LOSES, **BOTH_LOSE}, "does not hold"),
        (BOTH_LOSE, "cannot be tested here"),
        ({("full", LOW, 0.0): 1}, "cannot be tested here"),  # one seed of three
        ({("full", LOW, 0.03125): 3}, "cannot be tested here"),  # a stray place
        ({**FULL_LOSES, ("W_Q = I", LOW, 0.0): 1}, "cannot be tested here"),
        ({("W_Q = I", LOW, 0.01): 1}, "cannot be tested here"),
        ({("full", LOW, 0.1): 1, ("W_Q = I", HIGH, 0.1): 1}, "cannot be tested here"),
    ],
)
def test_query_free_decay(unstable, verdict, made_up):
    results = made_up(query_free_decay.CLAIM, _decaying(unstable), "full")
    finding = query_free_decay.judge(results)
    assert finding.verdict == verdict
    assert len(finding.table.rows) == 2 * 5
    assert_drawn(query_free_decay.figure, results)


@pytest.mark.parametrize("unstable", [{**FULL_LOSES, **FULL_LOSES_HIGH}, W_Q_LOSES, {}])
def test_one_seed_says_nothing_about_stability(unstable, made_up):
    results = made_up(query_free_decay.CLAIM, _decaying(unstable), "full", ONE_SEED)
    finding = query_free_decay.judge(results)
    assert finding.verdict == "cannot be tested here"
    assert "single seed" in finding.reasons[0]
    assert "inf" not in _clean(finding)
    assert_drawn(query_free_decay.figure, results)


def test_the_reasons_tell_every_rate(made_up):
    unstable = {**FULL_LOSES, ("full", HIGH, 0.1): 1}
    reasons = query_free_decay.judge(
        made_up(query_free_decay.CLAIM, _decaying(unstable), "full")
    ).reasons
    assert reasons[0] == f"At learning rate {LOW:g} {query_free_decay.TOLD['cured']}."
    assert "left out" in reasons[1]


@pytest.mark.parametrize(
    ("shift", "told"),
    [
        ({"full": 0.5}, "full model ends 0.50 to 0.90 nats worse"),
        ({"W_Q = I": 0.5}, "model without W_Q ends 0.50 to 0.90 nats worse"),
    ],
)
def test_the_better_model_at_a_rate_is_told(shift, told, made_up):
    def values(trial):
        p = trial.parameters
        extra = 4 * p["course"]["weight_decay"]  # 0.4 at the usual decay
        gap = (shift[p["model"]] + extra) if p["model"] in shift else 0.0
        return {"stable": True, "loss": 3.0 + trial.seed + gap * (1 + 0.01 * trial.seed)}

    reasons = query_free_decay.judge(made_up(query_free_decay.CLAIM, values, "full")).reasons
    (high,) = (r for r in reasons if r.startswith(f"At learning rate {HIGH:g} the "))
    assert told in high or told.replace("0.90", "0.91") in high
    assert "at 5 of 5 decays" in high


def test_models_that_take_turns_are_told_as_that(made_up):
    def values(trial):
        p = trial.parameters
        decayed = p["course"]["weight_decay"] > 0.04
        return {"stable": True, "loss": 3.0 + (0.1 if decayed == (p["model"] == "full") else 0.0)}

    reasons = query_free_decay.judge(made_up(query_free_decay.CLAIM, values, "full")).reasons
    assert any("neither model is better at every decay" in reason for reason in reasons)
