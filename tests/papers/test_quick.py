"""The claims at toy size, run once through the real command: what each must show, and controls.

Few steps of tiny models settle no claim about training, so a verdict alone would prove little. For
every claim there is a fact that its numbers must show at any size, and a planted change of these
numbers that must break it.
"""

import copy
import dataclasses
import json
import math

import pytest

from headwise.cli import main
from headwise.papers.claims import known_claims
from headwise.papers.claims.allocation.formulas import PAPER
from headwise.papers.claims.allocation.student_head import TUNED
from headwise.papers.claims.query_free import query_free, query_free_decay
from headwise.papers.harness.claim import Results, TrialResult
from headwise.papers.harness.judging import summary
from headwise.papers.harness.runner import judge_folder

pytestmark = pytest.mark.slow
# Exact statements, and those part of which is proven seed by seed.
NEEDS_NO_SPREAD = {
    "bound-curve",
    "allocation-256",
    "single-is-tied-multi",
    "jl-floor",
    "low-rank-bottleneck",
    "fold-exact",
    "relu-skip",
    "relu-skip-iff",
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


@pytest.fixture(scope="module")
def judged(quick):
    return {item.claim.id: item for item in judge_folder(quick, known_claims())[1]}


def test_every_claim_is_whole_and_ends_as_it_must(quick):
    document = json.loads((quick / "results.json").read_text())
    assert [claim["id"] for claim in document["claims"]] == list(known_claims())
    for claim in document["claims"]:
        assert claim["missing"] == 0, claim["failures"]
        allowed = known_claims()[claim["id"]].quick_verdicts
        assert not allowed or claim["verdict"] in allowed, claim["measured"]
        assert claim["verdict"] != "not finished"
        assert (quick / claim["figure"]).read_text().startswith("<svg")
        assert claim["table"]["rows"]


def test_every_claim_is_judged_and_drawn_by_a_single_seed(judged):
    for item in judged.values():
        one = Results("quick", tuple(r for r in item.results if r.trial.seed == 0))
        finding = item.claim.judge(one)
        assert json.dumps(dataclasses.asdict(finding), allow_nan=False)
        assert item.claim.figure(one).to_dict()
        if item.claim.id not in NEEDS_NO_SPREAD:
            assert finding.verdict == "cannot be tested here", item.claim.id


# --- facts -------------------------------------------------------------------------------------


def means(results, parameter, value="error"):
    return {k: summary(v).mean for k, v in results.by(parameter, value).items()}


def the_bound_is_the_papers(results):
    (curve,) = [c for c in results.items[0].values["curves"] if c["token_dim"] == 16]
    return curve["best_heads"] == 8 and all(
        round(curve["bound"][heads - 1], 3) == bound for heads, bound in PAPER.items()
    )


def the_allocation_is_the_papers(results):
    (found,) = [s for s in results.items[0].values["solutions"] if s["token_dim"] == 8]
    return found["groups"] == [[8, 8]] * 4


def fewer_heads_than_lags_cannot_do_four_grams(results):
    found = means(results, "heads")
    return 1 > found[1] > found[2] > found[4] > 5 * found[8]


def one_head_cannot_copy_two_vectors(results):
    vectors, tokens = (means(results.where(kind=k), "heads") for k in ("vectors", "tokens"))
    return vectors[1] > 100 * vectors[2] and max(tokens.values()) < 0.01 * math.log(16)


def heads_with_an_mlp_beat_affine_predictors(results):
    found, first = means(results, "heads"), results.items[0].values
    return found[8] < first["affine"] < found[1] < first["chance"]


def norms_are_those_of_a_softmax(results):
    norms = [x for r in results for layer in r.values["jacobian_norm"] for x in layer]
    return min(norms) > 0 and max(norms) <= 0.5  # diag p − p·pᵀ has no larger eigenvalue


def equal_scores_saturate_as_one_over_length(results):
    return all(abs(r.values["untrained_exponent"] + 1) < 0.1 for r in results)


def no_student_errs_by_more_than_the_bounds_nor_less_than_the_floor(results):
    for result in results:
        for head in result.values["heads"]:
            for row in head["students"]:
                pairs = [("error", "bound"), ("misplaced", "misplaced_bound")]
                if any(m > b + 1e-6 for x, y in pairs for m, b in zip(row[x], row[y], strict=True)):
                    return False
            fitted = [r for r in head["students"] if r["method"] == TUNED][-1]
            if not 0 < head["floor"][-1] < head["uniform"][-1] < 1 or min(fitted["error"]) < 0:
                return False
    return True


def wider_scores_learn_more_than_blind(results):
    for task in ("copy", "4-gram"):
        found = means(results.where(task=task, length=8), "width")
        if not 0 < found[8] < found[1] < 1:
            return False
    return True


def counts_are_those_of_heads(results):
    return all(
        1 <= x <= r.values["heads"] and 1 / x <= r.values[f"{way}_first"][i] * 1.0001
        for r in results
        for way in ("output", "loss")
        for i, x in enumerate(r.values[way])
    ) and all(min(r.values["output"]) < 8 for r in results)


def trained_heads_need_fewer_directions_than_random_ones(results):
    return all(
        summary(r.values["qk"]).mean < summary(r.values["random_qk"]).mean < r.values["width"]
        for r in results
    )


def equal_cuts_cost_loss_in_every_third(results):
    for result in results:
        cut = {(c["third"], c["way"]): c for c in result.values["cuts"]}
        for third in ("early", "middle", "late"):
            width, heads = cut[third, "width"], cut[third, "heads"]
            over = width["removed"] / heads["removed"] - 1
            if not (0 <= over < 0.02 and width["rise"] > 0 < heads["rise"]):
                return False
    return True


def plans_have_equal_parameters_and_learn(results):
    for setting in {r.trial.parameters["setting"] for r in results}:
        mine = results.where(setting=setting)
        of = {r.trial.parameters["policy"]: r.values for r in mine}
        dense = of.pop("dense")
        if len({(v["attn_params"], v["flops_per_step"]) for v in of.values()}) > 1:
            return False
        if of["uniform"]["attn_params"] != pytest.approx(0.75 * dense["attn_params"], rel=0.02):
            return False
        if any(r.values["losses"][-1] > 0.9 * r.values["losses"][0] for r in mine):
            return False
    return True


def plans_have_equal_costs(results):
    return len({(r.values["attn_params"], r.values["flops"]) for r in results}) == 1


def plans_of_a_total_have_equal_parameters(results):
    return all(
        len(set(results.where(total=total).by("plan", "attn_params").values())) == 1
        for total in {r.trial.parameters["total"] for r in results}
    )


def every_plan_learns_text_and_four_grams(results):
    kinds = {"text": 0.8 * math.log(300), "4-gram": 0.95}  # shares of the loss of a guess
    return all(
        r.values["loss"] < kinds[r.trial.parameters["data"]["kind"]]
        for r in results
        if r.trial.parameters["data"]["kind"] in kinds
    )


def more_noise_hurts_more_at_equal_parameters(results):
    params = {}
    for result in results:
        for model, values in result.values["models"].items():
            params[model] = values["params"]
            rises = [row["rise"] for row in values["disturbed"].values()]
            # A greedy swap that does not hurt is not made.
            if not (0 < rises[1] < rises[2] and rises[3] > 0):
                return False
    return all(params[m] == pytest.approx(params["uniform"], rel=0.02) for m in ("planned", "cut"))


def a_head_of_many_is_weak_alone(results):
    alone = means(results.where(fixed="total"), "heads", "alone")
    return alone[32] > alone[1] + 0.2


def patterns_are_reached_from_n_minus_one_on(results):
    return all(
        (r.values["error"] < 1e-3) == (r.trial.parameters["width"] >= r.trial.parameters["n"] - 1)
        for r in results.where(part="reach")
    )


def more_heads_memorize_more(results):
    held = means(results.where(kind="own", width=6), "heads", "memorized")
    return held[3] > 1.5 * held[1] > 0


def only_attention_shrinks_without_w_q(results):
    of = {r.trial.name: r.values for r in results}
    full, reduced, wider = (of[n] for n in (query_free.FULL, query_free.PAPER, query_free.WIDER))
    return (
        reduced["attn_params"] * 4 == full["attn_params"] * 3
        and wider["total_params"] == pytest.approx(full["total_params"], rel=0.01)
        and all(r.values["loss"] < r.values["frequency_loss"] for r in results)
    )


def stable_runs_end_below_token_frequencies(results):
    return all(
        r.values["stable"] == query_free_decay.stable(r.values)
        and r.values["loss"] < min(r.values["frequency_loss"], r.values["losses"][0])
        for r in results
    )


def verdict_is(name):
    """The judge's own verdict, where a claim is exact."""
    claim = known_claims()[name]
    return lambda results: claim.judge(results).verdict in claim.quick_verdicts


# --- changes that must break them --------------------------------------------------------------


def plant(value, new, **where):
    """A number put in the place of a measured one, in the trials with these parameters."""

    def change(trial, values):
        if all(trial.parameters.get(k) == v for k, v in where.items()):
            values[value] = new

    return change


def heads_that_all_do_everything(_, values):
    values["output"][0] = 9.5


def as_many_directions_as_there_are(_, values):
    values["qk"] = [64.0] * len(values["qk"])


def a_bound_that_is_broken(_, values):
    values["heads"][0]["students"][-1]["bound"][-1] = 1e-9


def a_cut_that_helps(_, values):
    values["cuts"][2]["rise"] = -0.1


def less_harm_from_more_noise(_, values):
    for model in values["models"].values():
        model["disturbed"]["noise 20%"]["rise"] = 0.0


def a_larger_norm_than_there_is(_, values):
    values["jacobian_norm"][0][0] = 0.7


def distances_that_leave_their_interval(_, values):
    values["widths"][-1]["distance"] = 0.5


def another_minimum(_, values):
    values["curves"][2]["best_heads"] = 7


def another_allocation(_, values):
    values["solutions"][2]["groups"] = [[4, 16]] * 4


FACTS = {
    "bound-curve": (the_bound_is_the_papers, another_minimum),
    "allocation-256": (the_allocation_is_the_papers, another_allocation),
    "four-gram": (fewer_heads_than_lags_cannot_do_four_grams, plant("error", 0.3, heads=8)),
    "induction": (one_head_cannot_copy_two_vectors, plant("error", 0.1, kind="vectors", heads=2)),
    "nonlinear": (heads_with_an_mlp_beat_affine_predictors, plant("error", 0.1, heads=8)),
    "saturation-length": (norms_are_those_of_a_softmax, a_larger_norm_than_there_is),
    "saturation-width": (
        equal_scores_saturate_as_one_over_length,
        plant("untrained_exponent", -0.5),
    ),
    "student-head": (
        no_student_errs_by_more_than_the_bounds_nor_less_than_the_floor,
        a_bound_that_is_broken,
    ),
    "width-returns": (wider_scores_learn_more_than_blind, plant("error", 1.1, width=8)),
    "head-dominance": (counts_are_those_of_heads, heads_that_all_do_everything),
    "head-spectra": (
        trained_heads_need_fewer_directions_than_random_ones,
        as_many_directions_as_there_are,
    ),
    "later-layers": (equal_cuts_cost_loss_in_every_third, a_cut_that_helps),
    "planned-vs-uniform": (
        plans_have_equal_parameters_and_learn,
        plant("flops_per_step", 1.0, policy="theory"),
    ),
    "planned-classification": (
        plans_have_equal_parameters_and_learn,
        plant("flops_per_step", 1.0, policy="theory"),
    ),
    "adaptive": (every_plan_learns_text_and_four_grams, plant("loss", 1.0, condition="4-gram")),
    "two-layers": (plans_have_equal_costs, plant("flops", 1, layers=[[4, 6], [4, 10]])),
    "three-tokens-width": (
        plans_of_a_total_have_equal_parameters,
        plant("attn_params", 1, plan="uniform 4 × 4"),
    ),
    "three-tokens": (
        plans_of_a_total_have_equal_parameters,
        plant("attn_params", 1, plan="linear"),
    ),
    "six-layers": (plans_have_equal_costs, plant("flops", 1, plan="shuffled")),
    "six-layers-language": (plans_have_equal_costs, plant("attn_params", 1, plan="proxy")),
    "robustness": (more_noise_hurts_more_at_equal_parameters, less_harm_from_more_noise),
    "single-is-tied-multi": (verdict_is("single-is-tied-multi"), plant("tied", 1e-6)),
    "ensemble": (a_head_of_many_is_weak_alone, plant("alone", 0.5)),
    "jl-floor": (verdict_is("jl-floor"), distances_that_leave_their_interval),
    "low-rank-bottleneck": (
        patterns_are_reached_from_n_minus_one_on,
        plant("error", 1e-7, part="reach"),
    ),
    "memorization": (more_heads_memorize_more, plant("memorized", 90.0)),
    "query-free": (only_attention_shrinks_without_w_q, plant("attn_params", 4096)),
    "query-free-decay": (stable_runs_end_below_token_frequencies, plant("loss", 3.5)),
    "fold-exact": (verdict_is("fold-exact"), plant("query", 1e-6, case="one layer")),
    "relu-skip": (verdict_is("relu-skip"), plant("absorbed", 1, kind="random")),
    "relu-skip-iff": (verdict_is("relu-skip-iff"), plant("absorbed", 0, kind="mirrored")),
}


def test_every_claim_has_a_fact():
    assert set(FACTS) == set(known_claims())


@pytest.mark.parametrize("name", FACTS)
def test_the_numbers_show_what_they_must_and_planted_ones_do_not(judged, name):
    fact, change = FACTS[name]
    results = judged[name].results
    assert fact(results)
    planted = []
    for result in results:
        values = copy.deepcopy(result.values)
        change(result.trial, values)
        planted.append(TrialResult(result.trial, values, result.seconds))
    assert not fact(Results("quick", tuple(planted)))
