"""The claims at toy size, run once through the real command, and the rules that judge them."""

import dataclasses
import json

import pytest
import torch

from headwise.cli import main
from headwise.reproduce import heads_curve, memorizing_layer
from headwise.reproduce.charting import Axes, Point, curves
from headwise.reproduce.claim import Results, Trial
from headwise.reproduce.registry import claims
from headwise.reproduce.runner import redraw
from headwise.reproduce.statistics import summary
from headwise.reproduce.student_trial import METHODS
from headwise.reproduce.worker import outcome

# Exact statements, and those part of which is proven seed by seed.
NEEDS_NO_SPREAD = {
    "bound-curve",
    "allocation-256",
    "single-is-tied-multi",
    "jl-floor",
    "low-rank-bottleneck",
    "fold-exact",
    "relu-skip",
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Everything at toy size, as a user runs it."""
    folder = tmp_path_factory.mktemp("reproduce") / "quick"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["headwise", "reproduce", "--quick", "-o", str(folder)])
        with pytest.raises(SystemExit) as end:
            main.main()
    assert not end.value.code
    return folder


def test_every_claim_ends_as_it_must_at_toy_size(quick):
    document = json.loads((quick / "results.json").read_text())
    assert [claim["id"] for claim in document["claims"]] == list(claims())
    for claim in document["claims"]:
        assert claim["missing"] == 0, claim["failures"]
        allowed = claims()[claim["id"]].quick_verdicts
        assert not allowed or claim["verdict"] in allowed, claim["measured"]
        assert claim["verdict"] != "not finished"
        assert (quick / claim["figure"]).read_text().startswith("<svg")
        assert claim["table"]["rows"]


def test_the_measured_numbers_that_must_hold_at_toy_size(quick):
    found = {item.claim.id: item.results for item in redraw(quick)}
    four = heads_curve.curve_of(found["four-gram"])
    means = {heads: summary(errors).mean for heads, errors in four.items()}
    # Fewer heads than lags cannot do it; 8 heads in total do, as in the paper's figure.
    assert means[1] > means[2] > 10 * means[8]
    copied = heads_curve.curve_of(found["induction"].where(kind="vectors"))
    assert summary(copied[1]).mean > 100 * summary(copied[2]).mean
    ensemble = found["ensemble"].where(fixed="total")
    alone = heads_curve.curve_of(ensemble, value="alone")
    assert summary(alone[32]).mean > summary(alone[1]).mean + 0.2
    for result in found["low-rank-bottleneck"].where(part="reach"):
        p = result.trial.parameters
        assert (result.values["error"] < 1e-3) == (p["width"] >= p["n"] - 1)


def test_what_the_trained_models_must_show_at_toy_size(quick):
    found = {item.claim.id: item.results for item in redraw(quick)}
    bent = heads_curve.curve_of(found["nonlinear"])
    assert summary(bent[8]).mean < summary(bent[1]).mean
    for result in found["saturation-width"]:  # equal scores before training: 1/L
        assert result.values["untrained_exponent"] == pytest.approx(-1, abs=0.1)
    own = found["memorization"].where(kind="own")
    held = {n: summary(own.numbers(n, "memorized")).mean for n in own.names}
    assert held["own, 3 heads of 6"] > 1.5 * held["own, 1 heads of 6"] > 0
    for result in found["robustness"]:
        for model in result.values["models"].values():
            rises = [row["rise"] for row in model["disturbed"].values()]
            assert 0 < rises[1] < rises[2], "more noise must hurt more"
            assert rises[3] > 0, "a greedy swap that does not hurt is not made"
    for result in found["student-head"]:
        rows = {(r["method"], r["width"]): r for r in result.values["students"]}
        for width in (16, 4):
            begun, fitted = (rows[m, width]["error"] for m in METHODS[:2])
            assert 0 < fitted < begun + 0.05 < 3, "a fit that gets worse is not taken"


def test_what_is_compared_has_equal_parameters(quick):
    found = {item.claim.id: item.results for item in redraw(quick)}
    planned = found["planned-vs-uniform"]
    for setting in {r.trial.parameters["setting"] for r in planned}:
        mine = planned.where(setting=setting)
        of = {r.trial.parameters["policy"]: r.values["attn_params"] for r in mine}
        assert len({v for policy, v in of.items() if policy != "dense"}) == 1
        assert of["uniform"] == pytest.approx(0.75 * of["dense"], rel=0.02)
    params = {
        model: values["params"]
        for r in found["robustness"]
        for model, values in r.values["models"].items()
    }
    assert params["planned"] == pytest.approx(params["uniform"], rel=0.02)
    assert params["cut"] == pytest.approx(params["uniform"], rel=0.02)
    free = {r.trial.name: r.values for r in found["query-free"]}
    full, reduced = free["full"], free["W_Q = I, the paper's scale and decay"]
    assert reduced["attn_params"] * 4 == full["attn_params"] * 3
    for result in (*found["query-free"], *found["query-free-decay"], *found["adaptive"]):
        assert 0 < result.values["loss"] < 10


def test_every_claim_is_judged_and_drawn_by_a_single_seed(quick):
    for item in redraw(quick):
        one = Results("quick", tuple(r for r in item.results if r.trial.seed == 0))
        finding = item.claim.judge(one)
        assert json.dumps(dataclasses.asdict(finding), allow_nan=False)
        assert item.claim.figure(one).to_dict()
        if item.claim.id not in NEEDS_NO_SPREAD:
            assert finding.verdict == "cannot be tested here", item.claim.id


def test_a_trial_is_a_pure_function_of_its_spec():
    for name in ("fold-exact", "low-rank-bottleneck", "memorization", "four-gram"):
        claim = claims()[name]
        trial = claim.trials("quick", [1])[0]
        first, again = (outcome((claim.run, trial)).values for _ in range(2))
        assert first == again
        assert first is not None


@pytest.mark.parametrize("size", ["quick", "full"])
def test_all_seeds_have_the_same_trials_and_every_trial_its_own_key(size):
    keys = set()
    count = 0
    for claim in claims().values():
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
    assert heads_curve.judged_curve(measured, 8, "in total").verdict == verdict


def test_the_better_reading_counts_and_tasks_must_agree():
    good, bad = (heads_curve.Judgement("in total", v, "") for v in ("holds", "does not hold"))
    assert heads_curve.finding([[bad, good]], (), None).verdict == "holds"
    assert heads_curve.finding([[good], [bad]], (), None).verdict == "holds in part"
    found = heads_curve.finding([[bad], [bad]], (), None)
    assert found.verdict == "does not hold"
    assert "in total: does not hold; in total: does not hold" in found.reasons[0]
    hidden = heads_curve.Judgement("in total", "cannot be tested here", "")
    assert heads_curve.finding([[bad, hidden]], (), None).verdict == "cannot be tested here"
    assert heads_curve.finding([[bad], [hidden]], (), None).verdict == "does not hold"


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
    claim = claims()["ensemble"]
    assert claim.judge(made_up(claim, _together(joint, alone))).verdict == verdict
    one = made_up(claim, _together(joint, alone), seeds=(0,))
    assert claim.judge(one).verdict == "cannot be tested here"


def broken(claim_id, change):
    """The finding of a claim when its measured values are changed."""
    claim = claims()[claim_id]
    items = []
    for trial in claim.trials("quick", [0, 1]):
        values = outcome((claim.run, trial)).values
        change(trial, values)
        items.append((trial, values))
    from headwise.reproduce.claim import Result

    return claim.judge(Results("quick", tuple(Result(t, v, 0.0) for t, v in items)))


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

    def untied(trial, values):
        values["tied"] = 1e-6

    assert broken("single-is-tied-multi", untied).verdict == "does not hold"

    def moved(trial, values):
        values["curves"][2]["best_heads"] = 7

    assert broken("bound-curve", moved).verdict == "does not hold"

    def stretched(trial, values):
        values["widths"][-1]["distance"] = 0.5

    assert broken("jl-floor", stretched).verdict == "does not hold"
    assert broken("jl-floor", lambda t, v: None).verdict == "holds in part"


# --- pieces ------------------------------------------------------------------------------------


def test_attention_of_a_single_query_is_attention_written_out():
    X = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = memorizing_layer.single_query_attention(5, 2, 7, 4, seed=3).double()
    z = []
    for h in range(2):
        q = X[:, -1:] @ model["W_Q"][h]
        scores = q @ (X[:, :-1] @ model["W_K"][h]).mT / 7**0.5
        z.append((scores.softmax(-1) @ (X[:, :-1] @ model["W_V"][h]))[:, 0])
    wanted = torch.cat(z, -1) @ model["W_O"]
    torch.testing.assert_close(memorizing_layer.answers(model, X), wanted)


def test_a_head_wider_than_one_shared_context_can_say_no_more():
    # A mixture of n fixed tokens: outputs of any width span at most n directions.
    task_tokens = torch.randn(1, 4, 9, dtype=torch.float64).expand(50, -1, -1)
    queries = torch.randn(50, 1, 9, dtype=torch.float64)
    model = memorizing_layer.single_query_attention(9, 1, 8, 8, seed=0).double()
    X = torch.cat([task_tokens, queries], 1)
    out = memorizing_layer.answers(model, X)
    assert torch.linalg.matrix_rank(out) == 4
    torch.testing.assert_close(memorizing_layer.answers(model, X, shared=True), out)
    own = torch.randn(50, 5, 9, dtype=torch.float64)
    assert torch.linalg.matrix_rank(memorizing_layer.answers(model, own)) == 8


@pytest.mark.parametrize("kind", ["own", "shared"])
def test_few_examples_are_memorized_and_most_of_many_are_not(kind):
    sizes = {"n": 4, "d": 8, "labels": 4, "batch": 8, "steps": 200}
    found = {}
    for examples in (8, 800):
        parameters = {"kind": kind, "heads": 1, "width": 4, "examples": examples, **sizes}
        trial = Trial("memorization", "one", 3, parameters, 1.0)
        found[examples] = memorizing_layer.memorized(trial)
    assert found[8]["memorized"] > 6
    assert 0 <= found[8]["halfway"] <= 8
    assert found[800]["memorized"] < 200


def test_gradient_of_the_divergence_against_differences():
    import numpy as np

    from headwise.reproduce.pattern_reach import divergence

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
    from headwise.reproduce.claim import Result

    results = Results("quick", tuple(Result(t, {"v": t.seed}, 0.0) for t in items))
    assert len(results.where(k="x").items) == 2
    assert results.where(k="x").numbers("a", "v") == (0.0, 1.0)
