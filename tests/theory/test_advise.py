"""The four views carry the right numbers, verdicts and reasons."""

from __future__ import annotations

import pytest

from headwise.errors import TheoryError
from headwise.theory.advise import Verdict, View, advise


def views(*configuration: int, eps: float = 0.5) -> dict[str, View]:
    return {view.name: view for view in advise(*configuration, eps=eps)}


def test_four_views_each_in_one_sentence() -> None:
    seen = advise(4096, 32, 128, 8192)
    assert [view.name for view in seen] == [
        "freedom",
        "ensemble",
        "johnson-lindenstrauss",
        "theory",
    ]
    for view in seen:
        assert view.numbers
        assert view.why.endswith(".")
        assert ". " not in view.why


def test_a_large_model_by_hand() -> None:
    seen = views(4096, 32, 128, 8192)
    assert {name: view.verdict for name, view in seen.items()} == {
        "freedom": "no threshold",
        "ensemble": "no threshold",
        "johnson-lindenstrauss": "below floor",
        "theory": "below floor",
    }
    geometry = seen["johnson-lindenstrauss"]
    assert dict(geometry.numbers)["jl_width"] == 289
    assert dict(geometry.numbers)["entropy_width"] == 76
    assert "289" in geometry.why
    assert "learned projection can do with less" in geometry.why
    theory = seen["theory"]
    assert dict(theory.numbers) == {
        "independent_tokens": 4096,
        "bottleneck_width": 4095,
        "bottleneck_width_published": 4096,
        "memorization_order": 4096,
    }
    assert "8192 tokens of width 4096 cannot be independent" in theory.why
    assert dict(seen["freedom"].numbers)["weights"] == 4 * 4096**2
    # One W_Q and W_K for all heads, and all of W_V and W_O.
    assert dict(seen["freedom"].numbers)["weights_if_tied"] == 2 * 4096 * 128 + 2 * 4096**2
    assert "one head, 128 wide in its scores and 4096 in its values" in seen["freedom"].why


def test_a_short_context_is_ok_on_both_floors() -> None:
    seen = views(512, 8, 64, 7)
    assert dict(seen["johnson-lindenstrauss"].numbers)["jl_width"] == 63
    assert seen["johnson-lindenstrauss"].verdict is Verdict.OK
    assert seen["theory"].verdict is Verdict.OK
    assert "wider heads leave it" in seen["theory"].why


@pytest.mark.parametrize(("width", "verdict"), [(29, "below floor"), (30, "ok"), (31, "ok")])
def test_the_bottleneck_turns_at_n_minus_1(width: int, verdict: str) -> None:
    assert views(64, 2, width, 31)["theory"].verdict == verdict


@pytest.mark.parametrize(
    ("configuration", "verdict"),
    [
        ((512, 8, 62, 7), "below floor"),  # the lemma asks for 63
        ((512, 8, 63, 7), "ok"),
        ((61, 1, 61, 7), "does not apply"),  # nothing is lost at d_model
        ((61, 1, 61, 8192), "below floor"),  # but the entropy estimate still asks for 76
    ],
)
def test_geometry_verdicts(configuration: tuple[int, ...], verdict: str) -> None:
    assert views(*configuration)["johnson-lindenstrauss"].verdict == verdict


def test_views_say_where_they_do_not_apply() -> None:
    seen = views(64, 1, 64, 8192)
    assert seen["freedom"].verdict is Verdict.DOES_NOT_APPLY
    assert seen["ensemble"].verdict is Verdict.DOES_NOT_APPLY
    assert seen["theory"].verdict is Verdict.DOES_NOT_APPLY


@pytest.mark.parametrize("place", range(4))
def test_a_configuration_below_one_is_refused_by_name(place: int) -> None:
    configuration = [64, 2, 32, 31]
    configuration[place] = 0
    name = ("d_model", "heads", "head_dim", "context")[place]
    with pytest.raises(TheoryError, match=f"{name} of at least 1, got 0"):
        advise(*configuration)


def test_eps_outside_the_lemma_is_refused() -> None:
    with pytest.raises(TheoryError, match="between 0 and 1"):
        advise(64, 2, 32, 31, eps=1)
