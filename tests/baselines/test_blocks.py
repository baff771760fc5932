"""The recipes for whole models: the identity at the full budget, counted right, as published."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headwise.baselines.comparison import BLOCK_RIVALS
from headwise.baselines.measured import MEASURES, measurements
from headwise.baselines.modegpt import leverage, modegpt, nystrom
from headwise.baselines.parts import Subject, mlp_params
from headwise.baselines.pruning import (
    cut_layers,
    flap,
    kept_units,
    layer_params,
    llm_pruner,
    scores,
)
from headwise.errors import BudgetError
from headwise.models.backbones_headwise import layer_mlp, projections_of, stock_attentions
from headwise.models.build import convert, inner, replaced_projections
from headwise.planning.cost import cost
from tests import lanes
from tests.baselines.ranks import rank
from tests.tolerances import FELT, IDENTITY, difference


class Seen:
    """A tiny model as the recipes see it."""

    def __init__(self, dense) -> None:
        self.dense, self.model = dense, convert(dense.model)
        self.ids = torch.from_numpy(dense.profile.ids)
        stock = inner(self.model)
        self.owners = [layer for layer, _ in stock_attentions(stock)]
        own = tuple(projections_of(a).map(torch.clone) for a in self.model.attentions())
        mlps = tuple(layer_mlp(layer, stock.config).map(torch.clone) for layer in self.owners)
        found = measurements(self.model, self.ids, MEASURES, batch=4)
        self.subject = Subject(dense.profile, own, found, False, mlps)
        self.plan = dense.profile.plan
        spent = cost(self.plan)
        self.full = spent.attn_params + spent.ffn_params

    def outputs(self, cut) -> torch.Tensor:
        layers, mlps = dict(enumerate(cut.layers)), dict(enumerate(cut.mlps))
        with replaced_projections(self.model, layers, mlps):
            return self.dense.outputs(self.model)


def recounted(method: str, mlps) -> int:
    """MLP parameters by the ranks, or by the columns of W_down that are read."""
    total = 0
    for mlp in mlps:
        if method == "svd-llm":
            total += sum(rank(p.weight) * sum(p.weight.shape) for _, p in mlp.items())
            total += sum(p.bias.numel() for _, p in mlp.items() if p.bias is not None)
        else:
            total += mlp_params(mlp, int((mlp["down"].weight.abs().amax(0) > 0).sum()))
    return total


@pytest.mark.parametrize("method", BLOCK_RIVALS)
@pytest.mark.parametrize(
    "name", lanes.slow_but(("llama", "gpt2"), ("llama", "gpt2", "phi3", "gpt_neox"))
)
def test_the_full_budget_is_the_identity(seen, name, method):
    found = seen(name)
    before = found.dense.outputs(found.dense.model)
    cut = BLOCK_RIVALS[method](found.subject, found.full)
    assert cut.attn_params + cut.ffn_params == found.full
    assert difference(found.outputs(cut), before) <= IDENTITY


@pytest.mark.slow
@pytest.mark.parametrize("method", BLOCK_RIVALS)
@pytest.mark.parametrize("name", lanes.slow_but(("gpt2",), ("llama", "gpt2", "phi3")))
def test_blocks_are_counted_and_within_the_budget(seen, name, method):
    found = seen(name)
    amount = round(0.75 * found.full)
    cut = BLOCK_RIVALS[method](found.subject, amount)
    assert 0.65 * found.full < cut.attn_params + cut.ffn_params <= amount
    assert recounted(method, cut.mlps) == cut.ffn_params
    assert recounted(method, found.subject.mlps) > cut.ffn_params  # the recount can fail
    before = found.dense.outputs(found.dense.model)
    after = found.outputs(cut)
    assert torch.isfinite(after).all()
    assert difference(after, before) > FELT
    # What was put in for a while is gone, added biases too.
    assert difference(found.dense.outputs(found.model), before) <= IDENTITY


@pytest.mark.parametrize("method", BLOCK_RIVALS)
def test_a_budget_that_cannot_be_reached_is_an_error(seen, method):
    with pytest.raises(BudgetError):
        BLOCK_RIVALS[method](seen("gpt2").subject, 7)


def test_flap_drops_the_lowest_and_keeps_their_mean(seen):
    found = seen("llama")
    subject = found.subject
    amount = round(0.9 * found.full)
    heads, neurons = kept_units(subject, amount)
    _, by_neuron = scores(subject)
    d = found.plan.shape.d_model
    counted = sum(
        layer_params(subject, i, h)
        + d * (not h.all())
        + mlp_params(m, int(n.sum()))
        + d * (not n.all())
        for i, (h, n, m) in enumerate(zip(heads, neurons, subject.mlps, strict=True))
    )
    assert counted <= amount  # with the biases that a Llama did not have
    gone = np.concatenate([s[~a] for s, a in zip(by_neuron, neurons, strict=True)])
    kept = np.concatenate([s[a] for s, a in zip(by_neuron, neurons, strict=True)])
    assert len(gone)
    # A head is costly: what it leaves free brings the best of the dropped neurons back.
    assert np.median(gone) < np.median(kept)
    cut = flap(subject, amount)
    i = next(i for i, n in enumerate(neurons) if not n.all())
    mean = subject.measured[f"{i}.neurons_mean"]
    one, other = (m["down"] for m in (subject.mlps[i], cut.mlps[i]))
    before = one.weight.double().numpy() @ mean
    after = other.weight.double().numpy() @ mean + other.bias.double().numpy()
    assert after == pytest.approx(before, abs=1e-5 * np.abs(before).max())
    assert other.weight.double().numpy() @ mean != pytest.approx(before, rel=1e-2)


def test_flap_scores_are_as_its_program_computes_them(seen):
    found = seen("llama")
    by_head, by_neuron = scores(found.subject)
    entering: dict[str, list[torch.Tensor]] = {"mixed": [], "neurons": []}
    layer = found.owners[1]
    attention, down = found.model.attentions()[1], layer.mlp.down_proj
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: entering[name].append(args[0]))
        for name, module in (("mixed", attention.o_proj), ("neurons", down))
    ]
    with torch.no_grad():
        found.model(input_ids=found.ids)
    for hook in hooks:
        hook.remove()

    def fluctuation(name, module):
        rows = torch.cat(entering[name]).flatten(0, -2).double()
        return rows.var(0, correction=0) * module.weight.detach().double().square().sum(0)

    def standard(x):
        return (x - x.mean()) / x.std()

    # The published program squares what is of heads once more, and not what is of neurons.
    once = standard(fluctuation("mixed", attention.o_proj)).unflatten(0, (6, 10)).mean(1)
    twice = standard(fluctuation("mixed", attention.o_proj) ** 2).unflatten(0, (6, 10)).mean(1)
    assert by_head[1] == pytest.approx(twice.numpy(), abs=1e-4)
    assert by_head[1] != pytest.approx(once.numpy(), abs=1e-2)
    of_neurons = fluctuation("neurons", down)
    assert by_neuron[1] == pytest.approx(standard(of_neurons).numpy(), abs=1e-4)
    assert by_neuron[1] != pytest.approx(standard(of_neurons**2).numpy(), abs=1e-2)


def test_taylor_sums_are_of_weights_times_gradients(seen):
    found = seen("llama")
    model = convert(found.dense.model).requires_grad_(True)
    logs = model(input_ids=found.ids).logits[:, :-1].log_softmax(-1)
    (-logs.gather(-1, found.ids[:, 1:, None]).sum()).backward()
    layer = next(owner for owner, _ in list(stock_attentions(inner(model)))[1:2])
    parts = {
        n: (m.weight * m.weight.grad).abs().detach()
        for n, m in layer.mlp.named_children()
        if n != "act_fn"
    }
    expected = parts["gate_proj"].sum(1) + parts["up_proj"].sum(1) + parts["down_proj"].sum(0)
    measured = found.subject.measured
    assert measured["1.taylor_neurons"] == pytest.approx(expected.numpy(), rel=1e-3)
    attention = model.attentions()[1]
    sides = [
        (m.weight * m.weight.grad).abs().detach()
        for m in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    ]
    # The second of two groups of 3 query heads, 10 wide.
    second = (
        sides[0][30:].sum() + sides[1][10:].sum() + sides[2][10:].sum() + sides[3][:, 30:].sum()
    )
    assert measured["1.taylor_heads"][1] == pytest.approx(float(second), rel=1e-3)
    assert measured["1.taylor_heads"][0] != pytest.approx(float(second), rel=2e-3)


def test_llm_pruner_leaves_the_ends_alone_and_drops_the_least(seen):
    assert cut_layers(32) == range(4, 30)
    assert cut_layers(3) == range(3)
    found = seen("gpt2")
    cut = llm_pruner(found.subject, round(0.8 * found.full))
    for i, mlp in enumerate(cut.mlps):
        alive = (mlp["down"].weight.abs().amax(0) > 0).numpy()
        worth = found.subject.measured[f"{i}.taylor_neurons"]
        assert worth[~alive].max() < worth[alive].min()


def test_nystrom_is_the_least_squares_optimum():
    rng = np.random.default_rng(5)
    X = rng.normal(size=(400, 7)) @ rng.normal(size=(7, 7))
    W, kept = rng.normal(size=(3, 7)), [0, 2, 5, 6]
    C = X.T @ X / len(X)
    made = nystrom(W, C, kept)
    best = np.linalg.lstsq(X[:, kept], X @ W.T, rcond=None)[0].T
    assert made == pytest.approx(best, rel=1e-5, abs=1e-6)
    assert made != pytest.approx(W[:, kept], rel=1e-2)  # not refitted


def test_leverage_is_of_what_no_other_neuron_gives():
    C = np.diag([100.0, 1.0, 0.01])
    assert leverage(C) == pytest.approx([100 / 101, 1 / 2, 0.01 / 1.01])


def test_modegpt_cuts_most_where_a_layer_changes_least(seen):
    found = seen("llama")
    measured = dict(found.subject.measured)
    for i, influence in enumerate((0.3, 0.1, 0.2)):
        measured[f"{i}.influence"] = np.array(influence)
    cut = modegpt(replace(found.subject, measured=measured), round(0.8 * found.full))
    left = [int((m["down"].weight.abs().amax(0) > 0).sum()) for m in cut.mlps]
    assert left[1] < left[2] < left[0]
