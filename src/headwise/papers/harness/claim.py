"""What a claim is: experiments to run, a rule that judges them, and a figure.

    claim ──trials(size, seeds)──► trials ──run, anywhere──► values ──► result files
                                                                           │
            table, page ◄── Finding ◄── judge(results) ◄── whole seeds ◄───┤
                  figure ◄────────────── figure(results) ◄─────────────────┘

To add a claim, define a `Claim` in a file of ``claims/<paper>/`` and name it in
``claims.PLACES``. What its four functions may rely on:

- ``trials(size, seeds)`` lists independent experiments. Each one runs in one process and becomes
  one line on disk, so it should take minutes rather than hours. The same ``name`` at several seeds
  is one experiment repeated. An experiment without randomness ignores ``seeds`` and uses seed 0.
- ``run(trial)`` is a pure function of the trial, defined at module level (it is pickled by name).
  It leaves no files and no global state behind and draws every random number from ``trial.seed``
  and the parameters. It returns numbers, strings, lists and dicts (JSON, no NaN). It runs in
  another process with one torch thread, maybe on another machine, so heavy imports (torch) belong
  inside it. It raises ``Unavailable`` where the machine lacks what it needs.
- ``judge(results)`` and ``figure(results)`` see *whole seeds* only: a seed with a missing or failed
  trial is left out. So there are no gaps to handle, but there may be a single seed, or fewer than
  were asked for. They read results of any age and must not run anything. ``contrasts(results)``
  sees every finished trial, and its sentences stand below the finding even where no seed is whole.

Raise ``version`` whenever the numbers of a trial would change: older results are then ignored and
the trials run again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from headwise.reporting.charts import Chart

Size = Literal["quick", "full"]
Verdict = Literal[
    "holds", "holds in part", "does not hold", "cannot be tested here", "not finished"
]
Values = dict[str, Any]  # JSON
Cell = str | int | float | None


class ReproduceError(HeadwiseError):
    """A claim, a result folder or a cluster cannot be used as asked."""


class Unavailable(Exception):  # noqa: N818  (a state of the machine, not a mistake)
    """A trial needs what this machine does not have; the message says what."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One independent experiment; ``cost``, for the time left, is about its seconds on one core."""

    claim: str
    name: str
    seed: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    cost: float = 1.0

    def key(self, version: int) -> str:
        """A hash of everything that decides the numbers."""
        decides = [self.claim, version, self.name, self.seed, self.parameters]
        text = json.dumps(decides, sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def at_every_seed(
    claim: str,
    seeds: Sequence[int],
    experiments: Mapping[str, Mapping[str, Any]],
    cost: Callable[[Mapping[str, Any]], float] = lambda _: 1.0,
) -> list[Trial]:
    """Experiments (name: parameters) repeated over seeds; `cost` gives seconds by parameters."""
    return [
        Trial(claim, name, seed, parameters, cost(parameters))
        for seed in seeds
        for name, parameters in experiments.items()
    ]


@dataclass(frozen=True, slots=True)
class TrialResult:
    """A finished trial: what it measured, and how long that took."""

    trial: Trial
    values: Values
    seconds: float


@dataclass(frozen=True, slots=True)
class Results:
    """The finished trials of one claim, whole seeds only, in the order of ``trials``."""

    size: Size
    items: tuple[TrialResult, ...]

    def __iter__(self) -> Iterator[TrialResult]:
        return iter(self.items)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that are whole."""
        return tuple(sorted({r.trial.seed for r in self.items}))

    @property
    def names(self) -> tuple[str, ...]:
        """The experiments, each once, in order."""
        return tuple(dict.fromkeys(r.trial.name for r in self.items))

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The parameters of the first trial, for those that all trials share."""
        return self.items[0].trial.parameters

    def named(self, name: str) -> tuple[TrialResult, ...]:
        """One experiment at every seed, seeds ascending (so that two experiments pair up)."""
        found = [r for r in self.items if r.trial.name == name]
        return tuple(sorted(found, key=lambda r: r.trial.seed))

    def numbers(self, name: str, value: str) -> tuple[float, ...]:
        """One measured number of one experiment at every seed."""
        return tuple(float(r.values[value]) for r in self.named(name))

    def parameters_of(self, name: str) -> Mapping[str, Any]:
        """The parameters of one experiment."""
        return self.named(name)[0].trial.parameters

    def where(self, **parameters: Any) -> Results:
        """The trials with these parameters."""
        kept = [
            r
            for r in self.items
            if all(r.trial.parameters.get(k) == v for k, v in parameters.items())
        ]
        return Results(self.size, tuple(kept))

    def by(self, parameter: str, value: str) -> dict[Any, tuple[float, ...]]:
        """A measured number at every seed, by the values of one parameter in ascending order."""
        places = {self.parameters_of(n)[parameter]: n for n in self.names}
        return {place: self.numbers(name, value) for place, name in sorted(places.items())}


@dataclass(frozen=True, slots=True)
class ResultTable:
    """What was measured, for people; floats are rounded only when they are shown."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """What the results say about a claim; ``reasons`` are the sentences behind the verdict."""

    verdict: Verdict
    measured: str
    reasons: tuple[str, ...] = ()
    table: ResultTable | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of a paper that can be measured."""

    id: str
    statement: str  # the claim, as one sentence
    expected: str  # what the paper says or shows, with its numbers
    source: str  # where
    setting: str  # what it is measured on here, and what a seed draws
    version: int
    trials: Callable[[Size, Sequence[int]], Sequence[Trial]]
    run: Callable[[Trial], Values]
    judge: Callable[[Results], Finding]
    figure: Callable[[Results], Chart]
    # Sentences that hold of the trials there are, whole seeds or not; they decide nothing.
    contrasts: Callable[[Results], tuple[str, ...]] = lambda _: ()
    # Verdicts that the quick size may end with, asserted by the tests.
    quick_verdicts: tuple[Verdict, ...] = ()
