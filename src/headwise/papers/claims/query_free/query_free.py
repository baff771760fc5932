"""Claim: a Transformer without W_Q trains as well as the full one.

Trained from scratch on the built-in text, every variant of a seed on the same batches. The paper's
variants use less weight decay than is usual, so the full model is trained at both decays and each
variant is compared with both: the effect of decay is then not credited to W_Q = I.

The models are GPT-2 blocks with or without one of the projections, pre-norm and with both skips, as
in arXiv 2510.23912. There W_Q = I is not a change of basis but a smaller family of models. Identity
queries are the normalised input itself, larger than what a new W_Q would make of it, so scores
start larger. Three ways to handle that:

    unchanged   1/√width, scores start 1/(std·√d_model) times as large as in the full model
    paper       1/(2·√width): halved, about right at d_model 768
    spread      std·√d_model/√width: as large as in the full model, at any d_model
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from headwise.papers.harness.charts import Axes, Point, curves, panels
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
from headwise.papers.harness.judging import (
    Answer,
    Difference,
    joint_confidence,
    kindest,
    paired_difference,
    summary,
    verdict,
    why_open,
)

if TYPE_CHECKING:
    from headwise.plan import Plan
    from headwise.reporting.charts import Chart

# --- GPT-2 blocks without a projection, for both query-free claims -----------------------------

Side = Literal["query", "key", "value"]
Scale = Literal["unchanged", "paper", "spread"]
INIT_STD = 0.02  # of GPT-2's weights
PAPER_DECAY, USUAL_DECAY = 0.03125, 0.1
SHAPE: dict[Size, dict[str, int]] = {
    "quick": {"n_layers": 2, "d_model": 32, "heads": 4},
    "full": {"n_layers": 4, "d_model": 96, "heads": 6},
}
TEXT: dict[Size, dict[str, int]] = {
    "quick": {"characters": 150_000, "vocab_size": 260, "context": 16},
    "full": {"characters": 8_000_000, "vocab_size": 1024, "context": 128},
}
# Dropout, on by default in GPT-2, is off as in the paper's recipe; GPT-2's own GELU in one kernel.
OVERRIDES: dict[str, Any] = {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "activation_function": "gelu_pytorch_tanh",
}


@dataclass(frozen=True, slots=True)
class BlockKind:
    """Which projection is the identity, how scores are scaled, how wide the MLP is."""

    identity: Side | None = None
    scale: Scale = "spread"
    ffn_ratio: float = 4.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready parameters of a trial."""
        return {"identity": self.identity, "scale": self.scale, "ffn_ratio": self.ffn_ratio}


def block_plan(block: BlockKind, sizes: Mapping[str, int], text: Mapping[str, int]) -> Plan:
    """The plan of a model of these blocks."""
    from headwise.plan import HeadSpec, LayerPlan, ModelShape, Plan

    d, heads, context = sizes["d_model"], sizes["heads"], text["context"]
    width = d // heads
    shape = ModelShape(
        family="gpt2",
        n_layers=sizes["n_layers"],
        d_model=d,
        context=context,
        n_heads=heads,
        n_kv_heads=heads,
        qk_dim=width,
        vo_dim=width,
        vocab_size=text["vocab_size"],
        learned_positions=context,
        ffn_dim=round(block.ffn_ratio * d),
        ffn_gated=False,
        ffn_biases=True,
        norm_biases=True,
    )
    head = HeadSpec(qk_dim=width, vo_dim=width, score_scale=score_scale(block, d, width))
    sides: dict[str, Any] = {block.identity: "identity"} if block.identity else {}
    layer = LayerPlan(heads=(head,) * heads, **sides)
    return Plan(shape=shape, layers=(layer,) * shape.n_layers)


def score_scale(block: BlockKind, d_model: int, width: int) -> float:
    """What multiplies q·k."""
    usual = 1 / math.sqrt(width)
    if block.identity not in ("query", "key") or block.scale == "unchanged":
        return usual
    return usual / 2 if block.scale == "paper" else usual * INIT_STD * math.sqrt(d_model)


def train_block(parameters: Mapping[str, Any], seed: int) -> Values:
    """A trial of either claim: the curve of held-out losses, the last loss, and the parameters.

    The last loss of a run that diverged is that of knowing token frequencies only.
    """
    from headwise.papers.tasks import training
    from headwise.planning.cost import cost

    plan = block_plan(BlockKind(**parameters["block"]), parameters["shape"], parameters["text"])
    model = training.text_model(plan, seed, **OVERRIDES)
    text, course = training.TextSizes(**parameters["text"]), training.Course(**parameters["course"])
    curve = training.train_on_text(model, text, course, seed)
    spent = cost(plan)
    tokens = training.corpus(text.characters, text.vocab_size)
    frequency_loss = tokens.frequency_loss(text.vocab_size)
    return {
        **curve.values(),
        "loss": frequency_loss if curve.diverged else curve.losses[-1],
        "attn_params": spent.attn_params,
        "total_params": spent.params,
        "frequency_loss": frequency_loss,
    }


# --- the claim ---------------------------------------------------------------------------------

FULL, FULL_LOW = "full", "full, the paper's low decay"
PAPER, WIDER = "W_Q = I, the paper's scale and decay", "W_Q = I, MLP × 4.5"
SPREAD = "W_Q = I, scale by spread, the paper's decay"
WIDER_SPREAD = "W_Q = I, MLP × 4.5, scale by spread"
VARIANTS: dict[str, tuple[BlockKind, float]] = {
    FULL: (BlockKind(), USUAL_DECAY),
    FULL_LOW: (BlockKind(), PAPER_DECAY),
    PAPER: (BlockKind("query", "paper"), PAPER_DECAY),
    SPREAD: (BlockKind("query", "spread"), PAPER_DECAY),
    "W_Q = I, scale by spread, usual decay": (BlockKind("query", "spread"), USUAL_DECAY),
    "W_Q = I, scale unchanged, usual decay": (BlockKind("query", "unchanged"), USUAL_DECAY),
    "W_K = I, scale by spread, the paper's decay": (BlockKind("key", "spread"), PAPER_DECAY),
    "W_V = I, the paper's decay": (BlockKind("value"), PAPER_DECAY),
    WIDER: (BlockKind("query", "paper", 4.5), PAPER_DECAY),
    WIDER_SPREAD: (BlockKind("query", "spread", 4.5), PAPER_DECAY),
}
# By scale of the scores: the model to be as good as full, and the one to be better.
SCALES = {"the paper's scale": (PAPER, WIDER), "the scale by spread": (SPREAD, WIDER_SPREAD)}
MARGIN = 0.01  # "as well": at most 1% more loss; the paper's own log has +0.39%
TRIFLE = 0.001  # less than that is not "better"
LEVEL = joint_confidence(len(SCALES))  # the better scale counts, so each gets a wider interval
Gaps = tuple[Difference, Difference]  # of relative loss, against full at either decay
COURSE: dict[Size, dict[str, Any]] = {
    "quick": {"steps": 40, "batch": 8, "lr": 2e-2, "evaluations": 5, "scored": 16},
    "full": {"steps": 1000, "batch": 8, "lr": 3e-3, "evaluations": 20, "scored": 128},
}


def trials(size: Size, seeds: Sequence[int]) -> list[Trial]:
    """Every variant."""
    experiments = {
        name: {
            "block": block.to_dict(),
            "shape": SHAPE[size],
            "text": TEXT[size],
            "course": {**COURSE[size], "weight_decay": decay},
        }
        for name, (block, decay) in VARIANTS.items()
    }
    cost = 0.5 if size == "quick" else 90.0
    return at_every_seed("query-free", seeds, experiments, lambda _: cost)


def run(trial: Trial) -> Values:
    """The last held-out loss of one variant, its curve and its parameters."""
    return train_block(trial.parameters, trial.seed)


def judge(results: Results) -> Finding:
    """Two questions at each of two scales: as well as the full model, and better with the MLP?

    The full model is trained at the usual decay and at the paper's, and both have to be matched.
    As well: at most 1% more loss over the whole interval; no, if against either model the whole
    interval lies above that. Better: less loss over the whole interval; no, if against either model
    the whole interval shows a gain under 0.1%. Everything else is open. Each scale gets the verdict
    of `judging`, and the better of the two counts: the paper's factor is meant for another width.
    """
    gaps = {name: _gaps(results, name) for name in VARIANTS}
    found = {
        scale: (as_well(gaps[narrow]), better(gaps[wide]))
        for scale, (narrow, wide) in SCALES.items()
    }
    rows = tuple(
        (
            name,
            str(summary(results.numbers(name, "loss"))),
            None if name == FULL else _interval(gaps[name][0]),
            None if name == FULL_LOW else _interval(gaps[name][1]),
            int(results.numbers(name, "attn_params")[0]),
            int(results.numbers(name, "total_params")[0]),
            _diverged(results, name),
        )
        for name in VARIANTS
    )
    against = [
        f"against full, decay {decay:g} ({LEVEL:.1%} interval)"
        for decay in (USUAL_DECAY, PAPER_DECAY)
    ]
    columns = (
        "model", "held-out loss", *against, "attention parameters", "parameters",
        "runs that diverged",
    )  # fmt: skip
    shown = "; ".join(
        f"with {scale} {_both(gaps[narrow])}, and {_both(gaps[wide])} with the saved parameters "
        "in the MLP"
        for scale, (narrow, wide) in SCALES.items()
    )
    return Finding(
        kindest(verdict(answers) for answers in found.values()),
        f"Held-out loss without W_Q against the full model at decay {USUAL_DECAY:g} / at the same "
        f"decay {PAPER_DECAY:g}: {shown}.",
        (_answered(found, len(results.seeds)), *_reasons(results, gaps)),
        ResultTable(columns, rows),
    )


def as_well(gaps: Gaps) -> Answer:
    """Whether there is at most 1% more loss than in either full model."""
    if all(gap.high <= MARGIN for gap in gaps):
        return "yes"
    return "no" if any(gap.low > MARGIN for gap in gaps) else "open"


def better(gaps: Gaps) -> Answer:
    """Whether there is less loss than in both full models."""
    if any(gap.low >= -TRIFLE for gap in gaps):
        return "no"
    return "yes" if all(gap.negative for gap in gaps) else "open"


def _answered(found: Mapping[str, tuple[Answer, Answer]], n_seeds: int) -> str:
    each = "; ".join(
        f"with {scale} “as well” {same}, “better with the wider MLP” {more}"
        for scale, (same, more) in found.items()
    )
    is_open = any("open" in answers for answers in found.values())
    said = f" Open: {why_open(n_seeds)}." if is_open else ""
    return f"Against both full models, {each}; the better scale counts.{said}"


def _reasons(results: Results, gaps: Mapping[str, Gaps]) -> tuple[str, ...]:
    full, reduced = (int(results.numbers(n, "attn_params")[0]) for n in (FULL, PAPER))
    p = results.parameters
    factor = INIT_STD * math.sqrt(p["shape"]["d_model"])
    # Falling from lr to lr/10 along half a cosine, the mean rate is 0.55 of the highest.
    shrunk = [
        1 - math.exp(-0.55 * p["course"]["lr"] * p["course"]["steps"] * decay)
        for decay in (USUAL_DECAY, PAPER_DECAY)
    ]
    return (
        f"As well means at most {MARGIN:.0%} more loss, better means less loss, over a whole "
        f"{LEVEL:.1%} interval (two scales are tried); a gain under {TRIFLE:.1%} is not better.",
        f"Attention has {1 - reduced / full:.0%} fewer parameters without W_Q.",
        f"At d_model {p['shape']['d_model']} an equal score spread needs a factor of {factor:.2f}, "
        "the paper's is 0.5 (0.55 would be equal at 768).",
        f"The lower decay alone changes the full model by {_interval(gaps[FULL_LOW][0])}; over "
        f"this run a decay of {USUAL_DECAY:g} shrinks a weight without gradient by "
        f"{shrunk[0]:.0%}, {PAPER_DECAY:g} by {shrunk[1]:.0%}.",
    )


def _gaps(results: Results, name: str) -> Gaps:
    usual, low = (_relative(results, name, base) for base in (FULL, FULL_LOW))
    return usual, low


def _relative(results: Results, name: str, base: str) -> Difference:
    losses = zip(results.numbers(name, "loss"), results.numbers(base, "loss"), strict=True)
    ratios = [x / y for x, y in losses]
    return paired_difference(ratios, [1.0] * len(ratios), confidence=LEVEL)


def _interval(gap: Difference) -> str:
    mean = f"{100 * gap.mean:+.2f}%"
    if math.isinf(gap.high):
        return f"{mean} (one seed: no interval)"
    return f"{mean} [{100 * gap.low:+.2f}, {100 * gap.high:+.2f}]"


def _both(gaps: Gaps) -> str:
    return " / ".join(map(_interval, gaps))


def _diverged(results: Results, name: str) -> int:
    return sum(bool(r.values["diverged"]) for r in results.named(name))


def figure(results: Results) -> Chart:
    """Held-out loss by step, relative to the full model at the same step and seed.

    Without W_V the loss is much higher, so it has a panel of its own.
    """
    base = {r.trial.seed: r.values["losses"] for r in results.named(FULL)}
    points: dict[str, list[Point]] = {"W_Q or W_K": [], "W_V": []}
    for name, (block, _) in VARIANTS.items():
        found = results.named(name)
        whole = min(len(r.values["losses"]) for r in (*found, *results.named(FULL)))
        for i in range(whole):
            ratios = [r.values["losses"][i] / base[r.trial.seed][i] for r in found]
            percent = summary([100 * (ratio - 1) for ratio in ratios])
            place = "W_V" if block.identity == "value" else "W_Q or W_K"
            points[place].append(Point(found[0].values["steps"][i], percent, name))
    words = "held-out loss against full, %"
    return panels(
        [curves(some, Axes(f"Without {what}, from scratch", "step", words))
         for what, some in points.items()]
    )  # fmt: skip


CLAIM = Claim(
    id="query-free",
    statement="With W_Q = I from the start a Transformer trains as well as the full model, and "
    "better when the saved parameters go to the MLP.",
    expected="Validation loss +0.39% in the logged run, equal in the abstract; better than the "
    "baseline at MLP × 4.5; score scale halved, weight decay 0.03125 instead of 0.1.",
    source="arXiv 2510.23912",
    setting="Small pre-norm decoders trained here on Python’s documentation and source; a seed "
    "draws the weights and the batches.",
    version=2,
    trials=trials,
    run=run,
    judge=judge,
    figure=figure,
)
