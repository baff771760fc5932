"""One attention layer that learns random labels by heart, and how many it holds.

Because only the last token is a query, its attention is computed alone:

    scores of head h   X·(W_K·W_Qᵀ·x)            values are mixed before they are projected, so a
    output             (weights·X)·W_V·W_O       step costs n·d per head and example, not n²·d_h
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.reproduce.claim import Trial, Values

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headwise.data.tasks import Memorization

RATE, WARM_UP = 1e-2, 20  # Adam's, which falls to zero; steps of its rise


def memorized(trial: Trial) -> Values:
    """Train on random batches of the examples; how many are right beyond guessing.

    Counted halfway as well: a number that still grows is no capacity.
    """
    import torch

    from headwise.data.tasks import Memorization

    torch.set_num_threads(1)
    p = trial.parameters
    task = Memorization(
        p["n"] + 1, p["d"], p["examples"], p["labels"],
        shared=p["kind"] == "shared", seed=trial.seed, label_seed=trial.seed,
    )  # fmt: skip
    model = single_query_attention(p["d"], p["heads"], p["width"], p["labels"], trial.seed)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    generator = torch.Generator().manual_seed(trial.seed)
    halfway = 0.0
    for step in range(p["steps"]):
        rise, fall = (step + 1) / WARM_UP, 1 - step / p["steps"]
        optimizer.param_groups[0]["lr"] = RATE * min(1, rise) * fall
        batch = task.sample(p["batch"], generator)
        logits = answers(model, batch.inputs, shared=task.shared)
        loss = torch.nn.functional.cross_entropy(logits, batch.targets[:, -1])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step + 1 == p["steps"] // 2:
            halfway = _held(model, task)
    return {"memorized": _held(model, task), "halfway": halfway, "examples": task.examples}


def single_query_attention(
    d: int, heads: int, width: int, outputs: int, seed: int
) -> nn.ParameterDict:
    """W_Q, W_K, W_V per head and the readout of all heads side by side."""
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape, generator=generator) / shape[-2] ** 0.5)

    return nn.ParameterDict(
        {
            "W_Q": drawn(heads, d, width),
            "W_K": drawn(heads, d, width),
            "W_V": drawn(heads, d, width),
            "W_O": drawn(heads * width, outputs),
        }
    )


def answers(model: nn.ParameterDict, X: Tensor, *, shared: bool = False) -> Tensor:
    """The readout at the last token, the query, which attends to the tokens before it.

    `shared`: these are the same in all examples, and read once.
    """
    import torch

    query = torch.einsum("bd,hdw->bhw", X[:, -1], model["W_Q"])
    toward = torch.einsum("bhw,hdw->bhd", query, model["W_K"])
    context = X[0, :-1] if shared else X[:, :-1]
    weights = (toward @ context.mT / query.shape[-1] ** 0.5).softmax(-1)
    z = torch.einsum("bhd,hdw->bhw", weights @ context, model["W_V"])
    logits: Tensor = z.flatten(1) @ model["W_O"]
    return logits


def _held(model: nn.ParameterDict, task: Memorization) -> float:
    """Examples that are right, beyond the share that guessing gets."""
    import torch

    everything, right = task.everything(), 0
    parts = [torch.split(x, 1000) for x in (everything.inputs, everything.targets[:, -1])]
    with torch.no_grad():
        for X, labels in zip(*parts, strict=True):
            chosen = answers(model, X, shared=task.shared).argmax(-1)
            right += int((chosen == labels).sum())
    share = (right / task.examples - task.chance) / (1 - task.chance)
    return share * task.examples
