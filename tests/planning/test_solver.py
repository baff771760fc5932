"""The solver against exhaustive search, by hand, and where the obvious method fails."""

from __future__ import annotations

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwise.errors import BudgetError
from headwise.planning import knapsack
from headwise.planning.knapsack import SearchResult
from headwise.planning.solver import Curve, Solution, Solver, solve
from tests import lanes

CLOSE = 1e-9  # relative; sums of float64 in another order
QUICK = settings(
    max_examples=lanes.examples(350),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def curve(*values: float, cost: tuple[int, ...] = (1,), **options) -> Curve:
    return Curve(np.array(values, dtype=np.float64), cost, **options)


def allowed_units(c: Curve) -> set[int]:
    full = len(c.values) - 1
    top = full if c.ceiling is None else c.ceiling
    return {
        u for u in range(full + 1) if c.floor <= u <= top and (u % c.multiple_of == 0 or u == full)
    }


def exhaustive(curves: list[Curve], budgets: tuple[int, ...]) -> float | None:
    """The best value over every combination, written as directly as the problem is stated."""
    grids = [sorted(allowed_units(c)) for c in curves]
    best = None
    for units in itertools.product(*grids):
        ties = {}
        if any(
            c.tie is not None and ties.setdefault(c.tie, u) != u
            for c, u in zip(curves, units, strict=True)
        ):
            continue
        spent = [
            sum(c.unit_cost[r] * u for c, u in zip(curves, units, strict=True))
            for r in range(len(budgets))
        ]
        if all(s <= b for s, b in zip(spent, budgets, strict=True)):
            value = sum(float(c.values[u]) for c, u in zip(curves, units, strict=True))
            best = value if best is None else max(best, value)
    return best


def check(found: Solution, curves: list[Curve], budgets: tuple[int, ...]) -> None:
    """What must hold of any allocation, optimal or not."""
    for c, u in zip(curves, found.units, strict=True):
        assert u in allowed_units(c)
    for a, b in itertools.combinations(range(len(curves)), 2):
        if curves[a].tie is not None and curves[a].tie == curves[b].tie:
            assert found.units[a] == found.units[b]
    for r, budget in enumerate(budgets):
        spent = sum(c.unit_cost[r] * u for c, u in zip(curves, found.units, strict=True))
        assert found.spent[r] == spent <= budget
    value = sum(float(c.values[u]) for c, u in zip(curves, found.units, strict=True))
    assert found.value == pytest.approx(value, rel=CLOSE, abs=CLOSE)
    assert found.bound >= found.value
    assert found.gap >= 0


def agree(curves: list[Curve], budgets: tuple[int, ...]) -> None:
    best = exhaustive(curves, budgets)
    if best is None:
        with pytest.raises(BudgetError):
            solve(curves, budgets)
        return
    found = solve(curves, budgets)
    check(found, curves, budgets)
    assert found.exact
    assert found.gap == 0
    assert found.value == pytest.approx(best, rel=CLOSE, abs=CLOSE)


@st.composite
def problems(draw, n_resources: int, shape: str = "any", ties: bool = False):
    """The fields of a few small curves, and budgets between nothing and everything."""
    curves = []
    for _ in range(draw(st.integers(1, 5))):
        steps = draw(st.lists(st.integers(0, 9), max_size=5))
        if shape == "concave":
            values = np.cumsum([0, *sorted(steps, reverse=True)])
        elif shape == "equal":
            values = np.arange(len(steps) + 1)
        else:
            values = np.array([draw(st.integers(-3, 3)), *steps])
        jitter = draw(st.sampled_from([0.0, 0.3]))
        unit = draw(st.sampled_from([1, 7, 10**9 + 7])) if shape == "any" else 1
        cost = tuple(unit * draw(st.integers(0, 5)) for _ in range(n_resources))
        curves.append(
            {
                "values": values + jitter * np.sqrt(values - values.min()),
                "unit_cost": cost,
                "floor": draw(st.sampled_from([0, 0, 0, 1])),
                "ceiling": draw(st.sampled_from([None, None, 3])),
                "multiple_of": draw(st.sampled_from([1, 1, 2, 3])),
                "tie": draw(st.sampled_from([None, "a", "b"])) if ties else None,
            }
        )
    full = [
        sum(c["unit_cost"][r] * (len(c["values"]) - 1) for c in curves) for r in range(n_resources)
    ]
    return curves, tuple(f * draw(st.integers(1, 19)) // 20 for f in full)


def built(problem) -> tuple[list[Curve], tuple[int, ...]]:
    """Outside the strategy, since run-time checks of a Curve draw random numbers."""
    return [Curve(**fields) for fields in problem[0]], problem[1]


class TestExhaustive:
    @QUICK
    @given(problems(1))
    def test_one_budget(self, problem):
        agree(*built(problem))

    @QUICK
    @given(problems(1, "concave"))
    def test_one_budget_concave(self, problem):
        agree(*built(problem))

    @QUICK
    @given(problems(2))
    def test_two_budgets(self, problem):
        agree(*built(problem))

    @QUICK
    @given(problems(3, "concave"))
    def test_three_budgets_concave(self, problem):
        agree(*built(problem))

    @QUICK
    @given(problems(2, "equal"))
    def test_equal_values(self, problem):
        agree(*built(problem))

    @QUICK
    @given(problems(2, ties=True))
    def test_ties(self, problem):
        agree(*built(problem))

    @pytest.mark.parametrize("pairs", [knapsack.MAX_JOINED, 5])
    def test_proportional_costs(self, pairs, monkeypatch):
        """Two kinds of layers, in each of which costs are multiples of one another."""
        monkeypatch.setattr(knapsack, "MAX_JOINED", pairs)  # 5: almost nothing is joined
        rng = np.random.default_rng(11)
        kinds = np.array([[3, 7], [5, 2]])
        for _ in range(lanes.examples(60)):
            values = rng.uniform(0, 9, (6, 5)).cumsum(axis=1)
            costs = kinds[np.arange(6) % 2] * rng.integers(1, 4, (6, 1))
            budgets = 4 * costs.sum(axis=0) * rng.integers(3, 8, 2) // 10
            total, spent = np.zeros(1), np.zeros((1, 2), dtype=np.int64)
            for v, c in zip(values, costs, strict=True):
                total = (total[:, None] + v).ravel()
                spent = (spent[:, None] + np.arange(5)[:, None] * c).reshape(-1, 2)
            best = total[(spent <= budgets).all(axis=1)].max()
            curves = [Curve(v, tuple(c.tolist())) for v, c in zip(values, costs, strict=True)]
            found = solve(curves, tuple(budgets.tolist()))
            assert found.exact
            assert found.value == pytest.approx(best, rel=CLOSE)

    def test_many_curves_by_dynamic_programming(self):
        """Sizes beyond enumeration: a table over every amount of one budget."""
        rng = np.random.default_rng(3)
        for concave in (True, False):
            steps = rng.pareto(1.3, (23, 11))
            steps = -np.sort(-steps, axis=1) if concave else steps
            values = np.cumsum(np.pad(steps, ((0, 0), (1, 0))), axis=1)
            costs = rng.integers(2, 14, 23)
            curves = [Curve(v, (int(c),)) for v, c in zip(values, costs, strict=True)]
            table = np.zeros(int(11 * costs.sum()) + 1)
            for v, c in zip(values, costs, strict=True):
                options = [np.pad(table, (u * c, 0))[: len(table)] + v[u] for u in range(12)]
                for u in range(12):
                    options[u][: u * c] = -np.inf
                table = np.max(options, axis=0)
            for budget in range(0, len(table), lanes.every(97)):
                assert solve(curves, (budget,)).value == pytest.approx(table[budget], rel=CLOSE)


class TestPromises:
    @settings(QUICK, max_examples=lanes.examples(150))
    @given(problems(2), st.integers(0, 40), st.integers(0, 40))
    def test_more_budget_never_gives_less(self, problem, more, other):
        curves, budgets = built(problem)
        if exhaustive(curves, budgets) is None:
            return
        less = solve(curves, budgets)
        greater = solve(curves, (budgets[0] + more, budgets[1] + other))
        assert greater.value >= less.value - CLOSE * abs(less.value)

    @settings(QUICK, max_examples=lanes.examples(100))
    @given(problems(3, "concave"), st.randoms(use_true_random=False))
    def test_order_of_curves_does_not_matter(self, problem, random):
        curves, budgets = built(problem)
        if exhaustive(curves, budgets) is None:
            return
        shuffled = random.sample(curves, len(curves))
        value = solve(curves, budgets).value
        assert solve(shuffled, budgets).value == pytest.approx(value, rel=CLOSE, abs=CLOSE)

    @pytest.mark.parametrize("n_resources", [1, 2])
    def test_round_off_in_merged_curves_does_no_harm(self, n_resources):
        """Sums of thirds and the like are concave but for their last digit; all budgets at once."""
        harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, 17))])
        curves = [
            Curve(weight * harmonic / harmonic[-1], (3,) * n_resources, floor=2)
            for weight in np.linspace(1.0, 0.25, 7)
            for _ in range(4)
        ]
        rises = np.sort(np.concatenate([np.diff(c.values[2:]) for c in curves]))[::-1]
        base = sum(float(c.values[2]) for c in curves)
        for steps in range(0, len(rises) + 1, lanes.every(1)):
            budgets = tuple(3 * (2 * len(curves) + steps) + r for r in range(n_resources))
            found = solve(curves, budgets)
            assert found.value == pytest.approx(base + rises[:steps].sum(), rel=CLOSE)

    def test_the_same_question_has_the_same_answer(self):
        curves, budgets = large_problem(kinds=7)
        assert solve(curves, budgets) == solve(curves, budgets)

    @pytest.mark.slow
    def test_a_prepared_solver_answers_budgets_in_any_order_and_at_once(self):
        curves, budgets = large_problem(kinds=3)
        solver = Solver(curves, ("a", "b", "c"))
        asked = [tuple(b * k // 9 for b in budgets) for k in (9, 1, 5, 9, 2, 1, 7, 3)]
        expected = [solve(curves, b) for b in asked]
        assert [solver.solve(b) for b in asked] == expected
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(solver.solve, asked * 3)) == expected * 3
        with pytest.raises(BudgetError, match="Expected 3 budgets, got 1"):
            solver.solve((1,))

    @pytest.mark.parametrize("effort", [0, 1_000, 30_000])
    def test_with_little_effort_the_gap_is_proven(self, effort):
        curves, budgets = large_problem(kinds=7)
        best = solve(curves, budgets)
        assert best.exact
        hurried = solve(curves, budgets, effort=effort)
        check(hurried, curves, budgets)
        assert hurried.value <= best.value * (1 + CLOSE)
        assert hurried.bound >= best.value * (1 - CLOSE)
        assert hurried.gap < 1e-2

    def test_little_effort_is_not_called_exact(self):
        assert not solve(*large_problem(kinds=7), effort=0).exact

    @pytest.mark.parametrize("max_gap", [0.01, 0.0003])
    def test_a_permitted_gap_is_kept(self, max_gap):
        curves, budgets = large_problem(kinds=7)
        found = solve(curves, budgets, max_gap=max_gap)
        check(found, curves, budgets)
        assert found.gap <= max_gap
        assert found.bound >= solve(curves, budgets).value * (1 - CLOSE)

    def test_proportional_budgets_are_one(self):
        curves, (budget, *_) = large_problem(kinds=1)
        alone = [replace(c, unit_cost=c.unit_cost[:1]) for c in curves]
        tripled = [
            replace(c, unit_cost=tuple(k * c.unit_cost[0] for k in (1, 3, 5))) for c in curves
        ]
        found = solve(tripled, (budget, 3 * budget + 1, 5 * budget + 2))
        assert found.units == solve(alone, (budget,)).units


def large_problem(kinds: int) -> tuple[list[Curve], tuple[int, ...]]:
    """Layers of several kinds, whose costs in three resources are not proportional."""
    rng = np.random.default_rng(17)
    curves = []
    for layer in range(29):
        cost = tuple(int(c) for c in np.random.default_rng(layer % kinds).integers(11, 97, 3))
        for width, units in ((1, 32), (2, 16)):
            steps = np.sort(rng.lognormal(rng.normal(), 1.0, units))[::-1]
            values = np.concatenate([[0.0], np.cumsum(steps)])
            curves.append(Curve(values, tuple(width * c for c in cost), multiple_of=8 // width))
    full = [sum(c.unit_cost[r] * (len(c.values) - 1) for c in curves) for r in range(3)]
    return curves, tuple(f * 47 // 100 for f in full)


class TestByHand:
    def test_one_budget(self):
        # Densities 6, 2 at cost 1 and 5, 4 at cost 2: with 5 to spend, 6 + 10 + 8 = 24 beats the
        # rest.
        curves = [curve(0, 6, 8), curve(0, 10, 18, cost=(2,))]
        assert solve(curves, (5,)) == Solution((1, 2), 24.0, 24.0, (5,), True)

    def test_an_indivisible_step_is_passed_over(self):
        # By density the step of cost 3 comes first and leaves 1 unspent; two of cost 2 are better.
        curves = [curve(0, 10, cost=(3,)), curve(0, 6, cost=(2,)), curve(0, 6, cost=(2,))]
        assert solve(curves, (4,)).units == (0, 1, 1)

    def test_a_whole_head_is_allowed_whatever_its_width(self):
        values = np.arange(12.0)
        whole = Curve(values, (1,), multiple_of=8)
        assert whole.allowed().tolist() == [0, 8, 11]
        assert solve([whole], (11,)).units == (11,)
        assert solve([whole], (10,)).units == (8,)
        assert replace(whole, ceiling=10).allowed().tolist() == [0, 8]
        assert replace(whole, floor=9).allowed().tolist() == [11]

    def test_ties_share_units(self):
        curves = [curve(0, 5, 9, 9, tie=0), curve(0, 1, 2, 9, tie=0), curve(0, 3, 6, 9)]
        # Tied they are worth 0, 6, 11, 18 at a cost of 2 a unit: free, 7 units would go elsewhere.
        found = solve(curves, (7,))
        assert found.units == (3, 3, 1)
        assert found.value == 21

    def test_per_model_tie(self):
        curves = [curve(0, 2, 3, 4, tie="model") for _ in range(5)]
        assert solve(curves, (14,)).units == (2,) * 5

    def test_a_worthless_unit_is_not_bought(self):
        assert solve([curve(0, 4, 4, 3)], (3,)).units == (1,)

    def test_a_free_unit_is_taken(self):
        curves = [curve(0, 1, 2, cost=(0, 0)), curve(0, 9, cost=(1, 2))]
        assert solve(curves, (0, 1)).units == (2, 0)

    def test_no_curves(self):
        assert solve([], (3, 5)) == Solution((), 0.0, 0.0, (0, 0), True)

    def test_costs_are_counted_without_rounding(self):
        huge = 2**53
        curves = [curve(0, 1, cost=(huge + 1,)), curve(0, 1, cost=(huge,)), curve(0, 1, cost=(3,))]
        assert solve(curves, (2 * huge + 3,)).units in {(1, 0, 1), (0, 1, 1)}
        assert solve(curves, (2 * huge + 4,)).units == (1, 1, 1)


class TestNegativeControls:
    def test_greedy_is_worse_with_several_budgets(self):
        # The first is worth most per share of the budgets, but leaves no room for any other.
        curves = [
            curve(0, 10, cost=(5, 5)),
            curve(0, 9, cost=(3, 7)),
            curve(0, 8, cost=(6, 3)),
        ]
        budgets = (10, 10)
        assert plain_greedy(curves, budgets) == 10
        found = solve(curves, budgets)
        assert (found.units, found.value) == ((0, 1, 1), exhaustive(curves, budgets))

    def test_without_the_search_optima_are_missed(self, monkeypatch):
        """The same comparison fails when the search claims, wrongly, to have found nothing."""
        monkeypatch.setattr(knapsack, "search", lambda *given: SearchResult(None, given[2]))
        rng = np.random.default_rng(5)
        missed = 0
        for _ in range(50):
            curves = [
                Curve(rng.normal(size=5).cumsum(), tuple(map(int, rng.integers(1, 9, 2))))
                for _ in range(4)
            ]
            missed += solve(curves, (23, 19)).value < exhaustive(curves, (23, 19)) - CLOSE
        assert missed > 0


def plain_greedy(curves: list[Curve], budgets: tuple[int, ...]) -> float:
    """One unit at a time where the gain per share of the budgets is largest, while it fits."""
    units, left = [0] * len(curves), np.array(budgets)
    while True:
        best, where = 0.0, None
        for c, (one, u) in enumerate(zip(curves, units, strict=True)):
            if u + 1 < len(one.values) and (np.array(one.unit_cost) <= left).all():
                gain = (one.values[u + 1] - one.values[u]) / (
                    one.unit_cost / np.array(budgets)
                ).sum()
                if gain > best:
                    best, where = gain, c
        if where is None:
            return float(sum(c.values[u] for c, u in zip(curves, units, strict=True)))
        units[where] += 1
        left = left - np.array(curves[where].unit_cost)


class TestErrors:
    def test_a_budget_too_small_is_named(self):
        curves = [curve(0, 1, 2, cost=(3, 5), floor=1), curve(0, 1, cost=(1, 7), floor=1)]
        with pytest.raises(BudgetError, match=r"KV bytes is 11, but .* costs 12: raise"):
            solve(curves, (4, 11), resources=("parameters", "KV bytes"))
        with pytest.raises(BudgetError, match=r"resource 0 is 3, but .* costs 4"):
            solve(curves, (3, 12))
        assert solve(curves, (4, 12)).units == (1, 1)

    def test_nothing_allowed(self):
        with pytest.raises(BudgetError, match="No number of units is allowed for curve 0"):
            solve([curve(*range(20), floor=9, ceiling=15, multiple_of=8)], (99,))
        curves = [curve(*range(6), floor=4, tie=0), curve(*range(4), tie=0)]
        with pytest.raises(BudgetError, match="2 curves tied as 0 together"):
            solve(curves, (99,))

    @pytest.mark.parametrize(
        ("curves", "budgets", "said"),
        [
            ([curve(0, np.nan)], (1,), "Curve 0 must hold a finite value"),
            ([curve(0, np.inf)], (1,), "Curve 0 must hold a finite value"),
            ([curve()], (1,), "Curve 0 must hold a finite value"),
            ([curve(0, 1), curve(0, 1, cost=(1, 2))], (1,), "Curve 1 .* each of 1 budgets"),
            ([curve(0, 1, cost=(-1,))], (1,), "non-negative unit cost"),
            ([curve(0, 1, floor=-1)], (1,), "floor of at least 0"),
            ([curve(0, 1, multiple_of=0)], (1,), "multiple of at least 1"),
            ([curve(0, 1)], (), "at least one budget"),
            ([curve(0, 1)], (-1,), "budget for resource 0 is -1"),
            ([curve(0, 1, cost=(2**61 - 1,)), curve(0, 1, cost=(2**62,))], (2**62,), "less than 2"),
        ],
    )
    def test_bad_input(self, curves, budgets, said):
        with pytest.raises(BudgetError, match=said):
            solve(curves, budgets)


@pytest.mark.slow
def test_one_budget_does_not_import_scipy():
    code = (
        "import sys, numpy as np; from headwise.planning.solver import Curve, solve;"
        "solve([Curve(np.sqrt(np.arange(9.)), (c,)) for c in (2, 3)], (11,));"
        "assert 'scipy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
