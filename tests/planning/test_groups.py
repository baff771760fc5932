"""Head groups that may go and layers of few widths: the solver against all plans there are."""

import itertools

import numpy as np
import pytest

from headwise.errors import BudgetError, PlanError
from headwise.plan import Budget, HeadSpec, LayerPlan, Limit, ModelShape, Plan
from headwise.planning.cost import cost, dense_cost, unit_cost
from headwise.planning.fit import FitProblem, HeadWorth, fit, predicted_loss
from headwise.planning.rules import WidthRules
from tests import lanes

WIDTHS = [(qk, vo) for qk in (4, 8) for vo in (4, 8)]
BIASES = ("query", "key", "value", "output")
BUDGETS = [
    {"attn_params": 0.6},
    {"kv_bytes": 0.4, "flops": 0.8},
    {"attn_params": 0.5, "kv_bytes": 0.55, "traffic": 0.6},
]


def make_problem(seed, *, groups=3, layers=2, biases=(), windows=(), fixed=False, **rules):
    rng = np.random.default_rng(seed)
    shape = ModelShape(
        n_layers=layers,
        d_model=20,
        context=16,
        n_heads=2 * groups,
        n_kv_heads=groups,
        qk_dim=8,
        vo_dim=8,
        attention_biases=biases,
        windows=windows,
    )
    head = HeadSpec(qk_dim=8, vo_dim=8, queries=2, rotary_planes=(0, 1, 2, 3))
    layer = LayerPlan(heads=(head,) * groups, biases=biases)
    worths = tuple(
        tuple(
            HeadWorth(rng.exponential(size, 4), np.zeros(0), rng.exponential(size, 8))
            for size in rng.exponential(1, groups) ** 2
        )
        for _ in range(layers)
    )
    plan = Plan(shape=shape, layers=(layer,) * layers)
    rules = WidthRules(multiple_of=4, **rules)
    return FitProblem(plan, worths, rules, fixed_groups=fixed)


def shares(**given):
    return Budget(**{name: Limit(share=x) for name, x in given.items()})


def one_width(n):
    for widths, kept in itertools.product(WIDTHS, itertools.product((True, False), repeat=n)):
        yield tuple(widths if k else None for k in kept)


def free(n):
    yield from itertools.product([None, *WIDTHS], repeat=n)


def two_widths(n):
    yield from (one for one in free(n) if len(set(one) - {None}) <= 2)


def least_loss(problem, budget, options):
    """The least predicted loss of all plans of two layers."""
    template, names = problem.template, budget.limited
    tables = []
    for i, layer in enumerate(template.layers):
        units = [
            [unit_cost(template, i, layer.heads[0], side, 16)[r] for r in names]
            for side in ("qk", "vo")
        ]
        table = []
        for option in options(len(layer.heads)):
            spent, lost = np.zeros(len(names)), 0.0
            for worth, widths in zip(problem.sensitivity[i], option, strict=True):
                if widths is None:
                    lost += worth.vo.sum()
                    continue
                spent += widths[0] * np.array(units[0]) + widths[1] * np.array(units[1])
                lost += np.sort(worth.planes)[: 4 - widths[0] // 2].sum()
                lost += np.sort(worth.vo)[: 8 - widths[1]].sum()
            table.append((*spent, lost))
        tables.append(np.array(table))
    n = len(names)
    full, dense = cost(template), dense_cost(template.shape)
    widest = sum(t[:, :n].max(axis=0) for t in tables)
    room = [
        budget.amount(r, dense) - (full.counted(r) - w) for r, w in zip(names, widest, strict=True)
    ]
    first, second = tables
    spent = first[:, None, :n] + second[None, :, :n]
    lost = first[:, None, n] + second[None, :, n]
    return 0.5 * lost[(spent <= np.array(room)).all(axis=2)].min()


KINDS = {
    "layer": ({"granularity": "layer", "drop_groups": True}, one_width),
    "head": ({"granularity": "head", "drop_groups": True}, free),
    "few": ({"granularity": "head", "drop_groups": True, "max_classes": 2}, two_widths),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limits", BUDGETS)
@pytest.mark.parametrize(("biases", "windows"), [((), ()), (BIASES, ()), ((), (None, 4))])
def test_no_plan_loses_less(kind, limits, biases, windows):
    rules, options = KINDS[kind]
    budget = shares(**limits)
    for seed in range(1 if lanes.is_fast else 3):
        problem = make_problem(seed, biases=biases, windows=windows, **rules)
        found = fit(problem, budget)
        best = least_loss(problem, budget, options)
        value = 0.5 * sum(head.total for layer in problem.sensitivity for head in layer)
        assert found.loss_increase >= best - 1e-9
        assert found.loss_increase <= best + found.gap * value + 1e-9
        if kind != "few":
            assert found.exact
        if found.exact:
            assert found.loss_increase == pytest.approx(best)


def test_groups_go_only_where_they_may_and_where_it_pays():
    budget, dropped = shares(attn_params=0.55), 0
    for seed in range(5):
        kept = fit(make_problem(seed), budget)
        assert all(len(layer.heads) == 3 for layer in kept.plan.layers)
        problem = make_problem(seed, drop_groups=True)
        found = fit(problem, budget)
        assert found.loss_increase <= kept.loss_increase + 1e-12
        dropped += sum(3 - len(layer.heads) for layer in found.plan.layers)
        assert predicted_loss(problem, found.plan) == found.loss_increase
        fixed = fit(make_problem(seed, drop_groups=True, fixed=True), budget)
        assert fixed.plan == kept.plan
    assert dropped > 0


def test_below_every_width_a_layer_loses_its_attention():
    problem = make_problem(1, drop_groups=True)
    found = fit(problem, shares(attn_params=0.01))
    assert all(not layer.heads for layer in found.plan.layers)
    assert Plan.from_json(found.plan.to_json()) == found.plan
    everything = 0.5 * sum(head.vo.sum() for layer in problem.sensitivity for head in layer)
    assert found.loss_increase == pytest.approx(everything)
    with pytest.raises(BudgetError, match="smallest allowed plan costs"):
        fit(make_problem(1, drop_groups=True), Budget(params=Limit(amount=1)))


def classes(layer):
    return [(h.qk_dim, h.vo_dim) for h in layer.heads]


def test_equal_widths_stand_side_by_side():
    moved = 0
    for seed in range(12):
        problem = make_problem(seed, groups=5, granularity="head")
        plan = fit(problem, shares(attn_params=0.6)).plan
        for layer in plan.layers:
            runs = [width for width, _ in itertools.groupby(classes(layer))]
            assert len(runs) == len(set(runs))
            moved += layer.sources != tuple(range(5))
        assert predicted_loss(problem, plan) == plan.origin.predicted_loss
        fixed = make_problem(seed, groups=5, granularity="head", fixed=True)
        still = fit(fixed, shares(attn_params=0.6))
        assert all(layer.sources == (0, 1, 2, 3, 4) for layer in still.plan.layers)
        assert still.loss_increase == pytest.approx(plan.origin.predicted_loss)
    assert moved > 0


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_a_layer_has_at_most_so_many_widths(most):
    losses = []
    for limit in (most, None):
        problem = make_problem(3, groups=5, granularity="head", max_classes=limit)
        found = fit(problem, shares(attn_params=0.6))
        losses.append(found.loss_increase)
        if limit is not None:
            assert all(len(set(classes(layer))) <= most for layer in found.plan.layers)
    assert losses[0] >= losses[1] - 1e-12
    if most == 1:
        layer = fit(make_problem(3, groups=5), shares(attn_params=0.6))
        assert losses[0] == pytest.approx(layer.loss_increase)


def test_sources_are_checked():
    head = HeadSpec(qk_dim=4, vo_dim=4)
    twice = {"heads": [{"qk_dim": 4, "vo_dim": 4, "source": 1}, {"qk_dim": 4, "vo_dim": 4}]}
    with pytest.raises(ValueError, match="no two heads have one source"):
        LayerPlan.model_validate(twice)
    assert LayerPlan(heads=(head, head)).sources == (0, 1)
    with pytest.raises(PlanError, match="max-classes must be at least 1"):
        WidthRules(max_classes=0)
