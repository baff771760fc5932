"""The field's recipes: the identity at the full budget, counted right, best in their own metric."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from headwise.baselines.comparison import RIVALS
from headwise.baselines.measured import measurements, missing_measures
from headwise.baselines.narrowing import clover, magnitude, uniform
from headwise.baselines.parts import Subject, groups_of, joined
from headwise.baselines.pruning import head_pruning, head_scores, kept_heads, layer_params
from headwise.baselines.svd_llm import svd_llm, truncated
from headwise.errors import BudgetError
from headwise.models.backbones_headwise import Projection, projections_of
from headwise.models.build import convert, load_projections, replaced_projections
from headwise.planning.cost import cost
from tests import lanes
from tests.baselines.ranks import rank
from tests.tolerances import FELT, IDENTITY, difference

NAMES = ["llama", "gpt2"]  # grouped with rotary positions; plain without, every bias


class Seen:
    """A tiny model as the recipes see it."""

    def __init__(self, dense) -> None:
        self.dense, self.model = dense, convert(dense.model)
        attentions = self.model.attentions()
        tied = any(hasattr(a, "q_norm") and a.norm_over == "all" for a in attentions)
        ids = torch.from_numpy(dense.profile.ids)
        found = measurements(self.model, ids, ("moments", "gates"), batch=4)
        own = tuple(projections_of(a).map(torch.clone) for a in attentions)
        self.subject = Subject(dense.profile, own, found, tied)
        self.plan = dense.profile.plan
        self.full = cost(self.plan).attn_params

    def outputs(self, layers) -> torch.Tensor:
        for attention, weights in zip(self.model.attentions(), layers, strict=True):
            load_projections(attention, weights)
        return self.dense.outputs(self.model)


def recounted(method: str, seen: Seen, layers) -> int:
    """Parameters that the folded form of these effective weights needs, by their ranks."""
    total = 0
    d = seen.plan.shape.d_model
    for plan, cut in zip(seen.plan.layers, layers, strict=True):
        if method == "svd-llm":
            total += sum(rank(p.weight) * sum(p.weight.shape) for _, p in cut.items())
            total += sum(p.bias.numel() for _, p in cut.items() if p.bias is not None)
            continue
        total += d * cut.has_bias("output")
        for group in groups_of(plan, cut):
            read = np.abs(group.output).max((1, 2)) > 0
            if method == "head-pruning":
                qk = rows = len(group.key)
                vo, queries = len(group.value), int(read.sum())
            else:
                queries = len(group.query)
                # A value bias that an output bias takes up adds no direction of its own.
                vo = rank(group.value[:, :-1] if cut.has_bias("output") else group.value)
                heads = [q.T @ group.key for q in group.query]
                qk = rows = rank(np.concatenate(heads))
            alive = int(queries > 0)
            total += d * (queries * qk + alive * qk + alive * vo + queries * vo)
            total += queries * rows * cut.has_bias("query") + alive * rows * cut.has_bias("key")
            total += alive * vo * cut.has_bias("value")
    return total


@pytest.mark.parametrize("method", RIVALS)
@pytest.mark.parametrize("name", lanes.slow_but((*NAMES,), (*NAMES, "qwen2", "gpt_neox")))
def test_the_full_budget_is_the_identity(seen, name, method):
    found = seen(name)
    cut = RIVALS[method](found.subject, found.full)
    assert cut.attn_params == found.full
    before, after = found.dense.outputs(found.dense.model), found.outputs(cut.layers)
    assert difference(after, before) <= IDENTITY


@pytest.mark.parametrize("method", RIVALS)
@pytest.mark.parametrize("name", NAMES)
def test_counted_parameters_are_those_of_the_ranks(seen, name, method):
    found = seen(name)
    amount = round(0.7 * found.full)
    cut = RIVALS[method](found.subject, amount)
    assert 0.6 * found.full < cut.attn_params <= amount
    assert recounted(method, found, cut.layers) == cut.attn_params
    # The recount can fail: the dense weights are larger.
    assert recounted(method, found, found.subject.dense) > amount
    before, after = found.outputs(found.subject.dense), found.outputs(cut.layers)
    assert difference(after, before) > FELT


@pytest.mark.slow
@pytest.mark.parametrize("method", RIVALS)
@pytest.mark.parametrize(
    "name", lanes.slow_but(("qwen2", "olmo2"), ("qwen2", "qwen3", "olmo2", "gpt_neox"))
)
def test_other_families_are_cut_within_the_budget(seen, name, method):
    found = seen(name)
    amount = round(0.8 * found.full)
    cut = RIVALS[method](found.subject, amount)
    assert 0.7 * found.full < cut.attn_params <= amount
    assert torch.isfinite(found.outputs(cut.layers)).all()
    whole = found.subject.qk_whole
    assert whole == (name in ("qwen3", "olmo2"))  # their queries and keys are normed
    if whole and method not in ("svd-llm", "head-pruning"):
        for one, other in zip(cut.layers, found.subject.dense, strict=True):
            assert torch.equal(one["query"].weight, other["query"].weight)
            assert torch.equal(one["key"].weight, other["key"].weight)


@pytest.mark.parametrize("method", RIVALS)
def test_a_budget_that_cannot_be_reached_is_an_error(seen, method):
    with pytest.raises(BudgetError):
        RIVALS[method](seen("gpt2").subject, 7)


def test_moments_and_gates_are_those_of_the_model(seen):
    found = seen("llama")
    ids = torch.from_numpy(found.dense.profile.ids)
    inputs = []
    found.outputs(found.subject.dense)
    attention = found.model.attentions()[1]
    handle = attention.q_proj.register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    with torch.no_grad():
        found.model(input_ids=ids)
    handle.remove()
    x = inputs[0].flatten(0, 1).double()
    expected = (x.mT @ x / len(x)).numpy()
    assert found.subject.measured["1.input"] == pytest.approx(expected, rel=1e-4, abs=1e-6)

    def loss(gate: float) -> torch.Tensor:
        """The loss of every sequence, the fourth query head of layer 1 multiplied by `gate`."""
        layers = dict(enumerate(found.subject.dense))
        W_O = layers[1]["output"].weight.double().clone()
        W_O[:, 30:40] *= gate
        layers[1] = layers[1].replaced(output=Projection(W_O, layers[1]["output"].bias))
        model = copy.deepcopy(found.model).double()
        with replaced_projections(model, layers), torch.no_grad():
            logs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        return -logs.gather(-1, ids[:, 1:, None]).sum((1, 2))

    slope = (loss(1.001) - loss(0.999)) / 0.002
    assert found.subject.measured["1.gates"][:, 3] == pytest.approx(slope.numpy(), rel=1e-2)
    assert found.subject.measured["1.gates"][:, 2] != pytest.approx(slope.numpy(), rel=0.1)


def test_only_what_is_wanted_is_measured(seen):
    found = seen("gpt2")
    found.outputs(found.subject.dense)
    ids = torch.from_numpy(found.dense.profile.ids)
    moments = measurements(found.model, ids, ("moments",))
    assert set(moments) == {f"{i}.{n}" for i in range(3) for n in ("input", "mixed")}
    gates = measurements(found.model, ids, ("gates",), batch=2)
    assert set(gates) == {f"{i}.gates" for i in range(3)}
    assert gates["2.gates"] == pytest.approx(found.subject.measured["2.gates"], rel=1e-3, abs=1e-6)
    assert missing_measures(("moments", "gates"), moments) == ("gates",)
    assert missing_measures(("moments", "gates"), moments | gates) == ()


def test_svd_llm_is_the_best_of_its_rank_in_its_metric():
    rng = np.random.default_rng(3)
    W, X = rng.normal(size=(7, 11)), rng.normal(size=(500, 11)) * np.arange(1, 12)
    S = X.T @ X / len(X)

    def error(W_r):
        return np.square(X @ (W - W_r).T).sum() / len(X)

    best = error(truncated(W, S, 3))
    singular = np.linalg.svd(W @ np.linalg.cholesky(S), compute_uv=False)
    assert best == pytest.approx(np.square(singular[3:]).sum())
    for _ in range(200):
        left = rng.normal(size=(7, 3))
        # The best right factor for a random left one: nearer than two random factors.
        assert error(left @ np.linalg.pinv(left) @ W) > best
    U, s, Vt = np.linalg.svd(W)
    assert error(U[:, :3] * s[:3] @ Vt[:3]) > best  # unwhitened
    assert error(truncated(W, S, 7)) == pytest.approx(0, abs=1e-9)


def test_svd_llm_cuts_every_matrix_by_the_same_share(seen):
    found = seen("llama")
    cut = svd_llm(found.subject, round(0.6 * found.full))
    weights = [p.weight for layer in cut.layers for _, p in layer.items()]
    shares = {rank(w) * sum(w.shape) / w.numel() for w in weights}
    assert max(shares) <= 0.61
    assert max(shares) - min(shares) < 0.1  # whole ranks


def test_clover_truncates_the_products(seen):
    found = seen("llama")
    cut = clover(found.subject, round(0.7 * found.full))
    pairs = zip(found.subject.dense, cut.layers, found.plan.layers, strict=True)
    for dense, made, layer in pairs:
        for whole, narrow in zip(groups_of(layer, dense), groups_of(layer, made), strict=True):
            product = whole.stacked_output @ whole.value
            r = rank(narrow.value)
            assert r < len(whole.value)
            lost = np.linalg.norm(product - narrow.stacked_output @ narrow.value)
            tail = np.linalg.svd(product, compute_uv=False)[r:]
            assert lost == pytest.approx(np.linalg.norm(tail), rel=1e-4)


def test_clover_keeps_value_biases_where_the_output_has_one(seen):
    found = seen("gpt2")
    cut = clover(found.subject, round(0.7 * found.full))
    for before, after in zip(found.subject.dense, cut.layers, strict=True):
        assert torch.equal(before["value"].bias, after["value"].bias)
        assert torch.equal(before["output"].bias, after["output"].bias)


def test_rotary_planes_are_dropped_whole_and_the_weakest_first(seen):
    found = seen("llama")
    for method in (clover, magnitude, uniform):
        cut = method(found.subject, round(0.6 * found.full))
        dropped = 0
        for layer, weights in zip(found.plan.layers, cut.layers, strict=True):
            for group in groups_of(layer, weights):
                gone = np.abs(group.query).max((0, 2)) == 0
                assert (gone[:5] == gone[5:]).all()
                dropped += int(gone.sum())
        assert dropped
    cut = clover(found.subject, round(0.6 * found.full))
    for layer, dense, weights in zip(
        found.plan.layers, found.subject.dense, cut.layers, strict=True
    ):
        for whole, group in zip(groups_of(layer, dense), groups_of(layer, weights), strict=True):
            norms = np.square(whole.query).sum((0, 2)), np.square(whole.key).sum(1)
            q, k = (x[:5] + x[5:] for x in norms)
            gone = np.abs(group.query).max((0, 2))[:5] == 0
            assert np.sqrt(q * k)[gone].max() < np.sqrt(q * k)[~gone].min()


def test_magnitude_keeps_the_most_squared_weight(seen):
    """In one model all dimensions of a side cost alike: no dropped one outweighs a kept one."""
    found = seen("gpt2")
    cut = magnitude(found.subject, round(0.7 * found.full))
    kept, gone = [], []
    for layer, dense, weights in zip(
        found.plan.layers, found.subject.dense, cut.layers, strict=True
    ):
        for whole, group in zip(groups_of(layer, dense), groups_of(layer, weights), strict=True):
            mass = np.square(whole.value).sum(1) + np.square(whole.output).sum((0, 1))
            there = np.abs(group.value).max(1) > 0
            kept += list(mass[there])
            gone += list(mass[~there])
    assert gone
    assert max(gone) < min(kept)


def test_uniform_widths_are_uniform_and_whitened_directions_beat_clover(seen):
    found = seen("gpt2")
    amount = round(0.7 * found.full)
    cuts = [method(found.subject, amount) for method in (uniform, clover)]
    errors = []
    for cut in cuts:
        ranks = {
            rank(group.value[:, :-1])
            for layer, weights in zip(found.plan.layers, cut.layers, strict=True)
            for group in groups_of(layer, weights)
        }
        assert len(ranks) == 1
        layer, dense = found.plan.layers[0], found.subject.dense[0]
        groups = groups_of(layer, dense), groups_of(layer, cut.layers[0])
        C = found.dense.profile.get(0, "z_moment")
        mean = found.dense.profile.get(0, "z_mean")
        errors.append(0.0)
        for j, (whole, narrow) in enumerate(zip(*groups, strict=True)):
            # W_V' = P·W_V: what is lost of z around its mean, through W_O.
            P = narrow.value[:, :-1] @ np.linalg.pinv(whole.value[:, :-1])
            lost = whole.output[0] @ (np.eye(len(P)) - P)
            errors[-1] += np.trace(lost @ (C[j] - np.outer(mean[j], mean[j])) @ lost.T)
    assert errors[0] < errors[1]


def test_head_scores_are_normalised_in_their_layer():
    gates = np.array([[3.0, -8.0], [-3.0, 0.0]])
    assert head_scores(gates) == pytest.approx([0.6, 0.8])
    assert head_scores(np.zeros((2, 3))) == pytest.approx([0, 0, 0])


def test_the_lowest_heads_go_and_the_budget_is_filled(seen):
    found = seen("llama")
    rng = np.random.default_rng(11)
    scores = [rng.uniform(size=6) for _ in range(3)]
    amount = round(0.55 * found.full)
    alive = kept_heads(found.subject, scores, amount)
    counted = sum(layer_params(found.subject, i, a) for i, a in enumerate(alive))
    assert counted <= amount
    for i, h in itertools.product(range(3), range(6)):
        if not alive[i][h]:
            alive[i][h] = True
            more = sum(layer_params(found.subject, j, a) for j, a in enumerate(alive))
            alive[i][h] = False
            assert more > amount  # no head that is gone would still fit
    best = max((s, i, h) for i, row in enumerate(scores) for h, s in enumerate(row))
    assert alive[best[1]][best[2]]


def test_a_key_value_head_goes_with_its_last_query_head(seen):
    found = seen("llama")  # groups of 3 query heads, 10 wide, d_model 42, no biases
    whole = layer_params(found.subject, 0, np.ones(6, dtype=bool))
    assert whole == found.full // 3
    one = np.array([False, True, True, True, True, True])
    assert layer_params(found.subject, 0, one) == whole - 2 * 10 * 42
    group = np.array([False, False, False, True, True, True])
    assert layer_params(found.subject, 0, group) == whole // 2
    tied = replace(found.subject, tied_queries=True)
    assert layer_params(tied, 0, group) == whole // 2 + (3 + 1) * 10 * 42


def test_pruned_heads_are_the_ones_of_least_gradient(seen):
    found = seen("gpt2")
    measured = dict(found.subject.measured)
    for i in range(3):
        measured[f"{i}.gates"] = np.array([[5.0, 0.1 * (i == 1) + 2.0, 5.0]])
    subject = replace(found.subject, measured=measured)
    per_head = 4 * 11 * 33 + 3 * 11  # weights, and the query, key and value biases
    cut = head_pruning(subject, found.full - per_head)
    assert cut.attn_params == found.full - per_head
    changed = [
        [not np.array_equal(a.output, b.output) for a, b in zip(*pair, strict=True)]
        for pair in (
            (groups_of(layer, x), groups_of(layer, y))
            for layer, x, y in zip(found.plan.layers, subject.dense, cut.layers, strict=True)
        )
    ]
    assert changed == [[False, True, False], [False] * 3, [False] * 3]


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_layers_come_apart_and_together_unchanged(seen, name):
    found = seen(name)
    for layer, whole in zip(found.plan.layers, found.subject.dense, strict=True):
        one, other = whole.tensors(), joined(groups_of(layer, whole), whole).tensors()
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
