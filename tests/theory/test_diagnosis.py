"""The failure signs: shown where planted, absent where not, untold without a measurement."""

import pytest

from headwise.errors import TheoryError
from headwise.plan import HeadSpec, LayerPlan, Plan
from headwise.planning.families import new_shape
from headwise.theory.advise import failure_signs

SHAPE = new_shape(n_layers=6, d_model=768, n_heads=8, head_dim=96, context=1024)
LATE, EARLY, UNIFORM, FLOOR = (
    "late layers over-provided",
    "early layers starved",
    "uniform against the measurement",
    "below a floor",
)


def plan(*widths):
    layers = (LayerPlan(heads=(HeadSpec(qk_dim=w, vo_dim=w),) * 8) for w in widths)
    shape = SHAPE.model_copy(update={"n_layers": len(widths)})
    return Plan(shape=shape, layers=tuple(layers))


def shown(*given, **how):
    return {sign.name: sign.shown for sign in failure_signs(*given, **how)}


def test_without_a_measurement_only_the_floor_can_be_told():
    found = shown(plan(*[64] * 6))
    assert found == {LATE: None, EARLY: None, UNIFORM: None, FLOOR: False}
    for sign in failure_signs(plan(*[64] * 6))[:3]:
        assert "headwise plan design" in sign.change


def test_each_sign_shows_where_it_is_planted_and_not_in_the_fit_itself():
    fitted = plan(96, 80, 64, 64, 48, 32)
    assert shown(fitted, fitted) == {LATE: False, EARLY: False, UNIFORM: False, FLOOR: True}
    assert shown(plan(*[64] * 6), fitted) == {LATE: True, EARLY: True, UNIFORM: True, FLOOR: False}
    assert shown(plan(*[64] * 6), plan(64, 64, 64, 64, 64, 60))[UNIFORM] is False
    starved = plan(64, 64, 80, 80, 48, 32)
    assert shown(starved, fitted) == {LATE: False, EARLY: True, UNIFORM: False, FLOOR: True}


def test_what_to_change_is_said_in_numbers():
    late, early, _, _ = failure_signs(plan(*[64] * 6), plan(96, 80, 64, 64, 48, 32))
    assert late.change.startswith("narrow layers 4–5 by 38%")
    assert early.change.startswith("widen layers 0–1 by 38%")
    floor = failure_signs(plan(*[16] * 6))[3]
    assert floor.shown
    assert "2 heads of 64 instead" in floor.change
    assert shown(plan(*[16] * 6), context=4)[FLOOR] is False


def test_a_fit_of_another_model_is_refused():
    with pytest.raises(TheoryError, match="fitted plan of 6 layers, got 2"):
        failure_signs(plan(*[64] * 6), plan(64, 64))
