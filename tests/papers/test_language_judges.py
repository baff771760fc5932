"""The rules of the claims about language models, on made-up results: each can end either way."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from headwise.papers.claims.allocation import later_layers, robustness, student_head


def _clean(finding):
    return json.dumps(asdict(finding), allow_nan=False)


def _students(errors, late=None, wobble=0.02):
    """`errors` of the three methods (`late` in late layers); a little different at every seed."""

    def values(trial):
        mine = late if late and trial.parameters["depth"] == "late" else errors
        rows = [
            {
                "width": w, "method": m, "error": e * (1 + trial.seed * wobble), "rise": e / 10,
                "rate": 0.1 if m.startswith("random") else 0.01,
            }
            for w in trial.parameters["widths"]
            for m, e in zip(student_head.METHODS, mine, strict=True)
        ]  # fmt: skip
        return {"loss": 3.0, "removed": 0.2, "group": 0, "students": rows}

    return values


@pytest.mark.parametrize("size", ["quick", "full"])
@pytest.mark.parametrize(
    ("errors", "late", "verdict"),
    [
        ((0.4, 0.05, 0.3), None, "holds"),
        ((0.05, 0.05, 0.04), None, "holds"),  # neither tuning nor the start matters, it follows
        ((0.4, 0.05, 0.3), (0.4, 0.3, 0.5), "holds in part"),
        ((0.4, 0.3, 0.5), None, "does not hold"),  # better than both others, but not close
        ((0.4, 0.5, 0.3), None, "does not hold"),
    ],
)
def test_students(errors, late, verdict, size, made_up):
    results = made_up(student_head.CLAIM, _students(errors, late), size)
    finding = student_head.judge(results)
    assert finding.verdict == verdict
    assert "Open" not in finding.reasons[0]
    assert len(finding.table.rows) == 2 * 3 * len(student_head.WIDTHS[size])
    assert student_head.figure(results).to_dict()


def test_students_tell_what_helps(made_up):
    told = _students((0.4, 0.3, 0.5), late=(0.3, 0.3, 0.2))
    reasons = student_head.judge(made_up(student_head.CLAIM, told)).reasons
    first, early, late, rates, head, start = reasons
    assert "early: no; late: no." in first
    assert "does it help: yes" in early
    assert "SVD start better: yes" in early
    assert "does it help: no" in late
    assert "SVD start better: no" in late
    assert "best for 0 of 12 SVD starts and 12 of 12 random ones" in rates
    assert "one query head" in head
    assert "2 of them at width 4" in start


@pytest.mark.parametrize("errors", [(0.4, 0.05, 0.3), (0.4, 0.3, 0.5)])
def test_students_within_the_spread(errors, made_up):
    for results, why in (
        (made_up(student_head.CLAIM, _students(errors, wobble=2.0)), "the spread hides"),
        (made_up(student_head.CLAIM, _students(errors), seeds=(0,)), "one seed"),
    ):
        finding = student_head.judge(results)
        assert finding.verdict == "cannot be tested here"
        assert f"early: open; late: open. Open: {why}" in finding.reasons[0]
        assert "inf" not in _clean(finding)
        assert student_head.figure(results).to_dict()


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
    assert later_layers.figure(results).to_dict()


@pytest.mark.parametrize("rise", [CHEAP_LATE, CHEAP_EARLY])
def test_later_layers_with_one_seed(rise, made_up):
    results = made_up(later_layers.CLAIM, _cuts(rise), "full", seeds=(0,))
    finding = later_layers.judge(results)
    assert finding.verdict == "cannot be tested here"
    assert "10 of 10 questions are open: one seed" in finding.reasons[0]
    assert "inf" not in _clean(finding)
    assert later_layers.figure(results).to_dict()


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
    assert robustness.figure(results).to_dict()


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
    assert robustness.figure(results).to_dict()


@pytest.mark.parametrize(("ours", "verdict"), [(SAME, "holds"), (WEAKER, "holds in part")])
def test_full_size_has_the_pretrained_models(ours, verdict, made_up):
    results = made_up(robustness.CLAIM, _robust(ours, robustness.PAIRS[2][0]), "full")
    finding = robustness.judge(results)
    assert "Of 6 comparisons" in finding.measured
    assert finding.verdict == verdict
    assert robustness.figure(results).to_dict()
