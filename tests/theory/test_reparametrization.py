from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headwise.errors import TheoryError
from headwise.theory.reparametrization import (
    CONDITION_LIMIT,
    AttentionStack,
    StackLayer,
    StreamBases,
    _check_arrangement,
    _field,
    attention_scores,
    fold,
    forced_fold,
    logits,
    random_stack,
    rebased,
    saved_share,
)

# Folding in float64 loses about condition · 1e-16; measured below 2e-11 at the condition limit.
EQUAL = 1e-10
# A wrong basis moves the outputs by their own size; measured 0.16 and more.
DIFFERENT = 1e-2

FIELD = {"query": "W_Q", "key": "W_K", "value": "W_V"}
CASES: dict[str, dict[str, Any]] = {
    "single layer": {"skip": "both", "n_layers": 1},
    "skip around attention only": {"skip": "attention", "n_layers": 3},
    "shared weights": {"skip": "both", "n_layers": 3, "shared": True},
    "skip around the MLP only": {"skip": "mlp", "n_layers": 3},
    "no skip": {"skip": "none", "n_layers": 3},
}
FORBIDDEN: dict[str, dict[str, Any]] = {
    "norm, both skips, one layer": {"norm": "rms", "skip": "both", "n_layers": 1},
    "norm, both skips, layers": {"norm": "rms", "skip": "both", "n_layers": 3},
    "norm, both skips, shared": {"norm": "rms", "skip": "both", "n_layers": 3, "shared": True},
    "norm, skip around attention": {"norm": "rms", "skip": "attention", "n_layers": 3},
    "both skips, layers": {"skip": "both", "n_layers": 3},
}


def tokens(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 13, (5, 7))


def difference(a: AttentionStack, b: AttentionStack) -> float:
    first, second = logits(a, tokens()), logits(b, tokens())
    return float(np.abs(first - second).max() / np.abs(first).max())


def with_each(stack: AttentionStack, **weights: np.ndarray) -> AttentionStack:
    return replace(stack, layers=tuple(replace(layer, **weights) for layer in stack.layers))


def orthogonal(d: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))[0]


def with_condition(d: int, condition: float, seed: int) -> np.ndarray:
    left, right = orthogonal(d, seed), orthogonal(d, seed + 1)
    return np.asarray(left * np.geomspace(1, 1 / condition, d) @ right)


@pytest.mark.parametrize("causal", [True, False])
def test_the_stack_equals_loops_over_heads_and_tokens(causal: bool) -> None:
    stack = random_stack(3, d_model=6, heads=2, hidden=7, n_layers=1, causal=causal)
    layer, ids = stack.layers[0], np.array([4, 2, 11, 2, 0])
    X = stack.embedding[ids] + stack.positions[:5]
    out = np.zeros((5, 13))
    for t in range(5):
        z = np.zeros(6)
        for h in (slice(0, 3), slice(3, 6)):
            seen = range(t + 1) if causal else range(5)
            scores = [(X[t] @ layer.W_Q)[h] @ (X[j] @ layer.W_K)[h] / 3**0.5 for j in seen]
            p = np.exp(scores) / np.exp(scores).sum()
            z[h] = sum(w * (X[j] @ layer.W_V)[h] for w, j in zip(p, seen, strict=True))
        x = X[t] + z @ layer.W_O
        x = x + np.maximum(x @ layer.W_up, 0) @ layer.W_down
        out[t] = x @ stack.unembedding
    np.testing.assert_allclose(logits(stack, ids), out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("d_model", "heads", "causal"), [(15, 3, True), (15, 5, False), (17, 1, True), (22, 11, True)]
)
def test_folding_keeps_the_outputs(
    which: Any, case: str, d_model: int, heads: int, causal: bool
) -> None:
    stack = random_stack(11, d_model=d_model, heads=heads, hidden=29, causal=causal, **CASES[case])
    folded = fold(stack, which)
    for layer in folded.layers:
        np.testing.assert_array_equal(getattr(layer, FIELD[which]), np.eye(d_model))
    assert difference(stack, folded) < EQUAL


@pytest.mark.parametrize("case", CASES)
def test_folding_keeps_the_outputs_up_to_the_condition_limit(case: str) -> None:
    for seed in range(5):
        stack = with_each(
            random_stack(seed, **CASES[case]), W_Q=with_condition(15, 0.9 * CONDITION_LIMIT, seed)
        )
        assert difference(stack, fold(stack)) < EQUAL


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("case", FORBIDDEN)
def test_where_folding_is_refused_it_would_be_wrong(which: Any, case: str) -> None:
    stack = random_stack(11, **FORBIDDEN[case])
    reason = "normalisation" if "norm" in case else "both attention and MLP.*layers 0 and 1"
    with pytest.raises(TheoryError, match=reason):
        fold(stack, which)
    assert difference(stack, forced_fold(stack, which)) > DIFFERENT


@pytest.mark.parametrize("name", ["W_K", "W_O", "W_up", "W_down"])
def test_a_weight_left_out_of_the_fold_is_noticed(name: str) -> None:
    stack = random_stack(11, skip="attention")
    folded = fold(stack)
    last = replace(folded.layers[-1], **{name: getattr(stack.layers[-1], name)})
    broken = replace(folded, layers=(*folded.layers[:-1], last))
    assert difference(stack, broken) > DIFFERENT


def test_only_what_does_not_commute_stands_in_the_way() -> None:
    # A root-mean-square norm commutes with rotations, so a rotation may be folded through it.
    stack = random_stack(11, norm="rms", n_layers=3, shared=True)
    assert difference(stack, forced_fold(stack)) > DIFFERENT
    rotation = with_each(stack, W_Q=orthogonal(15, 5))
    assert difference(rotation, forced_fold(rotation)) < EQUAL


def test_both_skips_need_only_the_folded_weight_to_be_shared() -> None:
    stack = random_stack(11, skip="both", n_layers=3)
    shared = with_each(stack, W_Q=stack.layers[0].W_Q)
    assert difference(shared, fold(shared)) < EQUAL
    with pytest.raises(TheoryError, match="W_K"):
        fold(shared, "key")


@pytest.mark.parametrize("skip", ["both", "attention", "mlp", "none"])
def test_shared_weights_stay_shared(skip: Any) -> None:
    first, *others = fold(random_stack(11, skip=skip, n_layers=3, shared=True)).layers
    for other in others:
        for name in StackLayer.__slots__:
            np.testing.assert_array_equal(getattr(first, name), getattr(other, name))


def test_bases_must_agree_at_the_ends_of_a_skip() -> None:
    stack = random_stack(11, skip="attention", n_layers=2)
    a, b, c, d = (with_condition(15, 7.0, seed) for seed in range(4))
    assert difference(stack, rebased(stack, StreamBases((a, b, c), (a, b)))) < EQUAL
    assert difference(stack, rebased(stack, StreamBases((a, b, c), (d, b)))) > DIFFERENT
    with pytest.raises(TheoryError, match="3 bases at the entries and 2 in the middles"):
        rebased(stack, StreamBases((a, b), (a,)))


def test_a_fold_by_hand() -> None:
    W = {"W_Q": 2.0, "W_K": 3.0, "W_V": 5.0, "W_O": 7.0, "W_up": 11.0, "W_down": 13.0}
    layer = StackLayer(**{name: np.array([[value]]) for name, value in W.items()})
    one = np.array([[1.0]])
    folded = fold(AttentionStack(17 * one, 19 * one, (layer,), 23 * one, heads=1))
    new = {name: float(getattr(folded.layers[0], name)[0, 0]) for name in W}
    assert new == {"W_Q": 1, "W_K": 1.5, "W_V": 2.5, "W_O": 14, "W_up": 5.5, "W_down": 26}
    ends = (folded.embedding, folded.positions, folded.unembedding)
    assert [float(end[0, 0]) for end in ends] == [34, 38, 11.5]


def test_tied_embeddings_come_apart() -> None:
    stack = random_stack(11, skip="attention")
    tied = replace(stack, unembedding=stack.embedding.T)
    folded = fold(tied)
    assert difference(tied, folded) < EQUAL
    assert np.abs(folded.unembedding - folded.embedding.T).max() > DIFFERENT


def test_singular_and_ill_conditioned_weights_are_refused_with_their_condition() -> None:
    stack = random_stack(11, n_layers=1)
    with pytest.raises(TheoryError, match=r"up to 1e\+05, got 3\.0e\+07 in layer 0"):
        fold(with_each(stack, W_Q=with_condition(15, 3e7, 1)))
    with pytest.raises(TheoryError, match="condition number"):
        fold(with_each(stack, W_K=np.zeros((15, 15))), "key")
    with pytest.raises(TheoryError, match="nan or infinity"):
        fold(with_each(stack, W_V=np.full((15, 15), np.nan)), "value")


def test_a_projection_that_is_not_square_is_refused_but_another_may_go() -> None:
    stack = random_stack(11, n_layers=1)
    narrow = stack.layers[0].W_Q[:, :6]
    stack = with_each(stack, W_Q=narrow, W_K=stack.layers[0].W_K[:, :6])
    with pytest.raises(TheoryError, match="15 × 6 in layer 0"):
        fold(stack)
    assert difference(stack, fold(stack, "value")) < EQUAL


def test_saved_share_counts_weights() -> None:
    share = saved_share(random_stack(0, d_model=15, hidden=60))
    assert share.attention == pytest.approx(1 / 4)
    assert share.block == pytest.approx(1 / 12)  # d² of 4d² + 8d²
    # By hand, d=6, qk width 4, vo width 6, hidden 7: 24 of 24+24+36+36, and 84 more in the MLP.
    stack = random_stack(0, d_model=6, heads=2, hidden=7)
    W = stack.layers[0].W_Q[:, :4]
    narrow = saved_share(with_each(stack, W_Q=W, W_K=W))
    assert (narrow.attention, narrow.block) == pytest.approx((24 / 120, 24 / 204))


def test_bad_input_is_named() -> None:
    stack = random_stack(0)
    with pytest.raises(TheoryError, match=r"at most 11 tokens.*got 12"):
        logits(stack, np.zeros(12, dtype=int))
    with pytest.raises(TheoryError, match=r"divides the query width 15.*got 4"):
        replace(stack, heads=4)
    with pytest.raises(TheoryError, match="at least one layer"):
        replace(stack, layers=())
    with pytest.raises(TheoryError, match=r"W_Q of layer 0 to have shape \(15, 6\), got \(6, 6\)"):
        replace(stack, layers=random_stack(0, d_model=6).layers)
    with pytest.raises(
        TheoryError, match=r"query, key, value, got 'querry'; Did you mean 'query'\?"
    ):
        _field("querry")
    with pytest.raises(TheoryError, match="skip among both"):
        _check_arrangement("left", "none")


def test_logits_are_linear_in_the_weights_only_without_w_q():
    stack = random_stack(3)
    layer, d = stack.layers[0], stack.layers[0].W_K.shape[0]
    rng = np.random.default_rng(11)
    X, D_Q, D_K = rng.standard_normal((7, d)), *rng.standard_normal((2, d, d))

    def differences(along):
        scores = [attention_scores(along(t), X, stack.heads) for t in (-1.0, 0.0, 1.0, 2.0)]
        return [float(np.abs(np.diff(scores, n=n, axis=0)).max()) for n in (1, 2, 3)]

    first, second, third = differences(
        lambda t: replace(layer, W_Q=layer.W_Q + t * D_Q, W_K=layer.W_K + t * D_K)
    )
    assert second > 0.1 * first  # quadratic: the second difference stays
    assert third < 1e-12 * first  # and no more than that
    first, second, _ = differences(lambda t: replace(layer, W_Q=np.eye(d), W_K=layer.W_K + t * D_K))
    assert second < 1e-12 * first
