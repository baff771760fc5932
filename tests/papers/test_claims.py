"""The claims without a run: their trials, the rules that judge them, and their pieces."""

import math

import pytest
import torch

from headwise.papers.claims import known_claims
from headwise.papers.claims.allocation import eight_heads
from headwise.papers.claims.head_counts import memorization
from headwise.papers.harness.charts import Axes, Point, curves
from headwise.papers.harness.claim import Results, ResultTable, Trial, TrialResult
from headwise.papers.harness.judging import summary
from headwise.papers.harness.workers import run_trial
from tests.papers.figures import assert_drawn


@pytest.mark.slow
def test_a_trial_is_a_pure_function_of_its_spec():
    for name in ("fold-exact", "low-rank-bottleneck", "memorization", "four-gram"):
        claim = known_claims()[name]
        trial = claim.trials("quick", [1])[0]
        first, again = (run_trial((claim.run, trial)).values for _ in range(2))
        assert first == again
        assert first is not None


@pytest.mark.parametrize("size", ["quick", "full"])
def test_all_seeds_have_the_same_trials_and_every_trial_its_own_key(size):
    keys = set()
    count = 0
    for claim in known_claims().values():
        trials = claim.trials(size, (0, 1, 2))
        by_seed = {seed: [t.name for t in trials if t.seed == seed] for seed in (0, 1, 2)}
        assert by_seed[0]
        assert all(names in ([], by_seed[0]) for names in by_seed.values()), claim.id
        assert all(t.claim == claim.id for t in trials)
        keys |= {t.key(claim.version) for t in trials}
        count += len(trials)
    assert len(keys) == count


# --- the rules of judgement --------------------------------------------------------------------

SPREAD = (0.00, 0.01, -0.01)
EMPTY = ResultTable((), ())


def curve(**means):
    return {
        int(k[1:]): [m + s * (1 + i / 7) for s in SPREAD] for i, (k, m) in enumerate(means.items())
    }


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (curve(h1=3.0, h4=2.0, h8=1.0, h16=2.0), "holds"),
        (curve(h1=3.0, h4=1.001, h8=1.0, h16=2.0), "holds in part"),  # 4 within the spread
        (curve(h1=3.0, h4=1.0, h8=2.0, h16=2.5), "holds in part"),  # a valley elsewhere
        (curve(h1=1.0, h4=2.0, h8=3.0, h16=4.0), "does not hold"),
        (curve(h1=4.0, h4=3.0, h8=2.0, h16=1.0), "does not hold"),
        (curve(h1=1.0, h4=1.001, h8=1.002, h16=1.001), "does not hold"),  # flat: nothing to trade
        (curve(h1=3.0, h4=1.2, h8=1.0, h16=1.001), "does not hold"),  # more heads do as well
        ({1: [3.0], 4: [2.0], 8: [1.0], 16: [2.0]}, "cannot be tested here"),  # a single seed
        ({1: [3.0, 3.1, 3.0], 8: [1.0, 1.1, 1.0], 16: [1.1, 2.5, 4.0]}, "cannot be tested here"),
    ],
)
def test_lowest_at_eight(measured, verdict):
    assert eight_heads.judge_curve(measured, 8, "in total").verdict == verdict


def test_the_better_reading_counts_and_tasks_must_agree():
    good, bad = (eight_heads.Judgement("in total", v, "") for v in ("holds", "does not hold"))
    assert eight_heads.combine([[bad, good]], (), EMPTY).verdict == "holds"
    assert eight_heads.combine([[good], [bad]], (), EMPTY).verdict == "holds in part"
    found = eight_heads.combine([[bad], [bad]], (), EMPTY)
    assert found.verdict == "does not hold"
    assert "in total: does not hold; in total: does not hold" in found.reasons[0]
    hidden = eight_heads.Judgement("in total", "cannot be tested here", "")
    assert eight_heads.combine([[bad, hidden]], (), EMPTY).verdict == "cannot be tested here"
    assert eight_heads.combine([[bad], [hidden]], (), EMPTY).verdict == "does not hold"


def _errors(shape):
    """Errors by number of heads in total, with what else the judges of head counts read."""

    def values(trial):
        error = shape(trial.parameters["heads"]) * (1 + trial.seed / 50)
        return {"error": error, "chance": 1.0, "affine": 0.1, "pattern_floor": 0.0}

    return values


@pytest.mark.parametrize("name", ["four-gram", "induction", "nonlinear"])
@pytest.mark.parametrize(
    ("shape", "verdict"),
    [
        (lambda h: 1e-3 * (1 + abs(math.log2(h / 8))), "holds"),
        (lambda h: 1e-3 * h, "does not hold"),  # the fewer heads the better
        (lambda h: 1e-3, "does not hold"),  # nothing to trade
    ],
)
def test_claims_about_eight_heads_end_either_way(name, shape, verdict, made_up):
    claim = known_claims()[name]
    results = made_up(claim, _errors(shape))
    assert claim.judge(results).verdict == verdict
    assert_drawn(claim.figure, results)
    one = made_up(claim, _errors(lambda h: 1e-3 * (1 + abs(math.log2(h / 8)))), seeds=(0,))
    assert claim.judge(one).verdict == "cannot be tested here"


def _together(joint, alone):
    """An ensemble whose errors at fixed total width are these by number of heads."""

    def values(trial):
        heads, wobble = trial.parameters["heads"], 1 + trial.seed / 500
        at = {1: 0, 4: 1, 16: 2, 32: 3}[heads]
        return {"joint": joint[at] * wobble, "alone": alone[at] * wobble, "best": 0.0, "chance": 1}

    return values


@pytest.mark.parametrize(
    ("joint", "alone", "verdict"),
    [
        ((1.0, 0.1, 0.2, 0.4), (0.5, 0.8, 0.9, 1.0), "holds"),
        ((1.0, 0.4, 0.2, 0.1), (0.5, 0.8, 0.9, 1.0), "holds in part"),  # never too many
        ((1.0, 0.1, 0.2, 0.4), (0.5, 0.8, 0.8, 0.8), "holds in part"),  # too many, but none weaker
        ((0.1, 0.1, 0.1, 0.1), (0.8, 0.8, 0.8, 0.8), "does not hold"),
    ],
)
def test_ensembles(joint, alone, verdict, made_up):
    claim = known_claims()["ensemble"]
    assert claim.judge(made_up(claim, _together(joint, alone))).verdict == verdict
    one = made_up(claim, _together(joint, alone), seeds=(0,))
    assert claim.judge(one).verdict == "cannot be tested here"


def broken(claim_id, change):
    """The finding of a claim when its measured values are changed."""
    claim = known_claims()[claim_id]
    items = []
    for trial in claim.trials("quick", [0, 1]):
        values = run_trial((claim.run, trial)).values
        change(trial, values)
        items.append((trial, values))
    return claim.judge(Results("quick", tuple(TrialResult(t, v, 0.0) for t, v in items)))


@pytest.mark.slow
def test_exact_claims_fail_when_their_numbers_are_off():
    def off(trial, values):
        if trial.parameters.get("case") == "one layer":
            values["query"] = 1e-6

    assert broken("fold-exact", off).verdict == "does not hold"
    assert broken("fold-exact", lambda t, v: None).verdict == "holds"

    def lucky(trial, values):
        if trial.parameters["kind"] == "random":
            values["absorbed"] = 1

    assert broken("relu-skip", lucky).verdict == "does not hold"
    assert broken("relu-skip", lambda t, v: None).verdict == "holds"

    def blind(trial, values):
        values["sets"] = values["absorbed"] = 0

    assert broken("relu-skip", blind).verdict == "does not hold"  # a search that finds nothing

    def only_with_a_set(trial, values):
        if trial.parameters["kind"] == "mirrored":
            values["absorbed"] = 0

    def inexact(trial, values):
        values["worst"] = 1e-3

    assert broken("relu-skip-iff", lambda t, v: None).verdict == "holds in part"
    assert broken("relu-skip-iff", only_with_a_set).verdict == "holds"
    assert broken("relu-skip-iff", inexact).verdict == "does not hold"

    def untied(trial, values):
        values["tied"] = 1e-6

    assert broken("single-is-tied-multi", untied).verdict == "does not hold"

    def narrow_is_enough(trial, values):
        values["narrow"] = 1e-16

    assert broken("single-is-tied-multi", narrow_is_enough).verdict == "does not hold"
    assert broken("single-is-tied-multi", lambda t, v: None).verdict == "holds"

    def moved(trial, values):
        values["curves"][2]["best_heads"] = 7

    assert broken("bound-curve", moved).verdict == "does not hold"
    assert broken("bound-curve", lambda t, v: None).verdict == "holds"

    def fewer_heads(trial, values):
        (ours,) = [s for s in values["solutions"] if s["token_dim"] == 8]
        ours["groups"][-1] = [4, 16]

    assert broken("allocation-256", fewer_heads).verdict == "does not hold"
    assert broken("allocation-256", lambda t, v: None).verdict == "holds"

    def stretched(trial, values):
        values["widths"][-1]["distance"] = 0.5

    assert broken("jl-floor", stretched).verdict == "does not hold"
    assert broken("jl-floor", lambda t, v: None).verdict == "holds in part"


# --- pieces ------------------------------------------------------------------------------------


def test_attention_of_a_single_query_is_attention_written_out():
    X = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = memorization.single_query_attention(5, 2, 7, 4, seed=3).double()
    z = []
    for h in range(2):
        q = X[:, -1:] @ model["W_Q"][h]
        scores = q @ (X[:, :-1] @ model["W_K"][h]).mT / 7**0.5
        z.append((scores.softmax(-1) @ (X[:, :-1] @ model["W_V"][h]))[:, 0])
    wanted = torch.cat(z, -1) @ model["W_O"]
    torch.testing.assert_close(memorization.readouts(model, X), wanted)


def test_a_head_wider_than_one_shared_context_can_say_no_more():
    # A mixture of n fixed tokens: outputs of any width span at most n directions.
    task_tokens = torch.randn(1, 4, 9, dtype=torch.float64).expand(50, -1, -1)
    queries = torch.randn(50, 1, 9, dtype=torch.float64)
    model = memorization.single_query_attention(9, 1, 8, 8, seed=0).double()
    X = torch.cat([task_tokens, queries], 1)
    out = memorization.readouts(model, X)
    assert torch.linalg.matrix_rank(out) == 4
    torch.testing.assert_close(memorization.readouts(model, X, shared=True), out)
    own = torch.randn(50, 5, 9, dtype=torch.float64)
    assert torch.linalg.matrix_rank(memorization.readouts(model, own)) == 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "shared"])
def test_few_examples_are_memorized_and_most_of_many_are_not(kind):
    sizes = {"n": 4, "d": 8, "labels": 4, "batch": 8, "steps": 200}
    found = {}
    for examples in (8, 800):
        parameters = {"kind": kind, "heads": 1, "width": 4, "examples": examples, **sizes}
        trial = Trial("memorization", "one", 3, parameters, 1.0)
        found[examples] = memorization.train_and_count(trial)
    assert found[8]["memorized"] > 6
    assert 0 <= found[8]["halfway"] <= 8
    assert found[800]["memorized"] < 200


def test_gradient_of_the_divergence_against_differences():
    import numpy as np

    from headwise.papers.claims.head_counts.low_rank_bottleneck import divergence

    rng = np.random.default_rng(5)
    X, P = rng.standard_normal((4, 6)), rng.random((4, 4)) + 0.1
    P /= P.sum(-1, keepdims=True)
    weights = rng.standard_normal(2 * 6 * 3)
    value, gradient = divergence(weights, X, P, 3)
    assert value > 0
    for i in range(0, 36, 5):
        step = np.eye(36)[i] * 1e-6
        up, down = (divergence(weights + s, X, P, 3)[0] for s in (step, -step))
        assert (up - down) / 2e-6 == pytest.approx(gradient[i], abs=1e-8)


def test_a_logarithmic_figure_leaves_out_what_it_cannot_show():
    axes = Axes("t", "x", "y", log_y=True)
    points = [Point(1, summary([0.0]), "a"), Point(2, summary([1.0, 5.0]), "a")]
    (rows,) = curves(points, axes).to_dict()["datasets"].values()
    assert [row["x"] for row in rows] == [2]
    assert 0 < rows[0]["low"] < 3


def test_parameters_pick_trials():
    items = [Trial("toy", "a", s, {"k": k}) for s in (0, 1) for k in ("x", "y")]
    results = Results("quick", tuple(TrialResult(t, {"v": t.seed}, 0.0) for t in items))
    assert len(results.where(k="x").items) == 2
    assert results.where(k="x").numbers("a", "v") == (0.0, 1.0)
