"""W_O of a cut layer by regression, with one of two aims.

    attention   what the dense attention gave
    state       that, and what the layers before have lost: h_dense + attended − h_cut

Tokens count in inverse proportion to their state's square, as in `layer_task.missed`; without that
the few very long ones decide alone, and the second aim loses (SmolLM2 at 50%, layer 6: 0.0212 of
the output missed with the first aim, 0.0209 with the second; 0.0213 with the second unweighted).
Whether W_O can reach the state depends on the family, for a norm may lie between: the layer itself
is asked, on batches kept aside. Where there are none, the aim is the attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.compress.attended import before_output
from headwise.compress.layer_task import LayerTask, size
from headwise.compress.refit import OutputRegression, chosen_ridge
from headwise.nn.backbones_headwise import Weights

FEW_TOKENS_RIDGE = 1.0  # where no batch can be kept aside to choose it


@dataclass(frozen=True, slots=True)
class Refit:
    """Refitted weights, with which aim and ridge; what they miss of the layer's output."""

    weights: Weights
    aim: str
    ridge: float
    error: float | None  # None: no batch to ask

    @property
    def record(self) -> dict[str, str | float | None]:
        """JSON-ready."""
        return {"aim": self.aim, "ridge": self.ridge, "unseen_error": self.error}


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of one regression, over the batches that are used and over those kept aside."""

    used: OutputRegression
    aside: OutputRegression

    @property
    def all(self) -> OutputRegression:
        """Over all batches."""
        return self.used + self.aside

    def ridge(self, start: tuple[Tensor, Tensor | None]) -> float:
        """The ridge that serves the batches kept aside."""
        return chosen_ridge(self.used, self.aside, start) if self.aside.power else FEW_TOKENS_RIDGE


@torch.no_grad()
def regressions(task: LayerTask, made: Weights) -> dict[str, Sums]:
    """The sums of both aims."""
    with_bias = "output" in made[1]
    found = {
        aim: Sums(OutputRegression(with_bias), OutputRegression(with_bias))
        for aim in ("attention", "state")
    }
    layer, aside, batches = task.layer(made), task.aside, task.batches
    for b, hidden in enumerate(batches.inputs):
        z = before_output(task.stream, layer, task.place, hidden, b)
        state = batches.dense_inputs[b] + batches.attended[b]
        weight = size(state).rsqrt()[..., None]
        for aim, y in (("attention", batches.attended[b]), ("state", state - hidden)):
            sums = found[aim].aside if b in aside else found[aim].used
            sums.add(z, y, weight)
    return found


def refitted(
    task: LayerTask, made: Weights, sums: dict[str, Sums], ridge: float | None = None
) -> Refit:
    """The weights with the W_O that serves best; a `ridge` of None is chosen."""
    candidates = []
    for aim, regression in sums.items():
        pull = regression.ridge(output(made)) if ridge is None else ridge
        W_O, b_O = regression.all.solution(*output(made), pull)
        weights = {**made[0], "output": W_O}, made[1] if b_O is None else made[1] | {"output": b_O}
        if not task.aside:
            return Refit(weights, aim, pull, None)
        candidates.append(Refit(weights, aim, pull, task.error(weights)))
    return min(candidates, key=lambda c: c.error or 0.0)


def output(weights: Weights) -> tuple[Tensor, Tensor | None]:
    """W_O and its bias."""
    return weights[0]["output"], weights[1].get("output")
