"""compare.json: the methods at every budget, counted and measured in the same way.

ComparisonRecord ─┬─ texts     what was measured on, and the dense model's figures there
                  ├─ methods   what every method does, and where it is from
                  └─ cells     one method at one budget: counted parameters and scores,
                               or the problem why it could not be reached

The methods and the settings are here too, without torch, for the command line's help.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, model_validator

from headwise.measure.record import Role
from headwise.models.record import CalibrationRecord
from headwise.records import Frozen, Record, read_record

Counts = Literal["attn_params", "params"]  # what a comparison's budgets count

OURS, RECOVERED = "headwise", "headwise+recovery"
HEADS_ONLY = "headwise-attention"
_RECOVERY = "+recovery"


def policy_method(policy: str, *, recovered: bool = False) -> str:
    """The name of our method with the widths of a policy: `headwise:uniform`."""
    name = OURS if policy == "sensitivity" else f"{OURS}:{policy}"
    return f"{name}{_RECOVERY}" if recovered else name


def policy_of(method: str) -> str | None:
    """The policy that our method takes its widths from; None for the methods of others."""
    name = method.removesuffix(_RECOVERY)
    if name in (OURS, HEADS_ONLY):
        return "sensitivity"
    ours, _, policy = name.partition(":")
    return policy if ours == OURS and policy else None


def is_recovered(method: str) -> bool:
    """Whether a method trains after the cut."""
    return method.endswith(_RECOVERY)


def leaves_mlps(method: str) -> bool:
    """Whether a method of ours leaves MLPs whole, whatever the budget counts."""
    return method.removesuffix(_RECOVERY) == HEADS_ONLY


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """How cells are made and measured."""

    max_tokens: int | None = 16384  # of each text
    window: int | None = None  # None: the context, at most 1024
    multiple_of: int = 8  # of our widths; the rivals' are as fine as they can be
    ffn_multiple_of: int = 64  # of our MLP widths
    granularity: str = "layer"  # of our widths; those of the rivals that plan are free per head


@dataclass(frozen=True, slots=True)
class Method:
    """What a method does, and where it is from."""

    what: str
    source: str


METHODS: dict[str, Method] = {
    "svd-llm": Method(
        "each projection on its own: whitened by the second moment of its input, truncated to two "
        "factors, the same share of every matrix",
        "arXiv 2403.07378, truncation-aware whitening, as it advises where up to 30% go; no "
        "closed-form update, no fine-tuning",
    ),
    "clover": Method(
        "plain SVD of the products W_V·W_O and W_Q·W_K of every head group, uniform widths, no "
        "data; rotary planes by the norms of their weights",
        "arXiv 2411.17426, pruning without its fine-tuning",
    ),
    "magnitude": Method(
        "keeps the rotary planes, query-key columns and value dimensions with the largest squared "
        "weights in the whole model, no data",
        "structured magnitude pruning",
    ),
    "energy": Method(
        "keeps the rotary planes and whitened directions with the largest measured energy in the "
        "whole model",
        "the energy policy of `headwise plan fit`, directions by energy too",
    ),
    "head-pruning": Method(
        "removes the query heads with the smallest |∂loss/∂gate|, normalised per layer; a "
        "key/value head is removed with its last query head",
        "arXiv 1905.10650, one-shot",
    ),
    "uniform": Method(
        "keeps the rotary planes and whitened directions with the largest measured energy in each "
        "head, uniform widths",
        "whitened truncation without sensitivity",
    ),
    "flap": Method(
        "removes the query heads and neurons with the smallest fluctuation (variance of the inputs "
        "of W_O and W_down, times squared weights; that of heads squared once more), standardised "
        "per layer; the means of what is removed become biases",
        "arXiv 2312.11983, structure AL-AM, metric WIFV, as its program computes them",
    ),
    "llm-pruner": Method(
        "removes the head groups and neurons with the smallest Σ|w · ∂loss/∂w|, the same share of "
        "every layer but the first eighth and the last sixteenth",
        "arXiv 2305.11627, block-wise first-order Taylor groups without its fine-tuning",
    ),
    "modegpt": Method(
        "neurons by leverage with W_down refitted (Nyström), planes and query-key columns by "
        "norms (CR), values by whitened SVD; shares by how much a layer changes its input",
        "arXiv 2408.09632",
    ),
    HEADS_ONLY: Method(
        "ours with the MLPs left whole: what cutting attention alone costs",
        "`headwise compress --no-cut-ffn`",
    ),
    OURS: Method(
        "directions and widths by the sensitivity of the loss, layers fitted one after another",
        "`headwise compress` with its default settings",
    ),
    RECOVERED: Method(
        "the same widths and directions, folded, then trained on the dense model's predictions",
        "`headwise compress --recover`",
    ),
}

_ATTENTION = ("svd-llm", "clover", "magnitude", "energy", "head-pruning", "uniform")
_WHOLE = ("svd-llm", "flap", "llm-pruner", "modegpt", "magnitude", HEADS_ONLY)
COMPARED: dict[Counts, tuple[str, ...]] = {  # under each kind of budget
    "attn_params": (*_ATTENTION, OURS, RECOVERED),
    "params": (*_WHOLE, policy_method("uniform"), OURS, RECOVERED),
}


def described(name: str) -> Method:
    """The description of a method; that of a policy of ours is made from its name."""
    if name in METHODS:
        return METHODS[name]
    own = METHODS[RECOVERED if is_recovered(name) else OURS]
    return Method(
        f"widths by the policy {policy_of(name)}, everything else as in {OURS}: {own.what}",
        f"{own.source} --policy {policy_of(name)}",
    )


COMPARE_RECORD = "compare.json"
CHARTS = ("pareto.html", "pareto.svg", "pareto.png")  # of the result, beside it


class ComparedText(Frozen):
    """A text that every method was measured on; figures that are infinite are None."""

    source: str
    sha256: str
    role: Role
    tokens: int
    window: int
    stride: int
    dense_nll: float
    dense_perplexity: float | None


class Score(Frozen):
    """A method on one text; figures that are infinite are None."""

    nll: float
    perplexity: float | None
    ratio: float | None  # perplexity ÷ dense


class ComparisonCell(Frozen):
    """One method at one budget; a budget it cannot reach has a problem and no figures."""

    method: str
    budget: str
    amount: int  # parameters allowed, of attention or of the model
    attn_params: int | None = None  # and counted
    params: int | None = None
    share: float | None = None  # counted, of what the budget counts
    texts: tuple[Score, ...] = ()
    problem: str | None = None
    cut: dict[str, JsonValue] | None = None  # settings of our own cut
    recovery: dict[str, JsonValue] | None = None
    seconds: float | None = None


class DenseText(Frozen):
    """The dense model on one text."""

    tokens: int
    window: int
    stride: int
    nll: float


class DenseCell(Frozen):
    """The dense model, which every method is compared with."""

    attn_params: int
    params: int | None = None
    texts: tuple[DenseText, ...]
    weights_sha256: str


class ComparisonRecord(Record):
    """The content of compare.json."""

    format: Literal["headwise-compare/2"] = "headwise-compare/2"
    model: str
    weights_sha256: str
    attn_params: int  # of the dense model
    params: int | None = None
    counts: Counts = "attn_params"  # what the budgets count
    calibration: CalibrationRecord
    profile_sha256: str
    texts: tuple[ComparedText, ...]
    methods: dict[str, Method]
    cells: tuple[ComparisonCell, ...]
    notes: tuple[str, ...] = ()
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    seeds: dict[str, int] = Field(default_factory=dict)
    command: str = ""
    versions: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _scored_on_every_text(self) -> ComparisonRecord:
        for i, cell in enumerate(self.cells):
            if cell.texts and (len(cell.texts) != len(self.texts) or cell.share is None):
                raise ValueError(
                    f"cells[{i}] must have a share and one score for each of the "
                    f"{len(self.texts)} texts, got {len(cell.texts)} scores"
                )
        return self

    @property
    def counted(self) -> str:
        """What the budgets count, in words."""
        return "attention parameters" if self.counts == "attn_params" else "parameters"

    @property
    def measured(self) -> tuple[ComparisonCell, ...]:
        """The cells that have figures."""
        return tuple(cell for cell in self.cells if cell.texts)


def read_comparison(path: Path) -> ComparisonRecord:
    """The record of a comparison, by its folder or its file."""
    file = path / COMPARE_RECORD if path.is_dir() else path
    return read_record(file, ComparisonRecord, advice="run `headwise compare` again")
