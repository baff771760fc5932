"""The rules of the claims about training from scratch, on made-up results: each can end any way."""

from __future__ import annotations

import json
import math

import pytest

from headwise.papers.claims.allocation import (
    adaptive,
    planned_vs_uniform,
    six_layers,
    three_tokens,
    two_layers,
)
from headwise.papers.claims.allocation.adaptive import Condition, adaptation, chosen_plans, regrets
from headwise.papers.claims.allocation.planned_vs_uniform import ComputeCurve, final_loss, saving
from headwise.papers.harness.claim import Results, TrialResult
from tests.papers.figures import assert_drawn

SEEDS = (0, 1, 2)


def _results(claim, values, seeds=SEEDS):
    made = [TrialResult(t, values(t), 1.0) for t in claim.trials("quick", seeds)]
    return Results("quick", tuple(made))


def test_flops_to_a_loss_lie_between_evaluations_on_a_logarithmic_scale():
    run = ComputeCurve(5.0, (2, 8, 32), (3.0, 2.0, 1.0))
    assert run.flops_to(2.0) == pytest.approx(40.0)
    assert run.flops_to(1.5) == pytest.approx(5 * math.sqrt(8 * 32))
    assert run.flops_to(3.5) == 10.0  # already there at the first evaluation
    assert run.flops_to(0.5) == 160.0  # never: all of it
    assert run.loss_at(5 * math.sqrt(8 * 32)) == pytest.approx(1.5)
    assert run.loss_at(160.0) == pytest.approx(1.0)
    assert run.loss_at(9.0) is None
    assert run.loss_at(161.0) is None


def test_the_final_loss_is_the_mean_of_the_last_three():
    assert final_loss([9.0, 1.0, 2.0, 6.0]) == pytest.approx(3.0)
    assert final_loss([7.0]) == 7.0


def test_a_saving_is_asked_for_at_a_loss_that_both_reach():
    dense = ComputeCurve(4.0, (1, 2, 4, 8, 16, 32), (6.0, 5.0, 4.0, 3.0, 3.0, 3.0))
    cheaper = ComputeCurve(3.0, dense.steps, dense.losses)
    faster = ComputeCurve(4.0, dense.steps, (5.0, 4.0, 3.0, 2.0, 2.0, 2.0))
    assert saving(cheaper, dense) == pytest.approx(0.25)
    assert saving(faster, dense) == pytest.approx(0.5)  # at 3.0, after 4 steps instead of 8
    assert saving(dense, faster) == pytest.approx(-1.0)
    assert saving(dense, dense) == 0


def _planned(gain, flops=3.0, tasks=planned_vs_uniform.SETTINGS, wobble=0.001):
    """Runs that fall by 1 with every doubling; theory is `gain` lower in some settings."""

    def values(trial):
        p = trial.parameters
        planned = p["policy"] == "theory" and p["setting"] in tasks
        shift = trial.seed / 10 - (gain + (trial.seed - 1) * wobble) * planned
        steps = [2**i for i in range(6)]
        return {
            "steps": steps,
            "losses": [10.0 - i + shift for i in range(6)],
            "flops_per_step": 4.0 if p["policy"] == "dense" else flops,
            "attn_params": 100,
            "diverged": False,
        }

    return values


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        (_planned(0.5), "holds"),
        (_planned(0.5, tasks=("language",)), "holds in part"),
        (_planned(0.0), "does not hold"),  # 25% less compute, but uniform saves it as well
        (_planned(-0.5), "does not hold"),
        (_planned(0.1, flops=4.0), "holds in part"),  # better, but by less than 15% of compute
        (_planned(0.01, flops=4.0), "does not hold"),  # for certain, but not worth speaking of
        (_planned(0.0, wobble=0.6), "cannot be tested here"),
    ],
)
def test_planned_against_uniform(values, verdict):
    results = _results(planned_vs_uniform.CLAIM, values)
    finding = planned_vs_uniform.judge(results)
    assert finding.verdict == verdict
    assert len(finding.table.rows) == 2 * 6
    assert_drawn(planned_vs_uniform.figure, results)


@pytest.mark.parametrize(
    ("gain", "flops", "verdict"),
    [(0.5, 3.0, "holds"), (-0.5, 3.0, "does not hold"), (0.1, 4.0, "holds in part")],
)
def test_planned_classification(gain, flops, verdict):
    claim = planned_vs_uniform.CLASSIFICATION
    results = _results(claim, _planned(gain, flops, planned_vs_uniform.CLASSES))
    assert claim.judge(results).verdict == verdict
    assert_drawn(claim.figure, results)


@pytest.mark.parametrize(
    ("last", "first", "wobble", "verdict"),
    [
        (-0.1, 0.1, 0.001, "holds"),
        (0.1, -0.1, 0.001, "does not hold"),  # what the wider first layer does decides nothing
        (-0.01, -0.1, 0.001, "does not hold"),  # for certain, but by less than 0.5% of the loss
        (-0.1, 0.1, 0.5, "cannot be tested here"),
    ],
)
def test_two_layers(last, first, wobble, verdict):
    """A wider last layer against the best uniform plan, which lies 0.05 below the other."""
    below = {"2 × 16": 0.05, "4 × 8": 0.0, "wide last": last, "wide first": first}

    def values(trial):
        noise = (trial.seed - 1) * wobble * (trial.name == "wide last")
        loss = 4.0 + trial.seed / 10 + below[trial.name] + noise
        return {"loss": loss, "attn_params": 100, "flops": 7}

    results = _results(two_layers.CLAIM, values)
    finding = two_layers.judge(results)
    assert finding.verdict == verdict
    assert "4 × 8" in finding.measured
    assert_drawn(two_layers.figure, results)


def _solving(shares, claim=three_tokens.CLAIM, seeds=20):
    """Plans that solve the task at these shares of the seeds, the others at none."""

    def values(trial):
        p = trial.parameters
        share = shares.get((p["total"], p["plan"]), shares.get(p["plan"], 0.0))
        return {"accuracy": 1.0 if trial.seed < share * seeds else 0.5, "loss": 1.0}

    return _results(claim, values, seeds=range(seeds))


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ({"planned": 0.9}, "holds"),
        ({"planned": 0.9, "linear": 0.2}, "holds"),
        ({"planned": 0.9, "linear": 0.7}, "cannot be tested here"),  # one rival may be as good
        ({"planned": 1.0, "reversed": 1.0}, "does not hold"),
        ({"uniform 4 × 4": 0.5}, "does not hold"),
        ({}, "cannot be tested here"),  # nobody learned anything
    ],
)
def test_three_tokens(shares, verdict):
    results = _solving(shares)
    finding = three_tokens.judge(results)
    assert finding.verdict == verdict
    assert len(finding.table.rows) == len(results.names)
    assert json.dumps([finding.table.columns, finding.table.rows], allow_nan=False)
    assert three_tokens.figure(results).to_dict()


@pytest.mark.parametrize(
    ("shares", "chosen", "verdict"),
    [
        ({(32, "uniform 4 × 4"): 0.5}, 16, "holds"),
        ({(32, "uniform 4 × 4"): 0.25}, 32, "cannot be tested here"),  # nobody solves it
        ({"uniform 2 × 4": 1.0, "uniform 4 × 4": 1.0}, None, "does not hold"),
    ],
)
def test_the_total_width_is_the_widest_at_which_every_uniform_plan_fails(shares, chosen, verdict):
    results = _solving(shares, three_tokens.WIDTH, seeds=4)
    assert three_tokens.chosen_total(results) == chosen
    assert three_tokens.judge_width(results).verdict == verdict
    assert three_tokens.WIDTH.figure(results).to_dict()


@pytest.mark.parametrize("claim", [six_layers.CLAIM, six_layers.LANGUAGE])
@pytest.mark.parametrize(
    ("proxy", "shuffled", "wobble", "verdict"),
    [
        (-0.1, 0.1, 0.001, "holds"),
        (-0.1, -0.1, 0.001, "holds"),  # its order is reported and decides nothing
        (0.1, -0.1, 0.001, "does not hold"),
        (-0.01, 0.1, 0.001, "does not hold"),  # for certain, but by less than 0.5% of the loss
        (-0.1, 0.1, 0.5, "cannot be tested here"),
    ],
)
def test_six_layers(claim, proxy, shuffled, wobble, verdict):
    """Fitted widths against the best uniform plan, which lies 0.05 below the other."""
    below = {"uniform 2": 0.05, "uniform 4": 0.0, "proxy": proxy, "shuffled": shuffled}

    def values(trial):
        name = trial.parameters["plan"]
        noise = (trial.seed - 1) * wobble * (name == "proxy")
        loss = 4.0 + trial.seed / 10 + below.get(name, 0.2) + noise
        return {"loss": loss, "attn_params": 100, "flops": 7, "layers": [[4, 6, 10]]}

    results = _results(claim, values)
    finding = claim.judge(results)
    assert finding.verdict == verdict
    assert "uniform 4" in finding.measured
    matters = "yes" if shuffled - proxy > 0.15 and wobble < 0.1 else None
    assert matters is None or f"does their order matter: {matters}" in finding.reasons[2]
    assert claim.figure(results).to_dict()


def test_contrasts_of_an_unfinished_claim_are_those_of_the_seeds_that_both_have():
    losses = {"wide first": 4.4, "8 × 8": 4.0, "wide last": 3.8, "4 × 16": 3.9}
    made = []
    for trial in adaptive.CLAIM.trials("full", range(3)):
        p = trial.parameters
        if p["condition"] == "text, 256 tokens" and p["plan"] in losses:
            if trial.seed == 2 and p["plan"] == "wide first":
                continue
            loss = (
                losses[p["plan"]] + trial.seed / 100 + (p["plan"] == "wide last") * trial.seed / 50
            )
            made.append(TrialResult(trial, {"loss": loss}, 1.0))
    first, first_best, last, last_best = adaptive.contrasts(Results("full", tuple(made)))
    assert "wide first minus 8 × 8: +0.4 [" in first
    assert "above it at 2 of 2 seeds" in first
    assert "4 × 16" in first_best
    assert "above it at 0 of 3 seeds" in last
    assert "4 × 16" in last_best
    assert adaptive.contrasts(Results("full", ())) == ()


def test_one_seed_shows_nothing():
    for claim, values in (
        (planned_vs_uniform.CLAIM, _planned(0.5)),
        (adaptive.CLAIM, _adaptive({})),
    ):
        results = _results(claim, values, seeds=(0,))
        finding = claim.judge(results)
        assert finding.verdict == "cannot be tested here"
        assert json.dumps([finding.table.columns, finding.table.rows], allow_nan=False)
        assert_drawn(claim.figure, results)


def test_plans_are_chosen_by_the_other_seeds():
    # The last seed's own lowest is b; the others prefer a, and so it gets a.
    losses = {"a": [1.0, 1.0, 3.0], "b": [2.0, 2.0, 0.0]}
    assert chosen_plans(losses) == ["b", "b", "a"]
    assert chosen_plans({"a": [1.0], "b": [2.0]}) == ["a"]


def test_the_worth_of_adapting_by_hand():
    losses = {"a": [1.0, 1.1, 1.2], "b": [1.5, 1.7, 1.6]}
    there = Condition({"a": [5.0, 5.0, 5.0], "b": [4.0, 4.0, 4.0]})

    def found(**guesses):
        return adaptation(Condition(losses, **guesses), there)

    assert (found().other, found().own) == ([1.5, 1.7, 1.6], [1.0, 1.1, 1.2])
    assert found().share == pytest.approx(1.6 / 1.1 - 1)
    assert found(chance=5.0).share == pytest.approx(0.1)
    assert found().pays(1) == "yes"
    assert found(chance=5.0).pays(1) == "yes"
    assert found(chance=1e3).pays(1) == "no"  # both all but solve it
    assert found(chance=5.0, blind=1.1).pays(1) == "open"  # neither learned anything
    assert found(chance=5.0, blind=1.3).pays(1) == "yes"  # one did
    here = Condition(losses)
    assert adaptation(here, here).pays(1) == "no"


def test_the_regret_of_a_plan_is_where_it_is_furthest_above_the_best():
    found = regrets(
        {
            "text": Condition({"a": [2.0, 2.0], "b": [2.0, 2.2]}),
            "task": Condition({"a": [1.0, 3.0], "b": [0.5, 0.5]}, chance=5.0),
        }
    )
    assert (found["a"].condition, found["b"].condition) == ("task", "text")
    assert [found[p].share for p in "ab"] == pytest.approx([0.3, 0.05])


def _adaptive(best, gain=1.0, blind=7.0):
    """Each condition has a best plan, `gain` below the others."""

    def values(trial):
        p = trial.parameters
        mine = p["plan"] == best.get(p["condition"], "8 × 4")
        task = {} if p["data"]["kind"] == "text" else {"chance": blind, "blind": blind}
        loss = 5.0 + trial.seed / 10 + (0.0 if mine else gain * (1 + trial.seed / 100))
        return {"loss": loss, **task}

    return values


@pytest.mark.parametrize(
    ("best", "gain", "verdict"),
    [
        ({}, 1.0, "does not hold"),
        ({"4-gram": "2 × 16"}, 1.0, "holds in part"),
        ({"4-gram": "2 × 16", "text, 8 tokens": "wide first"}, 1.0, "holds"),
        ({"4-gram": "2 × 16", "text, 8 tokens": "wide first"}, 0.01, "does not hold"),
    ],
)
def test_adapting(best, gain, verdict):
    results = _results(adaptive.CLAIM, _adaptive(best, gain))
    finding = adaptive.judge(results)
    assert finding.verdict == verdict
    assert {row[0] for row in finding.table.rows} == {"length", "task"}
    assert_drawn(adaptive.figure, results)


def test_what_nobody_learned_says_nothing_about_adapting():
    best = {"4-gram": "2 × 16"}
    finding = adaptive.judge(_results(adaptive.CLAIM, _adaptive(best, blind=4.0)))
    assert "of the loss, in text, 32 tokens against the plan for 4-gram" in finding.measured
    paid = {(row[1], row[3]): row[-1] for row in finding.table.rows if row[0] == "task"}
    assert paid["4-gram", "classification"] == paid["classification", "4-gram"] == "open"
    assert paid["text, 32 tokens", "4-gram"] == "yes"
    assert any(reason.startswith("No plan learned 4-gram") for reason in finding.reasons)
    learned = adaptive.judge(_results(adaptive.CLAIM, _adaptive(best)))
    assert not any("No plan learned" in reason for reason in learned.reasons)
