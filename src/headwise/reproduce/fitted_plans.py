"""The plan fitted to a condition, and what it is worth to have that one and not another's.

The plan fitted to a condition is the one with the lowest loss there; adapting is worth what it
costs to use the plan fitted to another condition instead:

              plan A   plan B              worth of adapting = loss(here, their plan)
    here       1.00     1.10                                 − loss(here, own plan)
    there      0.90     0.80                               = 1.10 − 1.00

Choosing the lowest of several noisy losses flatters the choice, so plans are chosen by the other
seeds and scored on the seed left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headwise.reproduce.answers import Answer, larger
from headwise.reproduce.statistics import CONFIDENCE, paired_difference, summary

ENOUGH = 0.01  # of the yardstick: less does not pay
LEARNED = 0.9  # of a blind guess: above it nothing was learned that a plan could help with
Losses = Mapping[str, Sequence[float]]  # at every seed, by plan


@dataclass(frozen=True, slots=True)
class Fitted:
    """Losses in one condition, at every seed: of the plan fitted to another, and of its own."""

    other: Sequence[float]
    own: Sequence[float]

    def share(self, chance: float | None) -> float:
        """What adapting is worth, as a share of a blind guess's loss, or else of the own one."""
        return (summary(self.other).mean - summary(self.own).mean) / self._yardstick(chance)

    def pays(self, n_pairs: int, chance: float | None, blind: float | None = None) -> Answer:
        """Whether the other's loss is larger by more than is called equal.

        Near nothing a hundredth of a loss is a trifle, so that of a task is measured by what a
        guess loses. Where neither plan got past a blind guess, there is nothing to tell.
        """
        own, other = summary(self.own).mean, summary(self.other).mean
        if blind is not None and min(own, other) > LEARNED * blind:
            return "open"
        margin = ENOUGH * self._yardstick(chance) / other
        return larger(self.other, self.own, margin, _level(n_pairs))

    def _yardstick(self, chance: float | None) -> float:
        return summary(self.own).mean if chance is None else chance

    def interval(self, n_pairs: int) -> str:
        """The mean difference with its interval."""
        return str(paired_difference(self.other, self.own, confidence=_level(n_pairs)))


@dataclass(frozen=True, slots=True)
class Regret:
    """How far above the best plan: a share of a guess's loss on a task, of the best's on text."""

    share: float
    condition: str


def _level(n_pairs: int) -> float:
    return 1 - (1 - CONFIDENCE) / n_pairs


def chosen_plans(losses: Losses) -> list[str]:
    """For every seed, the plan with the lowest mean loss over the other seeds."""
    n = len(next(iter(losses.values())))

    def others(values: Sequence[float], left_out: int) -> float:
        kept = [v for i, v in enumerate(values) if i != left_out or n == 1]
        return summary(kept).mean

    return [min(losses, key=lambda plan: others(losses[plan], i)) for i in range(n)]


def fitted(here: Losses, there: Losses) -> Fitted:
    """The losses here of the plan fitted to `there` and of one's own; seed by seed."""
    own, theirs = chosen_plans(here), chosen_plans(there)
    seeds = range(len(own))
    return Fitted([here[theirs[i]][i] for i in seeds], [here[own[i]][i] for i in seeds])


def regrets(losses: Mapping[str, Losses], chances: Mapping[str, float]) -> dict[str, Regret]:
    """For every plan, where it is furthest above the best plan, by mean losses in hindsight."""
    found: dict[str, Regret] = {}
    for condition, of in losses.items():
        means = {plan: summary(values).mean for plan, values in of.items()}
        best = min(means.values())
        for plan, mean in means.items():
            share = (mean - best) / chances.get(condition, best)
            if plan not in found or share > found[plan].share:
                found[plan] = Regret(share, condition)
    return found
