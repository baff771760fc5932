"""The task network: its attention against one written out, and what it learns and cannot learn."""

import math

import pytest
import torch

from headwise.errors import PlanError
from headwise.papers.tasks.discrete import (
    InductionHead,
    PreviousToken,
    RandomLabels,
    SequenceClassification,
)
from headwise.papers.tasks.network import TaskNetwork, task_plan
from headwise.papers.tasks.ngram import NGram
from headwise.papers.tasks.task import SyntheticTask, TaskBatch
from headwise.plan import HeadSpec, LayerPlan, ModelShape, Plan
from headwise.planning.cost import cost

MIXED = (
    HeadSpec(qk_dim=5, vo_dim=3, queries=2),
    HeadSpec(qk_dim=2, vo_dim=7),
    HeadSpec(qk_dim=2, vo_dim=7, score_scale=1.5),
)
GRAM = NGram.random(2, 3, 11)
# Two heads suffice for the n-gram and the tokens; of different widths, so that both paths run.
PAIR = (HeadSpec(qk_dim=5, vo_dim=5), HeadSpec(qk_dim=3, vo_dim=7))


def attended(network: TaskNetwork, x: torch.Tensor) -> torch.Tensor:
    """The attention of MIXED written out head by head."""
    block = network.blocks[0].attention
    q, k, v = (getattr(block, f"{side}_proj")(x) for side in "qkv")
    later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
    outputs, at_q, at_k, at_v = [], 0, 0, 0
    for head in MIXED:
        key, value = k[..., at_k : at_k + head.qk_dim], v[..., at_v : at_v + head.vo_dim]
        for _ in range(head.queries):
            scores = q[..., at_q : at_q + head.qk_dim] @ key.mT
            scores = scores * (head.score_scale or 1 / math.sqrt(head.qk_dim))
            outputs.append(scores.masked_fill(later, -math.inf).softmax(-1) @ value)
            at_q += head.qk_dim
        at_k, at_v = at_k + head.qk_dim, at_v + head.vo_dim
    return block.o_proj(torch.cat(outputs, -1))


@pytest.mark.parametrize("skip", [True, False])
def test_mixed_heads_equal_attention_written_out(skip):
    plan = task_plan(MIXED, 13, 11, biases=("query", "key", "value", "output"))
    network = TaskNetwork(plan, GRAM, skip=skip)
    inputs = GRAM.sample(7).inputs
    x = network.embedding(inputs) + network.positions
    wanted = network.readout(attended(network, x) + (x if skip else 0))
    # float32 sums of about 30 terms of size 1, in another order
    torch.testing.assert_close(network(inputs), wanted, atol=1e-5, rtol=1e-5)
    assert (network(inputs) - network.readout(x)).abs().max() > 0.1


def test_a_later_token_never_changes_an_earlier_answer_unless_attention_looks_ahead():
    inputs = GRAM.sample(5).inputs
    changed = inputs.clone()
    changed[:, 7:] += 1
    for causal in (True, False):
        plan = task_plan(MIXED, 13, 11, n_layers=2, causal=causal)
        network = TaskNetwork(plan, GRAM, mlp=True, norm=True)
        moved = (network(inputs) - network(changed))[:, :7].abs().max()
        assert (moved == 0) == causal
        if not causal:
            assert moved > 1e-3


def test_attention_weights_are_those_of_the_fused_path():
    network = TaskNetwork(task_plan(MIXED, 13, 11), GRAM, positions="learned")
    inputs = GRAM.sample(5).inputs
    (weights,) = network.attention_weights(inputs)
    assert weights.shape == (5, 4, 11, 11)
    torch.testing.assert_close(weights.sum(-1), torch.ones(5, 4, 11))
    assert weights.triu(1).abs().max() == 0
    # The values of each query's own group, mixed by these weights, give the fused output.
    block = network.blocks[0].attention
    x = network.embedding(inputs) + network.positions
    values = block.v_proj(x).split((3, 7, 7), -1)
    own = (values[0], values[0], values[1], values[2])
    mixed = torch.cat([weights[:, i] @ v for i, v in enumerate(own)], -1)
    torch.testing.assert_close(network(inputs), network.readout(x + block.o_proj(mixed)))
    assert network.implementation._attn_implementation == "sdpa"


def test_the_seed_fixes_the_weights_and_leaves_the_global_generator_alone():
    plan = task_plan(MIXED, 13, 11)
    before = torch.random.get_rng_state()
    a, b, c = (TaskNetwork(plan, GRAM, mlp=True, seed=s) for s in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    first, other = dict(b.named_parameters()), dict(c.named_parameters())
    for name, weight in a.named_parameters():
        assert torch.equal(weight, first[name])
        assert not torch.equal(weight, other[name]), name


def test_attention_only_networks_hold_what_the_plan_costs_and_no_more():
    plan = task_plan(MIXED, 13, 11, n_layers=2, biases=("value",))
    bare = TaskNetwork(plan, GRAM, positions="none")
    # By hand: q 2·5+2+2, k 5+2+2, v 3+7+7 (+ bias), o 2·3+7+7; embedding 3 → 13; readout 13 → 3.
    attention = 13 * (14 + 9 + 17 + 20) + 17
    assert sum(p.numel() for p in bare.parameters()) == 2 * attention + 3 * 13 + 13 * 3 + 3
    assert cost(plan).attn_params == 2 * attention
    full = TaskNetwork(plan, GRAM, mlp=True)
    extra = sum(p.numel() for p in full.parameters()) - sum(p.numel() for p in bare.parameters())
    assert extra == 11 * 13 + 2 * (13 * 52 + 52 + 52 * 13 + 13)


def test_an_identity_query_has_no_weights_and_scores_as_spread_as_a_learned_one():
    heads = (HeadSpec(qk_dim=64, vo_dim=5),) * 3
    plain = task_plan(heads, 192, 11)
    layer = LayerPlan(heads=heads, query="identity")
    folded = Plan(shape=plain.shape, layers=(layer,))
    networks = [TaskNetwork(p, GRAM, norm=True) for p in (plain, folded)]
    assert not hasattr(networks[1].blocks[0].attention, "q_proj")
    inputs = GRAM.sample(211).inputs
    spreads = []
    for network in networks:
        (weights,) = network.attention_weights(inputs)
        spreads.append(weights[:, :, -1].log().std(dim=-1).mean().item())
    # Random weights of three heads: equal within a quarter; without the factor it would be √3.
    assert spreads[1] == pytest.approx(spreads[0], rel=0.25)


def test_without_positions_one_layer_sees_a_bag_of_earlier_tokens():
    task = PreviousToken(11, 7)
    inputs = task.sample(5).inputs
    swapped = inputs.clone()
    swapped[:, :10] = inputs[:, torch.tensor([4, 2, 7, 9, 0, 1, 3, 8, 6, 5])]
    for positions in ("none", "learned", "rotary"):
        network = TaskNetwork(task_plan(MIXED, 13, 11), task, positions=positions)
        moved = (network(inputs) - network(swapped))[:, -1].abs().max()
        assert (moved < 1e-5) == (positions == "none")
        if positions != "none":
            assert moved > 1e-3


def test_rotary_scores_depend_on_the_distance_alone_and_every_width_keeps_slow_planes():
    heads = (HeadSpec(qk_dim=8, vo_dim=3), HeadSpec(qk_dim=5, vo_dim=3))
    network = TaskNetwork(task_plan(heads, 13, 11), GRAM, positions="rotary")
    inputs = torch.ones(1, 11, 3)  # equal tokens: only positions tell them apart
    (weights,) = network.attention_weights(inputs)
    scores = weights[0].log()
    for h in range(2):
        for back in (1, 2, 5):
            steps = torch.tensor([scores[h, t, t - back] - scores[h, t, t] for t in range(5, 11)])
            assert steps.std() < 1e-4
            assert steps.abs().max() > 1e-3
    assert len(network.blocks[0].attention.classes[1].columns) == 4


def test_other_lengths_up_to_the_context_are_taken():
    network = TaskNetwork(task_plan(MIXED, 13, 17), GRAM)
    assert network(torch.randn(2, 17, 3)).shape == (2, 17, 3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TaskNetwork(task_plan(MIXED, 13, 7), GRAM), "at least the task's 11 tokens"),
        (
            lambda: TaskNetwork(task_plan(MIXED, 13, 11), GRAM, positions="leraned"),
            "Did you mean 'learned'",
        ),
        (
            lambda: TaskNetwork(
                Plan.uniform(
                    ModelShape(
                        n_layers=1, d_model=13, context=11, n_heads=1, n_kv_heads=1,
                        qk_dim=5, vo_dim=3, windows=(5,),
                    )
                ),
                GRAM,
            ),
            "sliding windows",
        ),
    ],
)  # fmt: skip
def test_plans_that_do_not_fit_are_refused_with_the_reason(make, said):
    with pytest.raises(PlanError, match=said):
        make()


# --- what it learns, and what it cannot --------------------------------------------------------


def trained(
    network: TaskNetwork,
    task: SyntheticTask,
    steps: int,
    *,
    lr: float = 1e-2,
    shuffled: bool = False,
) -> tuple[float, float]:
    """The metric and loss on new sequences (the whole set, if it is fixed) after a short training.

    `shuffled` gives every sequence another one's targets: then there is nothing to learn.
    """
    optimizer = torch.optim.Adam(network.parameters(), lr)
    batch_size = min(64, getattr(task, "examples", 64))
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / 20) * (1 - step / steps)
        batch = task.sample(batch_size, 1000 + step)
        if shuffled:
            batch = TaskBatch(batch.inputs, batch.targets.roll(1, dims=0), batch.scored)
        loss = task.loss(network(batch.inputs), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    fresh = task.everything() if isinstance(task, RandomLabels) else task.sample(1009, 7)
    with torch.no_grad():
        outputs = network(fresh.inputs)
    return task.metric(outputs, fresh), float(task.loss(outputs, fresh))


@pytest.mark.slow
def test_the_n_gram_is_learned_and_too_narrow_heads_stay_above_their_floor():
    error, _ = trained(TaskNetwork(task_plan(PAIR, 17, 11), GRAM), GRAM, 150)
    assert error < 0.05 * GRAM.chance
    narrow = (HeadSpec(qk_dim=5, vo_dim=1),)
    stuck, _ = trained(TaskNetwork(task_plan(narrow, 17, 11), GRAM, skip=False), GRAM, 150)
    assert GRAM.bottleneck_error(1) == pytest.approx(2 / 3)
    # The sampled floor moves by about 2% (30 000 squared normals, neighbours correlated).
    assert 0.95 * 2 / 3 < stuck < GRAM.chance


def attending_by_position(network: TaskNetwork) -> TaskNetwork:
    """The network with queries and keys made of the positions alone."""
    for projection in (network.blocks[0].attention.q_proj, network.blocks[0].attention.k_proj):
        projection.register_forward_pre_hook(
            lambda _, inputs: (network.positions.expand_as(inputs[0]),)
        )
    return network


@pytest.mark.slow
def test_two_lags_take_two_attention_patterns_however_wide_one_head_is():
    floor = GRAM.pattern_error(1)
    assert floor > 0.4
    errors = []
    for heads in ((HeadSpec(qk_dim=5, vo_dim=12),), PAIR):
        network = TaskNetwork(task_plan(heads, 17, 11), GRAM, skip=False)
        errors.append(trained(attending_by_position(network), GRAM, 200)[0])
    assert 0.95 * floor < errors[0] < 1.3 * floor
    assert errors[1] < 0.4 * floor


@pytest.mark.slow
def test_the_nonlinear_n_gram_takes_an_mlp():
    task = NGram.random(2, 3, 11, activation="relu")
    networks = [TaskNetwork(task_plan(PAIR, 17, 11), task, mlp=mlp) for mlp in (True, False)]
    bent, straight = (trained(network, task, 250)[0] for network in networks)
    assert bent < 0.2 * task.affine_error()
    # Attention that depends on the tokens is not linear: the affine error is no strict floor.
    assert 0.5 * task.affine_error() < straight < task.chance


@pytest.mark.slow
def test_the_previous_token_is_learned_and_without_positions_it_is_not():
    task = PreviousToken(11, 7)
    plan = task_plan(PAIR, 17, 11)
    right, _ = trained(TaskNetwork(plan, task), task, 150)
    assert right > 0.95
    blind, _ = trained(TaskNetwork(plan, task, positions="none"), task, 150)
    assert blind < 0.6


@pytest.mark.slow
def test_two_layers_find_the_token_after_its_first_occurrence_and_one_does_not():
    task = InductionHead(11, 11, 7)
    heads = (HeadSpec(qk_dim=8, vo_dim=8), HeadSpec(qk_dim=5, vo_dim=11))
    two, _ = trained(TaskNetwork(task_plan(heads, 29, 11, n_layers=2), task), task, 500)
    assert two > 0.9
    one, _ = trained(TaskNetwork(task_plan(heads, 29, 11), task), task, 200)
    assert task.chance < one < 2 * task.order_blind


@pytest.mark.slow
def test_labels_are_memorized_and_other_labels_are_at_chance():
    task = RandomLabels(5, 7, 31, 5)
    network = TaskNetwork(task_plan((*PAIR, *PAIR), 17, 5), task, skip=False)
    right, loss = trained(network, task, 200)
    assert right == 1
    assert loss < 0.05 * task.chance_loss
    others = [task.relabelled(s).everything() for s in range(1, 101)]
    with torch.no_grad():
        scores = [task.metric(network(other.inputs), other) for other in others]
    # 3100 independent labels: a standard error of 0.007
    assert sum(scores) / len(scores) == pytest.approx(task.chance, abs=0.03)


@pytest.mark.slow
def test_classes_come_near_the_bayes_accuracy():
    task = SequenceClassification(11, 5, 3, noise=0.1)
    right, loss = trained(TaskNetwork(task_plan(PAIR, 17, 11), task), task, 250)
    assert 0.85 < right < 0.94  # the optimum is 0.9, the standard error 0.01
    assert right > task.order_blind + 0.1
    assert 0.9 * task.optimum_loss < loss < 0.8 * task.chance_loss


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [GRAM, PreviousToken(11, 7), InductionHead(11, 11, 7), SequenceClassification(11, 5, 3)],
    ids=lambda t: type(t).__name__,
)
def test_with_shuffled_targets_nothing_is_learned(task):
    metric, loss = trained(TaskNetwork(task_plan(PAIR, 17, 11), task), task, 60, shuffled=True)
    if task.regression:
        assert metric > 0.95 * task.chance
    else:
        assert metric == pytest.approx(task.chance, abs=0.07)
        assert loss > 0.95 * task.chance_loss
