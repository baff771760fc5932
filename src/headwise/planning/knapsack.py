"""The knapsack behind the solver: one option of every item, of highest total gain within the room.

Three ideas close in on the optimum:

    bound ───────────────────────   relaxation: what the room would buy if steps were divisible
      │  gap: what may be missing   search: dynamic programming over the few options that matter
    plan  ───────────────────────   greedy: whole steps, best gain per price first

The relaxation puts a price λ on a unit of each resource. For any λ ≥ 0 no plan is worth more than

    bound = λ·room + Σ_items max_j (gain_j − λ·cost·steps_j)

(weak Lagrangian duality), so the bound never depends on how well λ was found. Relative to these
prices a plan's gain is the bound minus what it wastes:

    gain = bound − Σ_items waste_j − λ·(room left over),     waste_j ≥ 0.

Given a plan that misses the bound by `gap`, an option that alone wastes as much is in no better
plan (reduced-cost fixing). What survives is the *reduced core* of an item, typically a few options
around the margin, and these are searched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float, Int

EFFORT = 5_000_000
"""Pairs of states and options that the search may look at, a few seconds' worth; a bound on work
that, unlike a time limit, gives the same answer on every machine."""

MAX_STATES = 4_000_000
MAX_JOINED = 4_000_000
"""Most pairs of states and options, or of options to be joined, in one step: memory bounds."""

MIXER = 0x1E3779B97F4A7C15
"""An odd number that spreads rooms over 64 bits, so that equal ones can be brought together by one
sort; rooms that collide are still told apart."""


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One choice: `steps[j]` steps are worth `gains[j]`; both start at 0 and increase strictly."""

    steps: Int[np.ndarray, " options"]
    gains: Float[np.ndarray, " options"]
    concave: bool  # steps 0, 1, 2, …, and no step gains more than the one before


@dataclass(frozen=True, slots=True)
class Knapsack:
    """Items, what a step of each costs, and the room for all of them."""

    items: tuple[Item, ...]
    cost: Int[np.ndarray, "items resources"]
    room: Int[np.ndarray, " resources"]

    def gain(self, options: Int[np.ndarray, " items"]) -> float:
        """What these options are worth together."""
        return math.fsum(float(one.gains[o]) for one, o in zip(self.items, options, strict=True))


def optimum(
    knapsack: Knapsack, fixed: float, max_gap: float, noise: float, effort: int
) -> tuple[list[int], float]:
    """The option of every item, and by how much the optimum may be better.

    `max_gap` is relative to the gain plus what is `fixed`; differences below `noise` are ignored.
    """
    if not knapsack.items:
        return [], 0.0
    relaxed = relaxation(knapsack)
    options = _greedy(knapsack, relaxed)
    gain = knapsack.gain(options)
    bound = max(relaxed.bound, gain)
    for part in (effort // 25, effort // 5, effort):
        enough = max(noise, max_gap * max(abs(fixed + gain), abs(fixed + bound)))
        gap = relaxed.bound - gain - enough
        if bound - gain <= enough or gap <= 0:
            break
        found = search(knapsack, relaxed, gap, part)
        if found.options is not None:
            options, gain = found.options, knapsack.gain(found.options)
        bound = max(gain, min(bound, relaxed.bound - found.least_unseen))
    return options.tolist(), bound - gain


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Prices, the bound they prove, and the option of each item in a plan near the optimum."""

    prices: Float[np.ndarray, " resources"]
    bound: float
    start: Int[np.ndarray, " items"]


@dataclass(frozen=True, slots=True)
class _HullSteps:
    """The steps along every item's concave hull: gain, cost, the item, and the option reached."""

    gain: Float[np.ndarray, " rises"]
    cost: Int[np.ndarray, "rises resources"]
    item: Int[np.ndarray, " rises"]
    option: Int[np.ndarray, " rises"]


def relaxation(knapsack: Knapsack) -> Relaxation:
    """The relaxed optimum of a knapsack with at least one item and one resource.

    The best prices are the dual of the linear relaxation over the steps of each item's concave
    hull. With one budget the price is read off the steps sorted by gain per cost (Dantzig): it is
    set by the first that does not fit. With several, a linear program decides.
    """
    rises, one = _hull_steps(knapsack), len(knapsack.room) == 1
    prices, taken = _one_price(rises, knapsack) if one else _several_prices(rises, knapsack)
    profit = rises.gain - rises.cost @ prices
    bound = float(prices @ knapsack.room) + float(profit[profit > 0].sum())
    start = np.zeros(len(knapsack.items), dtype=np.int64)
    np.maximum.at(start, rises.item[taken], rises.option[taken])
    return Relaxation(prices, bound, start)


def _hull_steps(knapsack: Knapsack) -> _HullSteps:
    corners = [_hull(item) for item in knapsack.items]
    owner = np.repeat(np.arange(len(corners)), [len(c) - 1 for c in corners])
    pairs = list(zip(knapsack.items, corners, strict=True))
    gain = np.concatenate([np.diff(item.gains[c]) for item, c in pairs])
    width = np.concatenate([np.diff(item.steps[c]) for item, c in pairs])
    option = np.concatenate([c[1:] for c in corners])
    return _HullSteps(gain, knapsack.cost[owner] * width[:, None], owner, option)


def _hull(item: Item) -> Int[np.ndarray, " corners"]:
    """The options on the upper concave hull (Andrew's monotone chain)."""
    if item.concave:
        return np.arange(len(item.steps))
    steps, gains = item.steps.tolist(), item.gains.tolist()
    corners = [0]
    for j in range(1, len(steps)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (gains[b] - gains[a]) * (steps[j] - steps[a]) > (gains[j] - gains[a]) * (
                steps[b] - steps[a]
            ):
                break
            corners.pop()
        corners.append(j)
    return np.array(corners)


def _falling(
    density: Float[np.ndarray, " rises"], rises: _HullSteps
) -> Float[np.ndarray, " rises"]:
    """Densities that never rise within an item.

    On a hull they do not, but for round-off, and a stable sort then keeps an item's steps in turn:
    taking the k best of them is taking its first k.
    """
    starts = np.flatnonzero(np.diff(rises.item, prepend=-1))
    parts = np.split(density, starts[1:])
    return np.concatenate([np.minimum.accumulate(part) for part in parts])


def _one_price(
    rises: _HullSteps, knapsack: Knapsack
) -> tuple[Float[np.ndarray, " 1"], Int[np.ndarray, " _"]]:
    """The price for one budget, and the steps that fit before the one that sets it."""
    density = _falling(rises.gain / rises.cost[:, 0], rises)
    order = np.argsort(-density, kind="stable")
    fits = int(np.count_nonzero(np.cumsum(rises.cost[order, 0]) <= knapsack.room[0]))
    return density[order[fits : fits + 1]], order[:fits]


@dataclass(frozen=True, slots=True)
class _Kind:
    """All steps whose cost points in one direction, best first, as one concave curve.

    The relaxation cannot tell them apart: `amount` of the direction buys `gain`.
    """

    direction: Float[np.ndarray, " resources"]
    rises: Int[np.ndarray, " rises"]
    density: Float[np.ndarray, " rises"]
    amount: Float[np.ndarray, " rises+1"]
    gain: Float[np.ndarray, " rises+1"]


def _kinds(rises: _HullSteps, knapsack: Knapsack) -> list[_Kind]:
    """The steps sorted into kinds; directions are shares of the room."""
    factor = np.gcd.reduce(knapsack.cost, axis=1)
    directions, kind_of_item = np.unique(
        knapsack.cost // factor[:, None], axis=0, return_inverse=True
    )
    kind = kind_of_item[rises.item]
    axis = np.argmax(directions, axis=1)
    amount = rises.cost[np.arange(len(kind)), axis[kind]] / directions[kind, axis[kind]]
    density = _falling(rises.gain / amount, rises)
    order = np.lexsort((-density, kind))
    kinds = []
    for direction, part in zip(
        directions, np.split(order, np.cumsum(np.bincount(kind))[:-1]), strict=True
    ):
        total = [np.concatenate([[0.0], np.cumsum(x[part])]) for x in (amount, rises.gain)]
        kinds.append(_Kind(direction / knapsack.room, part, density[part], *total))
    return kinds


def _several_prices(
    rises: _HullSteps, knapsack: Knapsack
) -> tuple[Float[np.ndarray, " resources"], Int[np.ndarray, " _"]]:
    """Prices for several budgets, and the whole steps in the optimum of the linear program.

    A program with every step as a variable is slow, and only the steps near the margin decide. Each
    kind of step starts in a few coarse pieces. The prices found say where each curve breaks (its
    density falls below the price of its direction); pieces are split there, finer the nearer, and
    the program is solved again until every break is the end of a piece: then no piece is worth
    splitting and the prices are those of the full program.
    """
    kinds = _kinds(rises, knapsack)
    ends = [np.unique(np.linspace(0, len(k.density), 9).astype(np.int64)) for k in kinds]
    near = np.concatenate([[0], 2 ** np.arange(20), -(2 ** np.arange(20))])
    scale = float(np.median(np.concatenate([k.density / k.direction.sum() for k in kinds])))
    best, prices, amounts = np.inf, np.zeros(len(knapsack.room)), np.zeros(len(kinds))
    for _ in range(20):
        trial, trial_amounts = _program(kinds, ends, scale)
        value, settled = float(trial.sum()), True
        for k, kind in enumerate(kinds):
            price = float(trial @ kind.direction)
            at = int(np.count_nonzero(kind.density > price))
            value += float(kind.gain[at]) - price * float(kind.amount[at])
            if at not in ends[k]:
                settled = False
                ends[k] = np.union1d(ends[k], np.clip(at + near, 0, len(kind.density)))
        if value < best:
            best, prices, amounts = value, trial, trial_amounts
        if settled:
            break
        scale = float(trial.max()) or scale
    return np.asarray(prices / knapsack.room), _whole(kinds, amounts, rises, knapsack)


def _whole(
    kinds: list[_Kind], amounts: Float[np.ndarray, " kinds"], rises: _HullSteps, knapsack: Knapsack
) -> Int[np.ndarray, " _"]:
    """The steps of each kind that its amount pays for in full, less the program's round-off."""
    for share in (1e-9, 1e-6, 1e-3):
        taken = np.concatenate(
            [
                kind.rises[: int(np.searchsorted(kind.amount, most, side="right")) - 1]
                for kind, most in zip(kinds, (1 - share) * amounts + 1e-12, strict=True)
            ]
        )
        if (rises.cost[taken].sum(axis=0) <= knapsack.room).all():
            return taken
    return np.zeros(0, dtype=np.int64)


def _program(
    kinds: list[_Kind], ends: list[Int[np.ndarray, " _"]], scale: float
) -> tuple[Float[np.ndarray, " resources"], Float[np.ndarray, " kinds"]]:
    """Prices per whole budget, and the amount bought of each kind, with pieces that end at `ends`.

    The solver's tolerances are absolute: each variable is scaled to a cost near 1, and gains by the
    expected price.
    """
    from scipy.optimize import linprog

    pieces = [len(e) - 1 for e in ends]
    amount = np.concatenate([np.diff(k.amount[e]) for k, e in zip(kinds, ends, strict=True)])
    gain = np.concatenate([np.diff(k.gain[e]) for k, e in zip(kinds, ends, strict=True)])
    direction = np.repeat([k.direction for k in kinds], pieces, axis=0)
    size = direction.sum(axis=1)
    worth = gain / (amount * size * scale)
    solution = linprog(
        -np.minimum(worth, 1e6),
        A_ub=(direction / size[:, None]).T,
        b_ub=np.ones(direction.shape[1]),
        bounds=[(0.0, most) for most in (amount * size).tolist()],
        method="highs",
    )
    if solution.status != 0:  # no prices: the bound is valid, if loose
        return np.zeros(direction.shape[1]), np.zeros(len(kinds))
    bought = np.add.reduceat(solution.x / size, np.cumsum([0, *pieces[:-1]]))
    return np.maximum(-solution.ineqlin.marginals, 0.0) * scale, bought


def _greedy(knapsack: Knapsack, relaxed: Relaxation) -> Int[np.ndarray, " items"]:
    """The relaxed plan and more steps, best gain per price first, until no next option fits."""
    options = relaxed.start.copy()
    steps = np.array([one.steps[o] for one, o in zip(knapsack.items, options, strict=True)])
    left = knapsack.room - steps @ knapsack.cost
    assert (left >= 0).all()
    free = 1e-9 * float(relaxed.prices.max()) or 1.0  # nothing is quite free
    prices = np.maximum(relaxed.prices, free)
    ahead = np.zeros(len(options), dtype=np.int64)  # steps to the next option; 0 if there is none
    worth = np.zeros(len(options))

    def look(i: int) -> None:
        one, o = knapsack.items[i], options[i]
        last = o + 1 == len(one.steps)
        ahead[i] = 0 if last else one.steps[o + 1] - one.steps[o]
        price = float((ahead[i] * knapsack.cost[i]) @ prices)
        worth[i] = 0.0 if last else (one.gains[o + 1] - one.gains[o]) / price

    for i in range(len(options)):
        look(i)
    while True:
        fits = (ahead > 0) & (ahead[:, None] * knapsack.cost <= left).all(axis=1)
        if not fits.any():
            return options
        i = int(np.argmax(np.where(fits, worth, -1.0)))
        left = left - ahead[i] * knapsack.cost[i]
        options[i] += 1
        look(i)


@dataclass(frozen=True, slots=True)
class Core:
    """The surviving options of one item, or of several together: what each costs and wastes.

    `picks[j]` are the options of `items` that make the joint option j. The options of a *chain*
    cost more from one to the next, in every resource, and are worth more.
    """

    items: tuple[int, ...]
    picks: Int[np.ndarray, "options items"]
    cost: Int[np.ndarray, "options resources"]
    waste: Float[np.ndarray, " options"]
    chain: bool = True

    @property
    def least(self) -> Int[np.ndarray, " resources"]:
        """What even the cheapest option needs."""
        return np.asarray(self.cost[0] if self.chain else self.cost.min(axis=0))

    @property
    def span(self) -> Int[np.ndarray, " resources"]:
        """What the dearest option needs beyond the cheapest."""
        most = self.cost[-1] if self.chain else self.cost.max(axis=0)
        return np.asarray(most - self.least)


def _item_cores(knapsack: Knapsack, relaxed: Relaxation, gap: float) -> list[Core]:
    """The options of every item that waste less than the gap (the best one wastes nothing)."""
    cores = []
    reach = _reach(knapsack)
    for i, item in enumerate(knapsack.items):
        profit = item.gains - (knapsack.cost[i] @ relaxed.prices) * item.steps
        waste = profit.max() - profit
        low, high = 0, len(waste)
        if reach is not None:
            low, high = max(int(relaxed.start[i]) - reach, 0), int(relaxed.start[i]) + reach + 1
        alive = low + np.flatnonzero(waste[low:high] < gap)
        cost = item.steps[alive][:, None] * knapsack.cost[i]
        cores.append(Core((i,), alive[:, None], cost, waste[alive]))
    return cores


def reduced_cores(knapsack: Knapsack, relaxed: Relaxation, gap: float, effort: int) -> list[Core]:
    """The cores of all items; with several resources, those of proportional costs are joined.

    Along one direction of cost, of two joint options either one is dominated or it costs more and
    is worth more. A value dimension and a query-key plane, which costs twice as much of everything,
    are thereby one core per kind of layer. Cores too large to be joined within the effort stay.
    """
    cores, prices = _item_cores(knapsack, relaxed, gap), relaxed.prices
    if len(prices) == 1:
        return cores
    pairs = min(MAX_JOINED, 1_000 + 2 * effort // (1 + sum(len(core.waste) > 1 for core in cores)))
    open_cores: dict[tuple[int, ...], Core] = {}
    done = []
    for core in cores:
        span = core.span
        direction = tuple((span // max(int(np.gcd.reduce(span)), 1)).tolist())
        other = open_cores.pop(direction, None)
        if other is not None and len(other.waste) * len(core.waste) <= pairs:
            open_cores[direction] = _join(other, core, prices, gap)
        else:
            open_cores[direction] = core
            if other is not None:
                done.append(other)
    return [*done, *open_cores.values()]


def _join(a: Core, b: Core, prices: Float[np.ndarray, " resources"], gap: float) -> Core:
    """The undominated pairs of options of two cores whose costs are proportional."""
    i, j = np.nonzero(a.waste[:, None] + b.waste < gap)
    cost, waste = a.cost[i] + b.cost[j], a.waste[i] + b.waste[j]
    gain = cost @ prices - waste
    order = np.lexsort((-gain, cost.sum(axis=1)))
    kept = order[running_maxima(gain[order])]
    picks = np.concatenate([a.picks[i[kept]], b.picks[j[kept]]], axis=1)
    return Core(a.items + b.items, picks, cost[kept], waste[kept])


def _reach(knapsack: Knapsack) -> int | None:
    """How many steps from the relaxed plan some optimum of a concave one-budget knapsack lies.

    Turn one plan into the other a step at a time, adding while there is room and removing while
    there is none: the room stays within ±Δ, the largest cost of a step. After 2Δ + 1 steps it must
    have repeated, and what happened in between cost nothing; the relaxed plan being optimal, it
    gained nothing either and can be left out. (Eisenbrand and Weismantel, 2018, for one row.)
    Without this, curves of equal gain per cost would leave every option in the core.
    """
    if len(knapsack.room) > 1 or not all(item.concave for item in knapsack.items):
        return None
    return 2 * int(knapsack.cost.max()) + 2


def running_maxima(values: Float[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """Where a value exceeds every one before it."""
    before = np.concatenate([[-np.inf], np.maximum.accumulate(values)[:-1]])[: len(values)]
    return values > before


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best plan below the gap (None: there is none), and the least waste of any plan unseen."""

    options: Int[np.ndarray, " items"] | None
    least_unseen: float


@dataclass(frozen=True, slots=True)
class _States:
    """Partial plans: room left, waste so far, least waste when completed; and where from."""

    left: Int[np.ndarray, "states resources"]
    waste: Float[np.ndarray, " states"]
    least: Float[np.ndarray, " states"]
    parent: Int[np.ndarray, " states"]
    option: Int[np.ndarray, " states"]

    def __getitem__(self, kept: np.ndarray) -> _States:
        return _States(
            self.left[kept],
            self.waste[kept],
            self.least[kept],
            self.parent[kept],
            self.option[kept],
        )


def search(knapsack: Knapsack, relaxed: Relaxation, gap: float, effort: int) -> SearchResult:
    """The plan of least waste below `gap`, looking at about `effort` (state, option) pairs."""
    cores = reduced_cores(knapsack, relaxed, gap, effort)
    return search_cores(cores, knapsack.room, relaxed.prices, gap, effort)


def search_cores(
    cores: list[Core],
    room: Int[np.ndarray, " resources"],
    prices: Float[np.ndarray, " resources"],
    gap: float,
    effort: int,
) -> SearchResult:
    """The option of every item, of least waste below `gap`; every item is in one core.

    Dynamic programming: states (room left, waste so far) are extended core by core. A state is
    dropped when its waste, plus the price of the room that the remaining cores cannot use up,
    reaches the gap, or when another state is as good in everything. If there are too many states,
    the least wasteful are kept and the least waste among the others is remembered: the optimum is
    then proven up to that.
    """
    left = room - np.sum([core.least for core in cores], axis=0)
    if (left < 0).any():
        return SearchResult(None, gap)
    options = np.zeros(sum(len(core.items) for core in cores), dtype=np.int64)
    for core in cores:
        options[list(core.items)] = core.picks[0]
    cores = _ordered([core for core in cores if len(core.waste) > 1], room)
    if not cores:
        return SearchResult(options if float(left @ prices) < gap else None, gap)
    usable = np.sum([core.span for core in cores], axis=0)
    width = effort // sum(len(core.waste) for core in cores) + 1
    none = np.zeros(1, dtype=np.int64)
    states = _States(left[None], np.zeros(1), np.zeros(1), none, none)
    least_unseen, history = gap, []
    for core, following in pairwise(cores):
        usable = usable - core.span
        states = _undominated(_extended(states, core, usable, prices, gap), prices)
        pairs = MAX_STATES // len(following.waste) + 1
        states, lost = _narrowed(states, width if following is cores[-1] else min(width, pairs))
        least_unseen = min(least_unseen, lost)
        history.append((states.parent, states.option))
    if cores[-1].chain:
        states = _finished(states, cores[-1], prices)
    else:
        states = _extended(states, cores[-1], np.zeros_like(usable), prices, gap)
    if len(states.least) == 0 or states.least.min() >= gap:
        return SearchResult(None, least_unseen)
    at = int(np.argmin(states.least))
    history.append((states.parent, states.option))
    for core, (parent, option) in zip(reversed(cores), reversed(history), strict=True):
        options[list(core.items)] = core.picks[option[at]]
        at = int(parent[at])
    return SearchResult(options, least_unseen)


def _ordered(cores: list[Core], room: Int[np.ndarray, " resources"]) -> list[Core]:
    """The order of search.

    Cores that span much come first, so that the rest can be seen not to use up what is left. The
    one with the most options comes last, where of a chain the largest option that fits is the best.
    """

    def span(core: Core) -> float:
        return float((core.span / room).max())

    cores = sorted(cores, key=span, reverse=True)
    if cores:
        cores.append(cores.pop(max(range(len(cores)), key=lambda c: len(cores[c].waste))))
    return cores


def _extended(
    states: _States,
    core: Core,
    usable: Int[np.ndarray, " resources"],
    prices: Float[np.ndarray, " resources"],
    gap: float,
) -> _States:
    """Every state with every option, as long as it fits and may still end below the gap."""
    parent, option = np.nonzero(states.waste[:, None] + core.waste < gap)
    left = states.left[parent] - (core.cost - core.least)[option]
    fits = (left >= 0).all(axis=1)
    parent, option, left = parent[fits], option[fits], left[fits]
    waste = states.waste[parent] + core.waste[option]
    least = waste + np.maximum(left - usable, 0) @ prices
    return _States(left, waste, least, parent, option)[least < gap]


def _finished(states: _States, core: Core, prices: Float[np.ndarray, " resources"]) -> _States:
    """Each state with the largest option of the last item that fits: the more the better."""
    cost = core.cost - core.cost[0]
    option = np.full(len(states.waste), len(core.waste) - 1)
    for r in range(cost.shape[1]):
        option = np.minimum(option, np.searchsorted(cost[:, r], states.left[:, r], "right") - 1)
    left = states.left - cost[option]
    waste = states.waste + core.waste[option]
    return _States(left, waste, waste + left @ prices, np.arange(len(waste)), option)


def _undominated(states: _States, prices: Float[np.ndarray, " resources"]) -> _States:
    """Without states that another equals or beats in value and in every room left.

    With several resources only states of equal room are compared.
    """
    if states.left.shape[1] == 1:
        value = -(states.waste + states.left @ prices)
        order = np.lexsort((-value, -states.left[:, 0]))
        return states[order[running_maxima(value[order])]]
    mixed = states.left[:, 0].copy()
    for column in states.left.T[1:]:
        mixed *= MIXER
        mixed += column
    order = np.lexsort((states.waste, mixed))
    left = states.left[order]
    fresh = np.concatenate([[True], (left[1:] != left[:-1]).any(axis=1)])[: len(order)]
    return states[order[fresh]]


def _narrowed(states: _States, width: int) -> tuple[_States, float]:
    """The `width` most promising states, and the least waste of the rest."""
    if len(states.waste) <= width:
        return states, np.inf
    order = np.argsort(states.least, kind="stable")
    return states[np.sort(order[:width])], float(states.least[order[width]])
