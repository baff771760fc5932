"""Claim: an attention layer memorizes of the order of H·min(n, d_h) examples.

Examples are a query and a context of n white-noise tokens, with a random label; the number
memorized is what is right beyond guessing. There are more examples than any of the layers can hold,
or the curve would flatten for lack of examples.

Two kinds: every example with a context of its own, or one context for all and only the query
different. In the second kind a head's output is a mixture of n fixed tokens, so a head wider than n
*cannot* say more, and if it holds more, it was only easier to train; in the first kind it can.

Because only the last token is a query, its attention is computed alone:

    scores of head h   X·(W_K·W_Qᵀ·x)            values are mixed before they are projected, so a
    output             (weights·X)·W_V·W_O       step costs n·d per head and example, not n²·d_h
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headwise.papers.harness.charts import Axes, curves, panels, series
from headwise.papers.harness.claim import (
    Cell,
    Claim,
    Finding,
    Results,
    ResultTable,
    Size,
    Trial,
    Values,
    at_every_seed,
)
from headwise.papers.harness.judging import Answer, larger, line, summary, verdict

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headwise.papers.tasks.discrete import RandomLabels
    from headwise.reporting.charts import Chart

# --- the layer ---------------------------------------------------------------------------------

RATE, WARMUP = 1e-2, 20  # Adam's learning rate, which decays to zero; warmup steps


def train_and_count(trial: Trial) -> Values:
    """Train on random batches of the examples; how many are right beyond guessing.

    Counted halfway as well: a number that still grows is not a capacity.
    """
    import torch

    from headwise.papers.tasks.discrete import RandomLabels

    torch.set_num_threads(1)
    p = trial.parameters
    task = RandomLabels(
        p["n"] + 1, p["d"], p["examples"], p["labels"],
        shared=p["kind"] == "shared", seed=trial.seed, label_seed=trial.seed,
    )  # fmt: skip
    model = single_query_attention(p["d"], p["heads"], p["width"], p["labels"], trial.seed)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    generator = torch.Generator().manual_seed(trial.seed)
    halfway = 0.0
    for step in range(p["steps"]):
        rise, fall = (step + 1) / WARMUP, 1 - step / p["steps"]
        optimizer.param_groups[0]["lr"] = RATE * min(1, rise) * fall
        batch = task.sample(p["batch"], generator)
        logits = readouts(model, batch.inputs, shared=task.shared)
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


def readouts(model: nn.ParameterDict, X: Tensor, *, shared: bool = False) -> Tensor:
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


def _held(model: nn.ParameterDict, task: RandomLabels) -> float:
    """The number of examples that are right, beyond what guessing gets."""
    import torch

    everything, right = task.everything(), 0
    parts = [torch.split(x, 1000) for x in (everything.inputs, everything.targets[:, -1])]
    with torch.no_grad():
        for X, labels in zip(*parts, strict=True):
            chosen = readouts(model, X, shared=task.shared).argmax(-1)
            right += int((chosen == labels).sum())
    share = (right / task.examples - task.chance) / (1 - task.chance)
    return share * task.examples


# --- the claim ---------------------------------------------------------------------------------

LINEAR = 0.98  # R² from which numbers lie on a line
FULL = 0.6  # of all examples: a layer that holds so many begins to run out of them
SETTLED = 0.1  # of the final number: what the second half of a training may add
Curve = Mapping[int, Sequence[float]]  # memorized examples at every seed, by heads or by width
KINDS = {"own": "own contexts", "shared": "one shared context"}
# tokens n, their width d, head counts at d_h = n, head widths at a fixed number of heads
SIZES: dict[Size, dict[str, Any]] = {
    "quick": {
        "n": 6, "d": 12, "labels": 8, "examples": 480, "batch": 240, "steps": 150,
        "heads": (1, 2, 3), "widths": (2, 6, 12), "at": 1,
    },
    "full": {
        "n": 32, "d": 64, "labels": 32, "examples": 24_000, "batch": 2000, "steps": 3000,
        "heads": (1, 2, 3, 4), "widths": (8, 16, 32, 48, 64), "at": 2,
    },
}  # fmt: skip

COST: dict[Size, dict[str, float]] = {
    "quick": {"own": 0.3, "shared": 0.2},
    "full": {"own": 16.0, "shared": 5.0},
}


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """More heads at d_h = n, and wider heads at a fixed number of them."""
    s = SIZES[size]
    pairs = dict.fromkeys([(h, s["n"]) for h in s["heads"]] + [(s["at"], w) for w in s["widths"]])
    shared = {name: s[name] for name in ("n", "d", "labels", "examples", "batch", "steps")}
    experiments = {
        f"{kind}, {h} heads of {w}": {"kind": kind, "heads": h, "width": w, **shared}
        for kind in KINDS
        for h, w in pairs
    }
    return at_every_seed(
        "memorization", seeds, experiments, lambda p: COST[size][p["kind"]] * (1 + p["heads"])
    )


def run(trial: Trial) -> Values:
    """How many examples one layer holds."""
    return train_and_count(trial)


def judge(results: Results) -> Finding:
    """Two questions of both kinds, whose answers decide as in `judging.verdict`.

    Linear: the most heads memorize more than the fewest, and the means lie on a line. No gain: the
    widest heads do not memorize more than heads of d_h = n. Layers that hold nothing, or everything
    there is, leave the question open.
    """
    n, examples = results.items[0].trial.parameters["n"], results.items[0].values["examples"]
    sentences: list[str] = []
    asked: list[Answer] = []
    reasons: list[str] = []
    for kind, words in KINDS.items():
        heads, widths = _curves(results, kind)
        fit = line(list(heads), [summary(v).mean for v in heads.values()])
        sentences.append(
            f"{words.capitalize()}: R² = {fit.r_squared:.3f} in H ({fit.slope:+.0f} per head); "
            f"from d_h = n = {n} to {max(widths)} the number goes from {summary(widths[n])} to "
            f"{summary(widths[max(widths)])}."
        )
        for name, (answer, why) in {
            "linear in the number of heads": _linear(heads, fit.r_squared, examples),
            "no gain beyond d_h = n": _flat(widths, n, examples, capped=kind == "shared"),
        }.items():
            asked.append(answer)
            reasons.append(f"{words.capitalize()}, {name}: {answer}; {why}.")
    reasons += [_per_parameter(results), _settled(results)]
    rows: list[tuple[Cell, ...]] = []
    for name in results.names:
        p, held = results.named(name)[0].trial.parameters, results.numbers(name, "memorized")
        each = [x / n_parameters(p) for x in held]
        numbers = (p["heads"], p["width"], str(summary(held)), n_parameters(p), str(summary(each)))
        rows.append((KINDS[p["kind"]], *numbers))
    columns = ("kind", "heads", "head width", "memorized", "parameters", "memorized per parameter")
    return Finding(
        verdict(asked), " ".join(sentences), tuple(reasons), ResultTable(columns, tuple(rows))
    )


def n_parameters(p: Mapping[str, Any]) -> int:
    """The weights of a trial's layer: W_Q, W_K, W_V and the readout of every head."""
    return int(p["heads"] * p["width"] * (3 * p["d"] + p["labels"]))


def _per_parameter(results: Results) -> str:
    """The numbers beside the parameters, which grow with the heads and with their width."""
    s, told = SIZES[results.size], []
    for kind, words in KINDS.items():
        heads, widths = _curves(results, kind)
        places = [(h, s["n"], heads[h]) for h in (min(heads), max(heads))]
        places += [(s["at"], w, widths[w]) for w in (min(widths), max(widths))]
        shown = [
            summary(v).mean / n_parameters({**s, "heads": h, "width": w}) for h, w, v in places
        ]
        told.append(
            f"{words}: {shown[0]:.2g} with H = {min(heads)} and {shown[1]:.2g} with {max(heads)}; "
            f"{shown[2]:.2g} at width {min(widths)} and {shown[3]:.2g} at {max(widths)}"
        )
    full = n_parameters({**s, "heads": 1, "width": s["d"]})
    return (
        f"Examples per parameter, {'; '.join(told)}. Heads as wide as a token have Θ(H·d²) "
        f"parameters ({full} each here) for a capacity of order H·n ({s['n']} each): linear in the "
        "number of heads is linear in the parameters."
    )


def _settled(results: Results) -> str:
    """What the second half of training still added."""
    added = []
    for name in results.names:
        total, half = (summary(results.numbers(name, x)).mean for x in ("memorized", "halfway"))
        added.append(1 - half / total if total > 0 else 0.0)
    word = "at most" if max(added) <= SETTLED else "up to"
    more = "" if max(added) <= SETTLED else ": longer training could find more"
    return f"The second half of training added {word} {max(added):.0%} of the number{more}."


def _linear(heads: Curve, r_squared: float, examples: int) -> tuple[Answer, str]:
    """Whether the numbers grow, and on a line; with the reason."""
    few, most = min(heads), max(heads)
    grows = larger(heads[most], heads[few])
    if grows == "open":
        return "open", f"whether {most} heads hold more than {few} is {_hidden(heads[most])}"
    if grows == "yes" and r_squared >= LINEAR:
        return "yes", f"{most} heads hold more than {few}, and R² is at least {LINEAR:g}"
    if (why := _nothing_to_see(heads, heads[most], examples)) is not None:
        return "open", why
    if grows == "no":
        return "no", f"{most} heads do not hold more than {few} by a tenth"
    return "no", f"{most} heads hold more than {few}, but R² is below {LINEAR:g}"


def _flat(widths: Curve, n: int, examples: int, *, capped: bool) -> tuple[Answer, str]:
    """Whether heads wider than n gain nothing; with the reason. Capped: they cannot."""
    widest = widths[max(widths)]
    gains = larger(widest, widths[n])
    if gains == "yes" and capped:
        return (
            "open",
            f"heads of {max(widths)} hold more, which mixtures of {n} fixed tokens cannot: they "
            "are only easier to train",
        )
    if gains == "yes":
        return (
            "no",
            f"heads of {max(widths)} hold more, which a lower bound like H·min(n, d_h) allows",
        )
    if gains == "open":
        return "open", f"whether heads of {max(widths)} hold more is {_hidden(widest)}"
    if (why := _nothing_to_see(widths, widest, examples)) is not None:
        return "open", why
    return "yes", f"heads of {max(widths)} do not hold more by a tenth"


def _nothing_to_see(curve: Curve, largest: Sequence[float], examples: int) -> str | None:
    """Why a curve that does not grow says nothing: all examples are held, or none."""
    if max(map(max, curve.values())) > FULL * examples:
        return "the layers run out of examples"
    if larger(largest, [0.0] * len(largest)) != "yes":
        return "the layers were not seen to hold anything"
    return None


def _hidden(values: Sequence[float]) -> str:
    return "within the spread" if len(values) > 1 else "not decided by a single seed"


def figure(results: Results) -> Chart:
    """Memorized examples by heads, and by head width."""
    n = results.items[0].trial.parameters["n"]
    by_heads, by_width = [], []
    for kind, words in KINDS.items():
        heads, widths = _curves(results, kind)
        by_heads += series(heads, words)
        by_width += series(widths, words)
    return panels(
        [
            curves(by_heads, Axes(f"Memorized examples, heads {n} wide", "heads", "memorized")),
            curves(by_width, Axes(f"The same by width, {n} tokens", "head width", "memorized")),
        ]
    )


def _curves(results: Results, kind: str) -> tuple[Curve, Curve]:
    """Memorized numbers by heads at d_h = n, and by width at the fixed number of heads."""
    s, mine = SIZES[results.size], results.where(kind=kind)
    heads = mine.where(width=s["n"]).by("heads", "memorized")
    return heads, mine.where(heads=s["at"]).by("width", "memorized")


CLAIM = Claim(
    id="memorization",
    statement="The number of memorized examples is linear in the number of heads, and head widths "
    "above the number of tokens bring nothing.",
    expected="Order H·min(n, d_h); R² ≥ 0.98 in H at d = 64, n = 32; no gain once d_h > n.",
    source="Mahdavi et al. 2024",
    setting="One attention layer on random sequences with random labels; a seed draws sequences, "
    "labels and weights.",
    version=1,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
