"""Two claims about the heads of a trained model, read off its weights and off one pass over text.

head-dominance   Later layers rely on a few dominant heads. Of every head the share c_h that it has
                 in its layer is measured in two ways, and the number of heads that count is
                 (Σc)²/Σc² (1 where one head does everything, H where all do the same):

                     output    the mean square of what the head adds to the layer's output
                     loss      |∂loss/∂gate|, a gate on the head's output (Michel et al. 2019)

head-spectra     The matrices of a head, W_Q·W_Kᵀ and W_V·W_O, are low rank. Their rank is at most
                 the head width w; "low" must mean less than that. Measured is the number of
                 directions that hold 90% of the squared singular values, beside that of a product
                 of random matrices of the same shapes, which also falls short of w:

                     ─────●──────────●──────────│
                        trained    random       w

                 Seen beforehand: another paper (arXiv 2604.04384) reports 38 to 75 directions of
                 W_Q·W_Kᵀ for heads 64 and 128 wide, in other models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from headwise.papers.claims.allocation.saturation import THIRDS, third_of
from headwise.papers.harness.charts import Axes, curves, panels, series
from headwise.papers.harness.claim import (
    Claim,
    Finding,
    Results,
    ResultTable,
    Size,
    Trial,
    Values,
    at_every_seed,
)
from headwise.papers.harness.judging import Answer, larger, summary, verdict, why_open
from headwise.papers.tasks.pretrained import NAME, TEXT

if TYPE_CHECKING:
    from torch import Tensor

    from headwise.reporting.charts import Chart

# --- head-dominance ----------------------------------------------------------------------------

WAYS = {"output": "by output", "loss": "by the loss"}
WINDOWS: dict[Size, tuple[int, int]] = {"quick": (2, 48), "full": (12, 256)}


def dominance_trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """One set of windows per seed."""
    count, length = WINDOWS[size]
    p = {"model": NAME, "text": TEXT, "windows": count, "length": length}
    return at_every_seed("head-dominance", seeds, {NAME: p}, lambda _: 2 + count * length / 40)


def run_dominance(trial: Trial) -> Values:
    """By layer, the number of heads that count, and the share of the first of them."""
    from headwise.papers.tasks.pretrained import documents, pretrained_model, random_passages

    p = trial.parameters
    it, text = pretrained_model(), documents(p["text"])
    ids = random_passages(it.tokenizer, text.scored, (p["windows"], p["length"]), trial.seed)
    shares = head_shares(it.model, ids)
    values: Values = {"text_sha256": text.sha256}
    for way, c in shares.items():
        values[way] = (c.sum(1) ** 2 / np.square(c).sum(1)).tolist()
        values[f"{way}_first"] = (c.max(1) / c.sum(1)).tolist()
    return {**values, "heads": shares["output"].shape[1]}


def head_shares(model: Any, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Of every query head, layers × heads: its mean square output, and the mean |∂loss/∂gate|."""
    import torch

    from headwise.models.build import plan_of
    from headwise.training.batches import next_token_loss

    layers = plan_of(model).layers
    widths = [[h.vo_dim for h in layer.heads for _ in range(h.queries)] for layer in layers]
    gates = [torch.ones(len(w), requires_grad=True) for w in widths]
    output, loss = (np.zeros((len(widths), len(widths[0]))) for _ in range(2))
    with _gated(model, gates, widths) as mixed:
        for row in torch.from_numpy(ids):
            rows = row[None]
            told, _ = next_token_loss(model, {"input_ids": rows[:, :-1], "labels": rows[:, 1:]})
            slopes = torch.autograd.grad(told, gates)
            loss += np.stack([g.abs().numpy() for g in slopes])
            for i, z in enumerate(mixed):
                parts = zip(
                    z.split(widths[i], -1),
                    model.attentions()[i].o_proj.weight.split(widths[i], -1),
                    strict=True,
                )
                output[i] += [float((x @ W.mT).square().mean()) for x, W in parts]
            mixed.clear()
    return {"output": output / len(ids), "loss": loss / len(ids)}


@contextmanager
def _gated(model: Any, gates: Sequence[Tensor], widths: Sequence[list[int]]) -> Iterator[list[Any]]:
    """While open, every head's output passes its gate; what enters the output projections."""
    import torch

    mixed: list[Any] = []

    def through(i: int) -> Callable[[Any, Any], Any]:
        sizes = torch.tensor(widths[i])

        def gate(module: Any, args: Any) -> Any:
            mixed.append(args[0].detach())
            return (args[0] * gates[i].repeat_interleave(sizes),)

        return gate

    with ExitStack() as undo:
        for i, attention in enumerate(model.attentions()):
            hook = attention.o_proj.register_forward_pre_hook(through(i))
            undo.callback(hook.remove)
        yield mixed


def judge_dominance(results: Results) -> Finding:
    """In both ways: do fewer heads count in the last third of the layers than in the first?

    Fewer by less than a tenth is not fewer. Holds: both. The middle is reported.
    """
    heads = results.items[0].values["heads"]
    answers: list[Answer] = []
    told, rows = [], []
    for way, words in WAYS.items():
        counts = [_thirds(results, way, t) for t in range(3)]
        firsts = [_thirds(results, f"{way}_first", t) for t in range(3)]
        answers.append(larger(counts[0], counts[2]))
        shown = ", ".join(
            f"{summary(c)} in {name} layers" for c, name in zip(counts, THIRDS, strict=True)
        )
        told.append(f"{words}: {shown}")
        rows += [
            (words, name, str(summary(c)), str(summary(f)))
            for name, c, f in zip(THIRDS, counts, firsts, strict=True)
        ]
    asked = "; ".join(f"{w}: {a}" for w, a in zip(WAYS.values(), answers, strict=True))
    is_open = f" Open: {why_open(len(results.seeds))}." if "open" in answers else ""
    return Finding(
        verdict(answers),
        f"Of {heads} heads per layer so many count, {'; '.join(told)}.",
        (
            f"Do fewer heads count in late layers than in early ones: {asked}.{is_open}",
            "The number that counts is (Σc)²/Σc² of the heads' shares c: 1 where one head does "
            "everything, all where they do the same. One model: what another was trained to do "
            "may spread differently.",
        ),
        ResultTable(("heads that count", "layers", "number", "share of the first"), tuple(rows)),
    )


def draw_dominance(results: Results) -> Chart:
    """The number of heads that count by layer."""
    points = [
        point for way, words in WAYS.items() for point in series(_by_layer(results, way), words)
    ]
    return curves(points, Axes("Heads that count in a layer", "layer", "heads"))


def _thirds(results: Results, name: str, third: int) -> list[float]:
    """The mean over a third of the layers, at every seed."""
    found = [r.values[name] for r in results]
    return [float(np.mean(x[third_of(third, len(x))])) for x in found]


def _by_layer(results: Results, name: str) -> dict[int, tuple[float, ...]]:
    return dict(enumerate(zip(*(r.values[name] for r in results), strict=True)))


HEAD_DOMINANCE = Claim(
    id="head-dominance",
    statement="Later layers rely on few dominant heads, earlier ones on many.",
    expected="Later layers need fewer heads, because a few of them dominate.",
    source="arXiv 2510.03784, and its readers",
    setting="SmolLM2-135M-Instruct on Python’s documentation and source; a seed draws the windows, "
    "the model is always the same.",
    version=1,
    trials=dominance_trials,
    run=run_dominance,
    judge=judge_dominance,
    figure=draw_dominance,
)


# --- head-spectra ------------------------------------------------------------------------------

ENERGY = 0.9
LOW = 0.5  # of the head width: "low rank" is taken to mean at most half of the directions
MATRICES = {"qk": "W_Q·W_Kᵀ", "vo": "W_V·W_O"}


def spectra_trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """One reading of the weights per seed, which draws the random matrices beside them."""
    every = 10 if size == "quick" else 1
    parameters = {"model": NAME, "every": every}
    return at_every_seed("head-spectra", seeds, {NAME: parameters}, lambda _: 30.0 / every)


def run_spectra(trial: Trial) -> Values:
    """By layer, the mean number of directions that hold the energy, of trained and random heads."""
    from headwise.models.build import plan_of
    from headwise.papers.tasks.pretrained import pretrained_model

    model = pretrained_model().model
    rng = np.random.default_rng(trial.seed)
    places = range(0, len(plan_of(model).layers), trial.parameters["every"])
    found: Values = {"layers": list(places), "width": plan_of(model).layers[0].heads[0].qk_dim}
    for i in places:
        for name, pairs in layer_factors(model, i).items():
            random = [
                (rng.standard_normal(a.shape), rng.standard_normal(b.shape)) for a, b in pairs
            ]
            for kind, factors in ((name, pairs), (f"random_{name}", random)):
                counts = [directions(a, b) for a, b in factors]
                found.setdefault(kind, []).append(float(np.mean(counts)))
    return found


def layer_factors(model: Any, layer: int) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """Of every query head of a layer the two factors, d_model × width, of both its matrices."""
    from headwise.models.backbones_headwise import projections_of
    from headwise.models.build import plan_of
    from headwise.papers.tasks.cuts import head_projections

    heads, whole = plan_of(model).layers[layer], projections_of(model.attentions()[layer])
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in MATRICES}
    for group, head in enumerate(heads.heads):
        for query in range(head.queries):
            own = head_projections(heads, group, query, whole)
            W = {side: p.weight.double().numpy() for side, p in own.items()}
            found["qk"].append((W["query"].T, W["key"].T))
            found["vo"].append((W["value"].T, W["output"]))
    return found


def directions(a: np.ndarray, b: np.ndarray, energy: float = ENERGY) -> int:
    """How many singular values of a·bᵀ hold this share of their squares.

    With a = Q·R the singular values of a·bᵀ are those of the two small factors' product.
    """
    left, right = (np.asarray(np.linalg.qr(m, mode="r")) for m in (a, b))
    squares = np.square(np.linalg.svd(left @ right.T, compute_uv=False))
    held = np.cumsum(squares) / squares.sum()
    return int(np.searchsorted(held, energy) + 1)


def judge_spectra(results: Results) -> Finding:
    """Two questions of both matrices, on the mean over heads and layers.

    Lower than chance: fewer directions than a random product of these shapes needs, by a tenth.
    Low: at most half of the head's width. Trained weights are the same at every seed, so the
    spread is that of the random ones.
    """
    width = results.items[0].values["width"]
    answers: list[Answer] = []
    told, reasons, rows = [], [], []
    for name, words in MATRICES.items():
        trained, random = (_means(results, kind) for kind in (name, f"random_{name}"))
        fewer = larger(random, trained)
        low = larger([LOW * width] * len(trained), trained, margin=0.0)
        answers += [fewer, low]
        told.append(f"{words} {summary(trained)} (random {summary(random)})")
        reasons.append(
            f"{words}: fewer directions than a random product: {fewer}; at most half of the "
            f"width: {low}."
        )
        for third, part in enumerate(THIRDS):
            of = [_thirds(results, kind, third) for kind in (name, f"random_{name}")]
            rows.append((words, part, *(str(summary(x)) for x in of)))
    return Finding(
        verdict(answers),
        f"Of {width} directions, so many hold {ENERGY:.0%} of the squared singular values: "
        f"{'; '.join(told)}.",
        (
            *reasons,
            "With rotary positions W_Q·W_Kᵀ is the matrix of a token that looks at itself; at "
            "other distances the planes are turned against each other.",
            "This is the weights' spectrum. Scores on text can need fewer directions, because "
            "tokens do not fill the space, and the loss fewer still.",
        ),
        ResultTable(("matrix", "layers", "trained", "random"), tuple(rows)),
    )


def _means(results: Results, kind: str) -> list[float]:
    return [float(np.mean(r.values[kind])) for r in results]


def draw_spectra(results: Results) -> Chart:
    """Directions by layer, a panel per matrix."""
    layers = results.items[0].values["layers"]
    drawn = []
    for name, words in MATRICES.items():
        points = []
        for kind, label in ((name, "trained"), (f"random_{name}", "random")):
            curve: Mapping[int, Any] = _by_layer(results, kind)
            points += series({layers[i]: v for i, v in curve.items()}, label)
        drawn.append(curves(points, Axes(f"Directions of {words}", "layer", "directions")))
    return panels(drawn)


HEAD_SPECTRA = Claim(
    id="head-spectra",
    statement="The matrices of trained heads, W_Q·W_Kᵀ and W_V·W_O, are low rank.",
    expected="Parameter matrices of trained Transformers are low rank.",
    source="an article on the number of heads",
    setting="All heads of SmolLM2-135M-Instruct, as stored; a seed draws the random matrices "
    "beside them.",
    version=1,
    trials=spectra_trials,
    run=run_spectra,
    judge=judge_spectra,
    figure=draw_spectra,
)
