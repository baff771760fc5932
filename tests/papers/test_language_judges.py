"""The rules of the claims about language models, on made-up results: each can end either way."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from headwise.papers.claims.allocation import later_layers, robustness, saturation, student_head
from tests.papers.figures import assert_drawn


def _clean(finding):
    return json.dumps(asdict(finding), allow_nan=False)


def _students(ends, *, floor=0.1, uniform=0.8, gap=0.5, wobble=0.02):
    """Made-up curves from `ends[teacher]`, at the length `from` and at the longest."""

    def values(trial):
        teacher, p = trial.parameters["teacher"], trial.parameters
        lengths = saturation.doubled(p.get("length", p.get("context")))
        first, last = ends[teacher]
        steps = len(lengths) - 1 - lengths.index(p["from"])
        slope = (last / first) ** (1 / steps)
        curve = [
            first * slope ** (i - lengths.index(p["from"])) * (1 + trial.seed * wobble)
            for i in range(len(lengths))
        ]
        names = ("misplaced", "misplaced_bound", "error", "bound", "score_error", "score_bound")
        rows = [
            {"width": w, "method": m, "rise": 0.01, "rate": 0.1, **dict.fromkeys(names, curve)}
            for w in p["widths"]
            for m in student_head.METHODS
        ]
        flat = {name: [x] * len(lengths) for name, x in (("floor", floor), ("uniform", uniform))}
        head = {"layer": 1, "loss": 3.0, "removed": 0.1, "students": rows, **flat}
        learned = {"trained_loss": 4.0, "pair_loss": 4.0 + gap} if "head" in p else {}
        return {"lengths": list(lengths), "heads": [head] * len(p["at"]), **learned}

    return values


BOTH = dict.fromkeys(student_head.TEACHERS, (0.15, 0.05))


@pytest.mark.parametrize("size", ["quick", "full"])
@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        (BOTH, "holds"),
        ({**BOTH, "SmolLM2": (0.3, 0.4)}, "holds in part"),  # neither follows nor gets better
        (dict.fromkeys(BOTH, (0.5, 0.3)), "holds in part"),  # better with length, still far off
        (dict.fromkeys(BOTH, (0.1, 0.15)), "holds in part"),  # follows, but worse with length
        (dict.fromkeys(BOTH, (0.3, 0.4)), "does not hold"),
    ],
)
def test_students(ends, verdict, size, made_up):
    results = made_up(student_head.CLAIM, _students(ends), size)
    finding = student_head.judge(results)
    assert finding.verdict == verdict
    assert not any("Open" in reason for reason in finding.reasons)
    assert len(finding.table.rows) == 2 * 2 * 2
    assert_drawn(student_head.figure, results)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"floor": 0.25}, "the floor is not below the mark"),
        ({"uniform": 0.15}, "without queries and keys is not above"),
        ({"wobble": 2.0}, "the spread hides the answer"),
    ],
)
def test_students_that_cannot_be_judged(change, why, made_up):
    finding = student_head.judge(
        made_up(student_head.CLAIM, _students(dict.fromkeys(BOTH, (0.3, 0.31)), **change))
    )
    assert finding.verdict == "cannot be tested here"
    assert why in finding.reasons[1]
    assert "inf" not in _clean(finding)


def test_a_teacher_that_learned_nothing_says_nothing(made_up):
    finding = student_head.judge(made_up(student_head.CLAIM, _students(BOTH, gap=0.05)))
    assert finding.verdict == "holds in part"  # the pretrained teacher still counts
    assert "more than pairs" in finding.reasons[1]
    assert "follow: yes; is it better with length: yes." in finding.reasons[4]


def test_one_seed_of_students_decides_nothing(made_up):
    finding = student_head.judge(made_up(student_head.CLAIM, _students(BOTH), seeds=(0,)))
    assert finding.verdict == "cannot be tested here"
    assert "one seed shows no spread" in finding.reasons[1]


def _cuts(rise, wobble=0.02):
    def values(trial):
        rows = [
            {
                "third": third,
                "kept": kept,
                "way": way,
                "removed": 7,
                "rise": rise[way] * factor * (1 + trial.seed * wobble),
            }
            for third, factor in zip(later_layers.THIRDS, rise["thirds"], strict=True)
            for kept in trial.parameters["groups_kept"]
            for way in ("width", "heads")
        ]
        return {"loss": 3.0, "groups": 3, "cuts": rows}

    return values


CHEAP_LATE = {"thirds": (3, 2, 1), "width": 0.1, "heads": 0.2}
CHEAP_EARLY = {"thirds": (1, 2, 3), "width": 0.2, "heads": 0.1}


@pytest.mark.parametrize("size", ["quick", "full"])
@pytest.mark.parametrize(
    ("rise", "verdict"),
    [
        (CHEAP_LATE, "holds"),
        ({**CHEAP_LATE, "thirds": (1, 2, 3)}, "holds in part"),
        ({**CHEAP_EARLY, "thirds": (3, 2, 1)}, "holds in part"),
        (CHEAP_EARLY, "does not hold"),
        ({"thirds": (1.05, 1, 1), "width": 0.1, "heads": 0.105}, "does not hold"),  # a trifle
    ],
)
def test_later_layers(rise, verdict, size, made_up):
    results = made_up(later_layers.CLAIM, _cuts(rise), size)
    finding = later_layers.judge(results)
    assert finding.verdict == verdict
    assert f"0 of {10 if size == 'full' else 2} questions are open." in finding.reasons[0]
    assert_drawn(later_layers.figure, results)


@pytest.mark.parametrize("rise", [CHEAP_LATE, CHEAP_EARLY])
def test_later_layers_with_one_seed(rise, made_up):
    results = made_up(later_layers.CLAIM, _cuts(rise), "full", seeds=(0,))
    finding = later_layers.judge(results)
    assert finding.verdict == "cannot be tested here"
    assert "10 of 10 questions are open: one seed" in finding.reasons[0]
    assert "inf" not in _clean(finding)
    assert_drawn(later_layers.figure, results)


def test_later_layers_count_what_the_spread_hides(made_up):
    def values(trial):
        # Only the pretrained model's early width cuts scatter: four of the ten questions.
        made = _cuts(CHEAP_EARLY)(trial)
        for row in made["cuts"]:
            if (trial.name, row["third"], row["way"]) == ("pretrained", "early", "width"):
                row["rise"] = (0.0, 0.0, 2.4)[trial.seed]
        return made

    finding = later_layers.judge(made_up(later_layers.CLAIM, values, "full"))
    assert "4 of 10 questions are open: the spread hides" in finding.reasons[0]
    assert " ".join(finding.reasons).count("(within the spread)") == 4
    assert "cheaper than early ones by more than the spread in 0 (open: 2)" in finding.measured
    assert finding.verdict == "cannot be tested here"


def _robust(ours, one="planned", wobble=0.02):
    """Every model at a clean loss of 2 and rises of 1; `ours` are those of one model."""

    def values(trial):
        kinds = {
            "dense and cut": ("dense", "cut"),
            "pretrained": ("pretrained", *robustness.PAIRS[2]),
        }
        found = {}
        for model in kinds.get(trial.name, (trial.name,)):
            clean, noise, swaps = ours if model == one else (2.0, 1.0, 1.0)
            spread = 1 + wobble * trial.seed * (2 if model == one else 1)
            both = {
                name: {"rise": rise * spread, "loss": clean + rise * spread}
                for name, rise in {"noise": noise, "swaps": swaps}.items()
            }
            found[model] = {"clean": clean, "params": 5, "disturbed": both}
        return {"models": found}

    return values


SAME, WEAKER = (2.0, 1.0, 1.0), (2.0, 1.5, 1.5)


@pytest.mark.parametrize(
    ("ours", "outcome"),
    [
        (SAME, "as robust"),
        ((1.0, 1.0, 1.0), "as robust"),
        (WEAKER, "weaker"),
        ((1.0, 1.5, 1.5), "mixed"),  # rises more, but ends lower: it was better before
        ((3.0, 0.5, 0.5), "mixed"),  # rises less, but ends higher: it had less to lose
    ],
)
def test_robustness_asks_for_the_rise_and_for_the_loss(ours, outcome, made_up):
    results = made_up(robustness.CLAIM, _robust(ours))
    finding = robustness.judge(results)
    rows = [row for row in finding.table.rows if row[0] == "planned"]
    assert [row[-1] for row in rows] == [outcome] * 2
    assert rows[0][-2].startswith(f"{ours[0] + ours[1] * 1.04:.4g}")  # the disturbed loss
    assert finding.verdict == ("holds" if outcome == "as robust" else "holds in part")
    assert_drawn(robustness.figure, results)


def _both(made_up, planned, cut, **kwargs):
    """Both compared models made up."""

    def values(trial):
        one = planned if trial.name == "planned" else cut
        return _robust(one, "planned" if trial.name == "planned" else "cut", **kwargs)(trial)

    return made_up(robustness.CLAIM, values)


@pytest.mark.parametrize(
    ("planned", "cut", "verdict"),
    [
        (WEAKER, WEAKER, "does not hold"),
        (WEAKER, (2.0, 1.5, 1.0), "does not hold"),  # three of four
        (WEAKER, SAME, "holds in part"),  # two of four
        (WEAKER, (1.0, 1.5, 1.5), "holds in part"),  # two of four, and two end no higher
        ((3.0, 0.5, 0.5), (1.0, 1.5, 1.5), "holds in part"),  # the measures disagree
    ],
)
def test_robustness_verdicts(planned, cut, verdict, made_up):
    assert robustness.judge(_both(made_up, planned, cut)).verdict == verdict


def test_robustness_within_the_spread(made_up):
    finding = robustness.judge(_both(made_up, WEAKER, WEAKER, wobble=2.0))
    assert finding.verdict == "cannot be tested here"
    assert "4 within the spread" in finding.measured


@pytest.mark.parametrize("ours", [SAME, WEAKER])
def test_robustness_with_one_seed_cannot_be_tested(ours, made_up):
    results = made_up(robustness.CLAIM, _robust(ours), seeds=(0,))
    finding = robustness.judge(results)
    assert finding.verdict == "cannot be tested here"
    assert finding.reasons[-1] == robustness.ONE_SEED
    assert "inf" not in _clean(finding)
    assert_drawn(robustness.figure, results)


@pytest.mark.parametrize(("ours", "verdict"), [(SAME, "holds"), (WEAKER, "holds in part")])
def test_full_size_has_the_pretrained_models(ours, verdict, made_up):
    results = made_up(robustness.CLAIM, _robust(ours, robustness.PAIRS[2][0]), "full")
    finding = robustness.judge(results)
    assert "Of 6 comparisons" in finding.measured
    assert finding.verdict == verdict
    assert_drawn(robustness.figure, results)
