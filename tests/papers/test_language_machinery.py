"""What the claims about language models stand on: rows, narrow heads, students, cuts, windows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from headwise.errors import HeadwiseError
from headwise.models.backbones_headwise import projections_of
from headwise.models.build import build_model, convert, plan_of, replaced_projections
from headwise.models.slicing import sliced
from headwise.papers.claims.allocation import (
    depth,
    later_layers,
    robustness,
    student_head,
    students,
)
from headwise.papers.claims.allocation.disturbed_models import PROSE
from headwise.papers.claims.allocation.saturation import measure_softmax
from headwise.papers.harness.claim import ReproduceError
from headwise.papers.tasks import training
from headwise.papers.tasks.cuts import (
    WAYS,
    cut_third,
    cut_to_plan,
    group_importance,
    head_projections,
    profile_windows,
    widened,
    without_groups,
)
from headwise.papers.tasks.pretrained import loss_from, random_passages, window_loss
from headwise.papers.tasks.training import HeldOutCurve, corpus, random_windows
from headwise.plan import Plan
from headwise.planning.design import new_shape
from headwise.planning.fit import Kept
from tests import lanes, tiny

LENGTH, GROUPS, QUERIES, WIDTH = 17, 3, 2, 10
VOCAB, LAYERS = tiny.VOCAB, tiny.LAYERS


@pytest.fixture(scope="module")
def model():
    stock = tiny.stock("llama", num_key_value_heads=GROUPS)
    return convert(stock).requires_grad_(False)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(5).integers(4, VOCAB, (6, LENGTH))


@pytest.fixture(scope="module")
def profile(model, ids):
    return profile_windows(model, ids)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_loss_asked_again_runs_only_what_follows(model, ids, layer):
    runs = []
    base = model.backbone.base_model
    hooks = [
        block.register_forward_hook(lambda *_, i=i: runs.append(i))
        for i, block in enumerate(base.layers)
    ]
    whole, again = loss_from(model, layer, ids)
    del runs[:]
    assert again() == pytest.approx(whole, rel=1e-6)
    assert sorted(set(runs)) == list(range(layer, LAYERS))
    for hook in hooks:
        hook.remove()
    output = model.attentions()[layer].o_proj.weight
    kept = output.clone()
    output.zero_()
    changed = again()
    assert changed == pytest.approx(window_loss(model, ids), rel=1e-6)
    assert abs(changed - whole) > 1e-3
    output.copy_(kept)
    assert window_loss(model, ids) == whole


def _logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(ids)).logits


def _norm(p):
    """The mean over rows of the Jacobian's norm, by its definition."""
    J = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return float(torch.linalg.eigvalsh(J)[:, -1].mean())


def test_rows_are_those_of_the_written_out_attention(model, ids):
    rows = measure_softmax(model, ids, (4, 8, 16))
    assert rows.jacobian_norm.shape == (LAYERS, 3, GROUPS * QUERIES)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        weights = model(input_ids=torch.from_numpy(ids), output_attentions=True).attentions
    finally:
        model.set_attn_implementation(implementation)
    for place, length in enumerate((4, 8, 16)):
        p = weights[1][:, 3, length - 1, :length].double()
        assert rows.jacobian_norm[1, place, 3] == pytest.approx(_norm(p), rel=1e-4)
        rest = p[:, 1:] / p[:, 1:].sum(-1, keepdim=True)
        assert rows.rest_norm[1, place, 3] == pytest.approx(_norm(rest), rel=1e-4)
        assert _norm(rest) != pytest.approx(_norm(p), rel=1e-3)
    assert not any("forward" in vars(a.classes[0]) for a in model.attentions())


def test_narrow_heads_in_the_dense_shape_are_the_sliced_model(model, ids):
    whole = Kept(planes=range(WIDTH // 2), free=(), vo=range(WIDTH))
    some = [Kept((0, 2), (), (0, 1, 2)), Kept((1, 2, 3, 4), (), (0,)), whole]
    kept = [some] * LAYERS
    narrow = sliced(model, kept)
    dense, plan = plan_of(model), plan_of(narrow)
    layers = {
        i: widened(dense.layers[i], plan.layers[i], projections_of(a))
        for i, a in enumerate(narrow.attentions())
    }
    before, expected = _logits(model, ids), _logits(narrow, ids)
    with replaced_projections(model, layers):
        assert torch.allclose(_logits(model, ids), expected, atol=1e-5)
    assert torch.equal(_logits(model, ids), before)
    assert not torch.allclose(before, expected, atol=1e-2)


def test_replaced_puts_back_after_an_error(model, ids):
    before = _logits(model, ids)
    heads = plan_of(model).layers[1]
    gone = without_groups(heads, {0, 1, 2}, projections_of(model.attentions()[1]))
    with replaced_projections(model, {1: gone}):
        assert not torch.equal(_logits(model, ids), before)

    def fails():
        with replaced_projections(model, {1: gone}):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fails()
    assert torch.equal(_logits(model, ids), before)


def _teachers(model, layer, ids):
    """Every query head of a layer on its own."""
    heads, attention = plan_of(model).layers[layer], model.attentions()[layer]
    shown = students.attention_inputs(model, layer, ids)
    whole = projections_of(attention)
    starts = [
        students.HeadStart(
            head.model_copy(update={"queries": 1}), head_projections(heads, j, query, whole)
        )
        for j, head in enumerate(heads.heads)
        for query in range(QUERIES)
    ]
    made = [students.StandaloneHead(s, attention, shown.rotations) for s in starts]
    return shown, [head.requires_grad_(False) for head in made]


@pytest.fixture(scope="module")
def unrotated():
    """A tiny model whose heads rotate nothing."""
    shape = new_shape(n_layers=2, d_model=20, n_heads=2, context=LENGTH, vocab_size=VOCAB)
    plan = student_head.unrotated(Plan.uniform(shape))
    return build_model(plan, seed=3, overrides={"initializer_range": 0.4}).requires_grad_(False)


def test_query_heads_add_up_to_their_layer_and_have_its_rows(model, ids):
    shown, teachers = _teachers(model, 1, ids)
    seen = []
    hook = model.attentions()[1].register_forward_hook(lambda m, a, out: seen.append(out[0]))
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        rows = model(input_ids=torch.from_numpy(ids), output_attentions=True).attentions[1]
    finally:
        hook.remove()
        model.set_attn_implementation(implementation)
    assert torch.allclose(sum(t.attend(shown.hidden)[0] for t in teachers), seen[0], atol=1e-5)
    for head, teacher in enumerate(teachers):
        assert torch.allclose(teacher(shown.hidden), rows[:, head], atol=1e-5)
    assert not torch.allclose(teachers[0](shown.hidden), rows[:, 1], atol=1e-2)


def _misplaced(start, teacher, shown):
    student = students.StandaloneHead(start, teacher.like[0], shown.rotations)
    found = students.row_errors(student.requires_grad_(False), teacher, shown, (LENGTH,))
    return found["misplaced"][0]


@pytest.mark.parametrize("kind", ["rotary", "unrotated"])
def test_a_student_of_full_width_is_its_teacher(model, unrotated, ids, kind):
    shown, teachers = _teachers(model, 2, ids) if kind == "rotary" else _plain(unrotated, ids)
    errors = [
        _misplaced(students.narrow_start(teachers[0], shown, w), teachers[0], shown)
        for w in (WIDTH, 8, 4, 2)
    ]
    assert errors[0] < 1e-5
    assert 1e-4 < errors[1] < errors[2] < errors[3] < 1


def _plain(unrotated, ids):
    heads, attention = plan_of(unrotated).layers[1], unrotated.attentions()[1]
    assert heads.heads[0].rotary_planes == ()
    shown = students.attention_inputs(unrotated, 1, ids)
    start = students.HeadStart(
        heads.heads[0], head_projections(heads, 0, 0, projections_of(attention))
    )
    return shown, [students.StandaloneHead(start, attention, shown.rotations).requires_grad_(False)]


def test_the_truncated_svd_is_that_of_the_product(unrotated, ids):
    shown, (teacher,) = _plain(unrotated, ids)
    given = teacher.start.projections
    product = given["query"].weight.T @ given["key"].weight
    made = students.narrow_start(teacher, shown, 4).projections
    sigma = torch.linalg.svdvals(product)
    left = torch.linalg.svdvals(product - made["query"].weight.T @ made["key"].weight)
    assert torch.allclose(left[:6], sigma[4:10], atol=1e-4)
    assert made["value"] is given["value"]


def test_no_row_errs_by_more_than_the_theory_allows(model, ids):
    shown, teachers = _teachers(model, 1, ids)
    p, q = teachers[0](shown.hidden), teachers[1](shown.hidden)
    found = students.compared_rows(p, q)
    for measured, bound in (("error", "bound"), ("misplaced", "misplaced_bound")):
        assert (found[measured] <= found[bound] + 1e-6).all()
        assert (found[measured] > 0.3 * found[bound]).any()  # a third of the bound would break
    row = (p[2, 7, :8].double(), q[2, 7, :8].double())
    moved = (row[1].log() - row[0].log()) - (row[1].log() - row[0].log()).mean()
    assert found["score_error"][2, 7] == pytest.approx(float(moved.norm()), rel=1e-4)
    assert found["misplaced"][2, 7] == pytest.approx(float((row[0] - row[1]).abs().sum() / 2))
    assert (students.compared_rows(p, p)["error"] == 0).all()


FIT = students.StudentFit((4,), 60, 8, (0.003, 0.1), 5, 40, 6)


@pytest.mark.slow
def test_fitting_helps_and_never_hurts(model):
    many = np.random.default_rng(11).integers(4, VOCAB, (64, LENGTH))
    shown, teachers = _teachers(model, 1, many)
    teacher = teachers[1]
    lessons = (
        students.AttentionInputs(shown.hidden[:56], shown.rotations),
        students.AttentionInputs(shown.hidden[56:], shown.rotations),
    )
    start = students.narrow_start(teacher, lessons[0], 4)
    begun = students.StandaloneHead(start, teacher.like[0], shown.rotations).requires_grad_(False)
    made, rate = students.fit_student(begun, teacher, lessons, FIT)
    wild, none = students.fit_student(
        begun, teacher, lessons, dataclasses.replace(FIT, steps=3, rates=(1e4,))
    )
    before = students.row_divergence(begun, teacher, lessons[1])
    assert students.row_divergence(made, teacher, lessons[1]) < before
    assert students.row_divergence(wild, teacher, lessons[1]) <= before
    assert rate in FIT.rates
    assert none == 0
    assert made.start.spec.qk_dim == 4
    assert made.start.spec.vo_dim == WIDTH
    assert torch.equal(made.attention.v_proj.weight, begun.attention.v_proj.weight)
    few = students.AttentionInputs(shown.hidden[:6], shown.rotations)
    floor = students.floor_errors(made, teacher, few, (LENGTH,), 40)[0]
    reached = students.row_errors(made, teacher, few, (LENGTH,))["misplaced"][0]
    assert floor < 0.9 * reached  # a window's own scores beat any weights for all windows
    held = students.floor_errors(made, teacher, few, (LENGTH,), 0)[0]
    assert held == pytest.approx(reached, rel=1e-3)  # from the student's own scores


def test_a_student_in_the_model_is_the_student_alone(model, ids):
    layer, place = LAYERS - 1, 2
    attention = model.attentions()[layer]
    shown, teachers = _teachers(model, layer, ids)
    teacher = teachers[place]
    one = students.StandaloneHead(
        students.narrow_start(teacher, shown, 4), attention, shown.rotations
    ).requires_grad_(False)
    others = sum(t.attend(shown.hidden)[0] for j, t in enumerate(teachers) if j != place)
    full, before = others + teacher.attend(shown.hidden)[0], _logits(model, ids)
    expected = {"student": others + one.attend(shown.hidden)[0], "nothing": others}
    for name, new in {"student": one, "nothing": None}.items():
        seen = []
        with students.replaced_head(attention, teacher, new):
            hook = attention.register_forward_hook(lambda m, a, out, seen=seen: seen.append(out[0]))
            _logits(model, ids)
            shorter = _logits(model, ids[:, :-1])
        hook.remove()
        assert torch.allclose(seen[0], expected[name], atol=1e-5)
        assert not torch.allclose(seen[0], full, atol=1e-2)
        assert torch.allclose(seen[1], expected[name][:, :-1], atol=1e-5)
        assert shorter.shape[1] == LENGTH - 1
    assert torch.equal(_logits(model, ids), before)


def test_cuts_of_a_third_have_equal_parameters(model, profile):
    per_group = 42 * WIDTH * (2 + 2 * QUERIES)
    for kept in (1, 2):
        cuts = {way: cut_third(model, profile, range(1, 3), way, kept) for way in WAYS}
        assert set(cuts["width"].layers) == set(cuts["heads"].layers) == {1, 2}
        assert cuts["heads"].removed == 2 * (GROUPS - kept) * per_group
        # Widths are whole numbers: never less is cut, and at most one dimension per head more.
        over = cuts["width"].removed - cuts["heads"].removed
        assert 0 <= over < 2 * GROUPS * 42 * (1 + QUERIES)


def test_the_least_important_head_group_goes(model, profile, ids):
    importance = group_importance(profile, 0)
    cut = cut_third(model, profile, range(1), "heads", 2)
    columns = cut.layers[0]["output"].weight.unflatten(1, (GROUPS, -1)).abs().sum((0, 2))
    assert (columns == 0).tolist() == [j == importance.argmin() for j in range(GROUPS)]
    # The gate's gradient, by a small change of the gate itself.
    change, losses = 1e-2, []
    columns = slice(QUERIES * WIDTH, 2 * QUERIES * WIDTH)  # of head group 1
    for factor in (1 - change, 1 + change):
        weights = projections_of(model.attentions()[0]).map(torch.clone)
        weights["output"].weight[:, columns] *= factor
        with replaced_projections(model, {0: weights}):
            losses.append([window_loss(model, row[None]) for row in ids])
    slopes = np.subtract(losses[1], losses[0]) / (2 * change) * np.sqrt(LENGTH - 1)
    assert importance[1] == pytest.approx(np.abs(slopes).mean(), rel=0.03)


def test_a_plan_that_cuts_nothing_changes_nothing(model, profile):
    assert cut_to_plan(model, profile, profile.plan) == {}


def test_the_shares_of_heads_are_their_outputs_and_gates(model, ids):
    found = depth.head_shares(model, ids[:2])
    assert found["output"].shape == found["loss"].shape == (LAYERS, GROUPS * QUERIES)
    shown, teachers = _teachers(model, 1, ids[:2, :-1])
    expected = [float(t.attend(shown.hidden)[0].square().mean()) for t in teachers]
    np.testing.assert_allclose(found["output"][1], expected, rtol=1e-4)
    # The gate's gradient, by a small change of the gate itself.
    change, losses = 1e-2, []
    columns = slice(2 * WIDTH, 3 * WIDTH)  # of query head 2
    for factor in (1 - change, 1 + change):
        weights = projections_of(model.attentions()[1]).map(torch.clone)
        weights["output"].weight[:, columns] *= factor
        with replaced_projections(model, {1: weights}):
            losses.append([window_loss(model, row[None]) for row in ids[:2]])
    slopes = np.subtract(losses[1], losses[0]) / (2 * change)
    assert found["loss"][1, 2] == pytest.approx(np.abs(slopes).mean(), rel=0.03)


class _Words:
    """A tokenizer of single characters."""

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) for c in text if c != " "]}


def test_passages_begin_at_lines_and_depend_on_the_seed():
    lines = "".join(f"{chr(65 + i % 26)}line\n" for i in range(300))
    some = (lines, "short", lines.lower())
    made = random_passages(_Words(), some, (5, 7), seed=1)
    assert made.shape == (5, 7)
    assert {int(x) for x in made[:, 1]} == {ord("l")}
    assert np.array_equal(made, random_passages(_Words(), some, (5, 7), seed=1))
    assert not np.array_equal(made, random_passages(_Words(), some, (5, 7), seed=2))
    with pytest.raises(HeadwiseError, match="longer text"):
        random_passages(_Words(), ("short",), (5, 7), seed=1)
    with pytest.raises(HeadwiseError, match="more words"):
        random_passages(_Words(), (" " * 999,), (5, 7), seed=1)


def test_random_windows_do_not_overlap():
    made = random_windows(np.arange(101), 7, 13, seed=2)
    assert made.shape == (13, 7)
    assert len(set(made.ravel().tolist())) == 13 * 7


def test_random_windows_are_as_many_as_asked_for_or_an_error():
    assert random_windows(np.arange(101), 7, 14, seed=2).shape == (14, 7)
    with pytest.raises(ReproduceError, match=r"15 windows of 7 tokens .* the text has 14"):
        random_windows(np.arange(101), 7, 15, seed=2)


@pytest.mark.parametrize("size", lanes.slow_but(("quick",), ("quick", "full")))
def test_robustness_has_windows_to_spare(size):
    p = robustness.TRAINED[size]
    text = corpus(p["characters"], p["vocab"])
    assert p["characters"] <= PROSE  # trained on documentation only
    assert len(text.held_out) >= 1.1 * p["scored"] * (p["context"] + 1)
    assert len(text.train) >= 1.1 * p["windows"] * p["context"]
    assert p["attacked"] <= p["scored"]


def test_a_model_that_diverged_is_not_scored(monkeypatch):
    monkeypatch.setattr(training, "train_on_text", lambda *_: HeldOutCurve((), (), diverged=True))
    kinds = {t.name: t for t in robustness.trials("quick", (0,))}
    trained = {t.name: t for t in later_layers.trials("full", (0,))}
    with pytest.raises(ReproduceError, match="finite"):
        robustness.run(kinds["planned"])
    with pytest.raises(ReproduceError, match="finite"):
        later_layers.run(trained["six layers"])
