"""Models trained from scratch for the claims: equal plans, right scales, runs that repeat."""

from __future__ import annotations

import math

import pytest
import torch

from headwise.papers.claims.allocation import (
    adaptive,
    planned_vs_uniform,
    six_layers,
    three_tokens,
)
from headwise.papers.claims.allocation.adaptive import PLANS, condition_plan
from headwise.papers.claims.allocation.planned_vs_uniform import POLICIES, RIVALS, SHAPE, rival_plan
from headwise.papers.claims.query_free import query_free, query_free_decay
from headwise.papers.claims.query_free.query_free import BlockKind, block_plan, score_scale
from headwise.papers.harness.claim import ReproduceError
from headwise.papers.tasks.discrete import PreviousToken
from headwise.papers.tasks.network import TaskNetwork, task_plan
from headwise.papers.tasks.training import (
    PAIR_PRIOR,
    Corpus,
    Course,
    HeldOutCurve,
    TextSizes,
    corpus,
    text_model,
    train_on_task,
    train_on_text,
)
from headwise.plan import HeadSpec, ModelShape
from headwise.planning.cost import cost

CLAIMS = (adaptive, planned_vs_uniform, query_free, query_free_decay)


def _shape(size):
    sizes = SHAPE[size]
    return ModelShape(
        n_layers=sizes["n_layers"],
        d_model=sizes["d_model"],
        context=32,
        n_heads=sizes["heads"],
        n_kv_heads=sizes["heads"],
        qk_dim=sizes["width"],
        vo_dim=sizes["width"],
        vocab_size=300,
        ffn_dim=sizes["ffn_dim"],
    )


@pytest.mark.parametrize("size", ["quick", "full"])
def test_rivals_have_equal_costs_and_different_widths(size):
    shape = _shape(size)
    plans = {p: rival_plan(p, shape, 0.75, seed=3) for p in POLICIES}
    costs = {p: cost(plan) for p, plan in plans.items()}
    assert {costs[p].attn_params for p in ("theory", *RIVALS)} == {
        costs["dense"].attn_params * 3 // 4
    }
    assert len({costs[p].flops for p in ("theory", *RIVALS)}) == 1
    assert plans["reversed"].layers == plans["theory"].layers[::-1] != plans["theory"].layers
    assert len({plan.layers for plan in plans.values()}) == len(POLICIES)
    drawn = {rival_plan("random", shape, 0.75, seed=s).layers for s in range(5)}
    assert len(drawn) > 1
    assert rival_plan("random", shape, 0.75, seed=3) == plans["random"]


@pytest.mark.parametrize("size", ["quick", "full"])
def test_plans_to_adapt_between_have_equal_costs(size):
    p = {"d_model": 32 if size == "quick" else 64}
    costs = [cost(condition_plan({**p, "layers": s}, 16, 300)) for s in PLANS[size].values()]
    assert len({(c.attn_params, c.flops) for c in costs}) == 1


@pytest.mark.parametrize("total", [64, 32, 16])
def test_plans_of_a_total_width_have_equal_parameters(total):
    plans = three_tokens.plans(total)
    assert {sum(h * w for h, w in layers) for layers in plans.values()} == {total}
    made = {"d_model": 32, "biases": ["query", "key"]}
    costs = [cost(condition_plan({**made, "layers": s}, 32, 0)) for s in plans.values()]
    assert len({(c.attn_params, c.flops) for c in costs}) == 1
    (many, narrow), (few, wide) = plans["planned"]
    assert many > few == 1
    assert narrow < wide
    assert len(three_tokens.uniforms(total)) >= 3


@pytest.mark.parametrize("size", ["quick", "full"])
@pytest.mark.parametrize("claim", [six_layers.CLAIM, six_layers.LANGUAGE])
def test_plans_for_six_layers_have_equal_costs(size, claim, monkeypatch):
    """The fitted plan stands in as uniform widths moved between the layers' two sides."""
    fitted = []
    for trial in claim.trials(size, [0]):
        p = trial.parameters
        if not fitted:
            uniform = six_layers.plan_of({**p, "plan": "uniform 4"}, 0)
            moved = [4 if i < 3 else -4 for i in range(6)]
            layers = [
                layer.model_copy(
                    update={
                        "heads": tuple(
                            h.model_copy(update={"qk_dim": h.qk_dim + m, "vo_dim": h.vo_dim - m})
                            for h in layer.heads
                        )
                    }
                )
                for layer, m in zip(uniform.layers, [m // 4 for m in moved], strict=True)
            ]
            fitted.append(uniform.model_copy(update={"layers": tuple(layers)}))
            monkeypatch.setattr(six_layers, "_fitted", lambda *_: fitted[0])
    plans = {t.name: six_layers.plan_of(t.parameters, 5) for t in claim.trials(size, [0])}
    costs = [cost(plan) for plan in plans.values()]
    assert len({(c.attn_params, c.flops) for c in costs}) == 1
    width = six_layers.SHAPE[size]["d_model"]
    assert costs[0].attn_params == pytest.approx(0.4 * 6 * 4 * width**2)
    assert plans["reversed"].layers == plans["proxy"].layers[::-1]
    assert sorted(map(str, plans["shuffled"].layers)) == sorted(map(str, plans["proxy"].layers))


def test_score_scales():
    assert score_scale(BlockKind(), 96, 16) == 1 / 4
    assert score_scale(BlockKind("value", "paper"), 96, 16) == 1 / 4
    assert score_scale(BlockKind("query", "unchanged"), 96, 16) == 1 / 4
    assert score_scale(BlockKind("query", "paper"), 96, 16) == 1 / 8
    assert score_scale(BlockKind("key", "spread"), 96, 16) == pytest.approx(
        0.02 * math.sqrt(96) / 4
    )


def test_the_spread_scale_gives_the_full_models_score_spread():
    """Scores of a new layer on a normalised input, beside those with the scale left unchanged."""
    sizes = {"n_layers": 1, "d_model": 192, "heads": 4}
    text = {"vocab_size": 300, "context": 32}
    x = torch.nn.functional.layer_norm(
        torch.randn(1, 512, 192, generator=torch.Generator().manual_seed(1)), (192,)
    )

    def spread(block):
        plan = block_plan(block, sizes, text)
        attention = text_model(plan, 0).attentions()[0]
        q, k = (getattr(attention, f"{s}_proj", torch.nn.Identity())(x) for s in "qk")
        scores = attention.classes[0].scaling * (q[..., :48] @ k[..., :48].mT)
        return float(scores.detach().std())

    full = spread(BlockKind())
    assert spread(BlockKind("query", "spread")) == pytest.approx(full, rel=0.1)
    assert spread(BlockKind("query", "unchanged")) > 2 * full


def test_a_reduced_block_has_a_quarter_less_attention_and_the_wider_mlp_spends_it():
    sizes, text = {"n_layers": 3, "d_model": 32, "heads": 4}, {"vocab_size": 300, "context": 32}
    full, reduced, wider = (
        cost(block_plan(block, sizes, text))
        for block in (BlockKind(), BlockKind("query"), BlockKind("query", ffn_ratio=4.5))
    )
    assert reduced.attn_params * 4 == full.attn_params * 3
    biases = 3 * 32 // 2  # of the MLP's further units
    assert wider.params == full.params + biases


def test_frequencies_by_hand():
    text = Corpus(
        torch.tensor([0, 0, 1]).numpy().astype("uint32"),
        torch.tensor([0, 1]).numpy().astype("uint32"),
    )
    assert text.frequency_loss(2) == pytest.approx(-(math.log(3 / 5) + math.log(2 / 5)) / 2)
    follows = (1 + PAIR_PRIOR * 2 / 5) / (2 + PAIR_PRIOR)  # 0 was followed by 0 once, by 1 once
    assert text.pair_loss(2) == pytest.approx(-math.log(follows))


@pytest.mark.slow
def test_text_is_learned_and_a_run_repeats():
    source = TextSizes(60_000, 260, 16)
    course = Course(steps=40, batch=4, lr=1e-2, evaluations=2, scored=8)
    plan = block_plan(
        BlockKind("query"),
        {"n_layers": 1, "d_model": 32, "heads": 2},
        {"vocab_size": 260, "context": 16},
    )
    runs = [train_on_text(text_model(plan, s), source, course, s) for s in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0].steps == (20, 40)
    known = corpus(60_000, 260).frequency_loss(260)
    assert runs[0].losses[-1] < 1.2 * known < 0.8 * math.log(260)


def test_attention_only_models_have_no_mlp():
    shape = _shape("quick").model_copy(update={"ffn_dim": 0})
    model = text_model(rival_plan("theory", shape, 0.75, 0), 0)
    assert isinstance(model, TaskNetwork)
    assert all(block.mlp is None for block in model.blocks)


def test_a_task_is_learned_and_divergence_is_told():
    task = PreviousToken(length=5, vocab_size=3)
    plan = task_plan([HeadSpec(qk_dim=8, vo_dim=8)] * 2, 16, 5)

    def learned(lr):
        network = TaskNetwork(plan, task, seed=0)
        course = Course(steps=60, batch=32, lr=lr, evaluations=3, scored=64)
        return train_on_task(network, task, course, 0)

    calm, wild = learned(1e-2), learned(1e30)
    assert calm.losses[-1] < 0.5 * task.chance_loss
    assert calm.finished() is calm
    assert wild.diverged
    with pytest.raises(ReproduceError, match="finite"):
        wild.finished()
    assert HeldOutCurve((), (), diverged=True).values()["losses"] == []


@pytest.mark.parametrize("module", CLAIMS)
def test_names_and_keys_of_trials_are_unique(module):
    claim = module.CLAIM
    for size in ("quick", "full"):
        made = claim.trials(size, (0, 1))
        assert len({t.key(claim.version) for t in made}) == len(made)
        assert len({(t.name, t.seed) for t in made}) == len(made)
        assert all(t.claim == claim.id for t in made)
