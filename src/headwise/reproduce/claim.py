"""What a claim is: experiments to run, a rule that judges them, and a figure.

    claim ──trials(size, seeds)──► trials ──run, anywhere──► values ──► result files
                                                                           │
            table, page ◄── Finding ◄── judge(results) ◄── whole seeds ◄───┤
                  figure ◄────────────── figure(results) ◄─────────────────┘

To add a claim, write one file in this room with a module-level ``CLAIM`` and name the file in
``registry.MODULES``. What the four functions may count on:

- ``trials(size, seeds)`` lists independent experiments; each is one process's work and one file on
  disk, so a trial should take minutes rather than hours. The same ``name`` at several seeds is one
  experiment repeated. What needs no randomness ignores ``seeds`` and uses seed 0.
- ``run(trial)`` is a pure function of the trial, at module level (it travels by name): no files
  left behind, no global state, every random number from ``trial.seed`` and the parameters. It
  returns numbers, strings, lists and dicts (JSON, no nan). It runs in another process with one
  torch thread, maybe on another machine; heavy imports (torch) belong inside it. Raising
  ``Unavailable`` says that this machine cannot run it.
- ``judge(results)`` and ``figure(results)`` see *whole seeds* only: a seed some trial of which is
  missing or failed is left out, so there are no holes to step around, but there may be a single
  seed, or fewer than asked for. They read result files of any age and must not run anything.

Change ``version`` whenever the numbers of a trial would change: older result files are then
ignored and run again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from headwise.errors import HeadwiseError

if TYPE_CHECKING:
    from headwise.report.charts import Chart

Size = Literal["quick", "full"]
Verdict = Literal[
    "holds", "holds in part", "does not hold", "cannot be tested here", "not finished"
]
Values = dict[str, Any]  # JSON
Cell = str | int | float | None


class ReproduceError(HeadwiseError):
    """A claim, a result folder or a cluster that cannot be used as asked."""


class Unavailable(Exception):  # noqa: N818  (a state of the machine, not a mistake)
    """Raised by a trial that needs what this machine does not have; the message says what."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One independent experiment. ``cost`` is about its seconds on one core: for the time left."""

    claim: str
    name: str
    seed: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    cost: float = 1.0

    def key(self, version: int) -> str:
        """The name of its result file: a hash of everything that decides the numbers."""
        decides = [self.claim, version, self.name, self.seed, self.parameters]
        text = json.dumps(decides, sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True, slots=True)
class Result:
    """A finished trial: what it measured, and how long that took."""

    trial: Trial
    values: Values
    seconds: float


@dataclass(frozen=True, slots=True)
class Results:
    """The finished trials of one claim, whole seeds only, in the order of ``trials``."""

    size: Size
    items: tuple[Result, ...]

    def __iter__(self) -> Iterator[Result]:
        return iter(self.items)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds there are."""
        return tuple(sorted({r.trial.seed for r in self.items}))

    @property
    def names(self) -> tuple[str, ...]:
        """The experiments, each once, in order."""
        return tuple(dict.fromkeys(r.trial.name for r in self.items))

    def named(self, name: str) -> tuple[Result, ...]:
        """One experiment at every seed, seeds ascending (so that two of them pair up)."""
        found = [r for r in self.items if r.trial.name == name]
        return tuple(sorted(found, key=lambda r: r.trial.seed))

    def numbers(self, name: str, value: str) -> tuple[float, ...]:
        """One measured number of one experiment at every seed."""
        return tuple(float(r.values[value]) for r in self.named(name))

    def where(self, **parameters: Any) -> Results:
        """The trials with these parameters."""
        kept = [
            r
            for r in self.items
            if all(r.trial.parameters.get(k) == v for k, v in parameters.items())
        ]
        return Results(self.size, tuple(kept))


@dataclass(frozen=True, slots=True)
class Table:
    """What was measured, for people; floats are rounded when shown, never before."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """What the results say about a claim; ``reasons`` are whole sentences behind the verdict."""

    verdict: Verdict
    measured: str
    reasons: tuple[str, ...] = ()
    table: Table | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of a paper that can be measured."""

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
    # Verdicts that the quick size may end with (asserted by the tests); empty: it says nothing.
    quick_verdicts: tuple[Verdict, ...] = ()
