"""The rules of the claims about what heads can hold, reach and fold, on made-up results."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from headwise.papers.claims.head_counts import jl_floor, low_rank_bottleneck, memorization
from headwise.papers.claims.query_free import folding
from tests.papers.figures import assert_drawn

ONE, THREE = (0,), (0, 1, 2)


def found(claim, results):
    """The finding, after a look at what every one must be: drawn, and all numbers finite."""
    finding = claim.judge(results)
    json.dumps(asdict(finding), allow_nan=False)
    assert_drawn(claim.figure, results)
    return finding


# --- low-rank bottleneck -----------------------------------------------------------------------

REACHED, MISSED = (1e-7, 0.0), (3e-4, 0.05)  # error and score gap; as measured at 32 tokens
LEARNED = {("fixed", 2): 0.8, ("fixed", 8): 0.95, ("standard", 2): 0.8, ("standard", 8): 0.3}


def approaches(wide=REACHED, narrow=MISSED, between=REACHED, proven=1e-6, accuracies=LEARNED):
    def values(trial):
        p = trial.parameters
        if p["part"] == "train":
            few_or_most = 8 if p["heads"] > 2 else 2
            accuracy = accuracies[p["rule"], few_or_most] + trial.seed / 1000
            return {"accuracy": accuracy, "loss": 1.0, "order_blind": 1 / 6}
        beyond = p["width"] - p["n"]
        error, gap = wide if beyond >= 0 else between if beyond == -1 else narrow
        return {
            "error": error * (1 + trial.seed / 9),
            "score_gap": gap,
            "proven": proven * (gap > 0),
        }

    return values


def bottleneck(made_up, size="quick", seeds=THREE, **changed):
    results = made_up(low_rank_bottleneck.CLAIM, approaches(**changed), size, seeds)
    finding = found(low_rank_bottleneck.CLAIM, results)
    (answers,) = [r for r in finding.reasons if r.startswith("Are the five parts")]
    return finding, answers.removeprefix("Are the five parts of the claim shown: ")


@pytest.mark.parametrize("size", ["quick", "full"])
def test_a_true_theorem_is_not_refuted_by_misses_that_are_small(size, made_up):
    finding, answers = bottleneck(made_up, size)
    assert (finding.verdict, answers) == ("holds in part", "yes 4, no 1, open 0.")
    assert "every pattern tried reached: yes" in finding.measured
    assert "every one missed: yes" in finding.measured
    assert "n − 1 is enough" in finding.reasons[0]


def test_all_as_the_paper_says(made_up):
    finding, answers = bottleneck(made_up, between=MISSED)
    assert (finding.verdict, answers) == ("holds", "yes 5, no 0, open 0.")
    assert "is enough" not in finding.reasons[0]


def test_nothing_as_the_paper_says(made_up):
    suffering = LEARNED | {("fixed", 8): 0.5, ("standard", 8): 0.9}
    finding, answers = bottleneck(made_up, wide=(0.1, 0.5), narrow=REACHED, accuracies=suffering)
    assert (finding.verdict, answers) == ("does not hold", "yes 0, no 5, open 0.")
    assert "every pattern tried reached: no" in finding.measured


def test_an_optimiser_that_stops_short_and_networks_that_learn_nothing_decide_nothing(made_up):
    guessing = dict.fromkeys(LEARNED, 0.16)
    finding, answers = bottleneck(
        made_up, wide=(1e-2, 0.0), between=(1e-2, 0.0), narrow=(0.1, 0.5), accuracies=guessing
    )
    assert (finding.verdict, answers) == ("cannot be tested here", "yes 0, no 0, open 5.")
    assert "not seen to learn" in finding.measured
    assert "not seen to learn" in " ".join(finding.reasons)


@pytest.mark.parametrize(
    "changed",
    [
        {"narrow": (9e-6, 0.05)},  # less than 100 times what wide heads leave
        {"narrow": (1e-2, 0.0)},  # seen, but not proven
        {"proven": 1e-2},  # nearer than the proof allows
    ],
)
def test_a_miss_must_be_both_proven_and_seen(made_up, changed):
    assert bottleneck(made_up, **changed)[1] == "yes 3, no 1, open 1."


def test_one_pattern_that_is_hardly_missed_leaves_the_question_open(made_up):
    usual = approaches()

    def values(trial):
        found = usual(trial)
        if trial.name == "reach, 6 tokens, width 4" and trial.seed == 2:
            found["error"] = 2e-6
        return found

    finding = low_rank_bottleneck.judge(made_up(low_rank_bottleneck.CLAIM, values))
    assert "every one missed: open" in finding.measured


def test_a_task_that_all_solve_shows_no_bottleneck(made_up):
    solved = dict.fromkeys(LEARNED, 0.995) | {("fixed", 2): 0.9975}
    finding, answers = bottleneck(made_up, accuracies=solved)
    assert answers == "yes 2, no 1, open 2."
    assert "d_model/heads (wrong more often: open, as all solve the task)" in finding.measured


def test_a_task_that_narrow_heads_do_not_solve_shows_one(made_up):
    learned = dict.fromkeys(LEARNED, 0.995) | {("standard", 8): 0.17}
    finding, answers = bottleneck(made_up, accuracies=learned)
    assert answers == "yes 4, no 1, open 0."
    assert "d_model/heads (wrong more often: yes)" in finding.measured


def test_one_seed_leaves_the_training_open(made_up):
    finding, answers = bottleneck(made_up, seeds=ONE)
    assert (finding.verdict, answers) == ("holds in part", "yes 2, no 1, open 2.")
    assert "open, a single seed separates nothing" in finding.measured


def test_training_within_the_spread(made_up):
    usual = approaches()

    def values(trial):
        found = usual(trial)
        if trial.parameters.get("rule") == "fixed" and trial.parameters["heads"] == 8:
            found["accuracy"] = (0.95, 0.2, 0.6)[trial.seed]
        return found

    finding = low_rank_bottleneck.judge(made_up(low_rank_bottleneck.CLAIM, values))
    assert "open, within the spread" in finding.measured
    assert finding.reasons[3].endswith("yes 2, no 1, open 2.")


# --- memorization ------------------------------------------------------------------------------


def held(by_heads=(60, 120, 180), gain=1.0, spread=1.0):
    """Examples held by 1, 2, 3 heads as wide as the context; a factor for a single wider head."""

    def values(trial):
        p = trial.parameters
        number = by_heads[p["heads"] - 1] * (gain if p["width"] > p["n"] else 1)
        wiggle = (0, 1, -1)[trial.seed] * (1 + p["width"] / 9) / p["heads"]
        total = number + spread * wiggle
        return {"memorized": total, "halfway": 0.98 * total, "examples": 320}

    return values


@pytest.mark.parametrize(
    ("measured", "verdict", "linear", "flat"),
    [
        (held(), "holds", "yes", "yes"),
        (held(gain=1.5), "holds in part", "yes", ("no", "open")),  # beyond what can be: training
        (held((180, 120, 60)), "holds in part", "no", "yes"),  # on a line, but downwards
        (held((180, 120, 60), gain=1.5), "cannot be tested here", "no", ("no", "open")),
        (held((60, 170, 180)), "holds in part", "no", "yes"),  # upwards, but not on a line
        (held(spread=90), "cannot be tested here", "open", "open"),
        (held(gain=1.2, spread=10), "holds in part", "yes", "open"),
        (held((315, 316, 317)), "cannot be tested here", "open", "open"),  # of 320
        (held((0, 0, 0), spread=0), "cannot be tested here", "open", "open"),
    ],
)
def test_memorization(measured, verdict, linear, flat, made_up):
    finding = found(memorization.CLAIM, made_up(memorization.CLAIM, measured))
    assert finding.verdict == verdict
    flats = (flat, flat) if isinstance(flat, str) else flat
    for words, gains in zip(("Own contexts", "One shared context"), flats, strict=True):
        (one,) = [r for r in finding.reasons if r.startswith(f"{words}, linear")]
        (other,) = [r for r in finding.reasons if r.startswith(f"{words}, no gain")]
        assert f": {linear};" in one
        assert f": {gains};" in other
    assert finding.reasons[-1].startswith("The second half of training added at most")


def test_memorization_says_why_it_is_open(made_up):
    def reasons(measured, seeds=THREE):
        return " ".join(
            memorization.judge(made_up(memorization.CLAIM, measured, seeds=seeds)).reasons
        )

    assert "within the spread" in reasons(held(spread=90))
    assert "run out of examples" in reasons(held((315, 316, 317)))
    assert "not seen to hold anything" in reasons(held((0, 0, 0), spread=0))
    assert "single seed" in reasons(held(), ONE)
    assert "single seed" not in reasons(held(spread=90))


def test_memorization_is_shown_beside_the_parameters(made_up):
    finding = memorization.judge(made_up(memorization.CLAIM, held(gain=1.0)))
    p = {"heads": 2, "width": 6, "d": 12, "labels": 8}
    layer = memorization.single_query_attention(12, 2, 6, 8, seed=0)
    assert memorization.n_parameters(p) == sum(w.numel() for w in layer.values()) == 528
    column = finding.table.columns.index("parameters")
    row = next(r for r in finding.table.rows if r[1:3] == (2, 6))
    assert row[column] == 528
    assert "Θ(H·d²)" in finding.reasons[-2]
    assert "528 each" in finding.reasons[-2]  # one head of width d = 12 has as many


def test_memorization_with_one_seed_cannot_be_tested(made_up):
    results = made_up(memorization.CLAIM, held(gain=1.5), seeds=ONE)
    assert found(memorization.CLAIM, results).verdict == "cannot be tested here"


# --- Johnson–Lindenstrauss ---------------------------------------------------------------------


def projected(distance=(0.5,) * 3, square=(0.9,) * 3):
    """The shares of ε that the maps use, by seed."""

    def values(trial):
        eps = (1, *sorted(jl_floor.EPS, reverse=True))
        return {
            "widths": [
                {
                    "width": width,
                    "distance": e * distance[trial.seed],
                    "square": e * square[trial.seed],
                    "inner": 0.5 + trial.seed / 10,
                    "inner_rms": 0.14,
                }
                for width, e in zip(trial.parameters["widths"], eps, strict=True)
            ]
        }

    return values


@pytest.mark.parametrize(
    ("measured", "seeds", "verdict", "why"),
    [
        (projected(), THREE, "holds", "keeps distances and squared distances"),
        (projected(), ONE, "holds", "keeps distances and squared distances"),
        (projected(square=(1.2,) * 3), THREE, "holds in part", "ε = 0.9 (3 of 3 maps)"),
        (projected(square=(1.2,) * 3), ONE, "holds in part", "ε = 0.3 (1 of 1 maps)"),
        (projected((0.5, 1.1, 0.5)), THREE, "holds in part", "some map keeps distances"),
        (projected((1.1, 1.1, 1.2)), THREE, "does not hold", "Distances leave 1 ± ε"),
        (projected((1.1, 1.1, 1.2)), ONE, "cannot be tested here", "refutes nothing"),
    ],
)
def test_the_floor_of_random_maps(measured, seeds, verdict, why, made_up):
    finding = found(jl_floor.CLAIM, made_up(jl_floor.CLAIM, measured, seeds=seeds))
    assert finding.verdict == verdict
    assert why in finding.reasons[0]


def test_the_popular_example_is_told_at_the_width_measured_with_the_largest_error(made_up):
    finding = jl_floor.judge(made_up(jl_floor.CLAIM, projected((0.5, 0.8, 0.5)), "full"))
    assert "at width 73, the first above 8·ln 8192" in finding.measured
    assert "off by up to 0.70" in finding.measured
    assert "a distance by up to 0.80" in " ".join(finding.reasons)


# --- folding -----------------------------------------------------------------------------------


def folds(**off):
    """Changes of the logits: rounding where folding is exact, 1 elsewhere, but for `off`."""

    def values(trial):
        says = folding.CASES[trial.parameters["case"]][1]
        change = dict.fromkeys(folding.WHICH, 1e-13 if says else 1.0)
        change |= {k: v for k, v in off.items() if says and k in change}
        if trial.parameters.get("norm"):
            change["query"] = off.get("norm", 1.0)
        return {**change, "redrawn": 0, "saved_attention": 0.25, "saved_block": 1 / 12}

    return values


@pytest.mark.parametrize("seeds", [ONE, THREE])
@pytest.mark.parametrize(
    ("measured", "verdict", "said"),
    [
        (
            folds(),
            "holds",
            "Keys and values fold as well in the three cases: largest change 1.0e-13",
        ),
        (folds(key=1e-5), "holds", "Keys and values do not fold exactly"),
        (folds(query=1e-5), "does not hold", "Keys and values fold as well"),
        (folds(norm=1e-5), "holds in part", "Changed by no more than 0.001 in some stack: norm"),
    ],
)
def test_folding(measured, verdict, said, seeds, made_up):
    finding = found(folding.FOLD_EXACT, made_up(folding.FOLD_EXACT, measured, seeds=seeds))
    assert finding.verdict == verdict
    assert said in " ".join(finding.reasons)
