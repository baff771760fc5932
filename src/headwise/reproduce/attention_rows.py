"""How a model's softmax behaves as its context grows, measured in one forward pass.

Position L of a causal model attends to L tokens, so one window shows all lengths up to its own. For
every head, ‖J‖ of the softmax and the spread of its scores are averaged over windows and fitted
by powers of L:

    log ‖J‖ │•                        slope −1: what bounded scores would give
            │   •  •
            │         •  •            slope nearer 0: scores that grow with L hold it up
            └──────────────── log L

Trained models often rest much of their attention on the first token. So the same is measured for
the softmax over all tokens but the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int64

from headwise.reproduce.answers import larger, verdict
from headwise.reproduce.claim import Results, Values, Verdict
from headwise.reproduce.statistics import TINY, Difference, line, logs, paired_difference

if TYPE_CHECKING:
    from torch import Tensor

BOUNDED = -1.0  # the exponent that bounded scores would give
SLACK = 0.1  # of the exponent: as fast as 1/L means at most this much slower
_REST = "jacobian_norm without the first token"
Sums = dict[str, "Tensor"]  # lengths × heads, added over windows


@dataclass(frozen=True, slots=True)
class Rows:
    """Means over windows, layers × lengths × heads."""

    jacobian_norm: Float[np.ndarray, "layers lengths heads"]
    score_spread: Float[np.ndarray, "layers lengths heads"]
    entropy: Float[np.ndarray, "layers lengths heads"]
    rest_norm: Float[np.ndarray, "layers lengths heads"]  # ‖J‖ without the first token


def doubled(longest: int) -> tuple[int, ...]:
    """4, 8, 16, … up to `longest`."""
    return tuple(2**i for i in range(2, longest.bit_length()))


def measured_rows(
    model: Any, ids: Int64[np.ndarray, "windows length"], lengths: Sequence[int]
) -> Rows:
    """The softmax of every head at every length, averaged over windows."""
    import torch

    from headwise.reproduce.pretrained import batches

    with torch.no_grad(), _listening(model, tuple(lengths)) as layers:
        for rows in batches(ids):
            model(input_ids=rows, use_cache=False, logits_to_keep=1)
    names = {**{n: n for n in ("jacobian_norm", "score_spread", "entropy")}, "rest_norm": _REST}
    found = {
        name: np.stack([sums[key].numpy() for sums in layers]) / len(ids)
        for name, key in names.items()
    }
    return Rows(**found)


@contextmanager
def _listening(model: Any, lengths: tuple[int, ...]) -> Iterator[list[Sums]]:
    """While open, every layer adds up its rows."""
    found: list[Sums] = []
    with ExitStack() as undo:
        for attention in model.attentions():
            (heads,) = attention.classes
            sums: Sums = {}
            found.append(sums)
            heads.attended = partial(_attended, heads, sums, lengths, attention.sliding_window)
            undo.callback(delattr, heads, "attended")
        yield found


def _attended(
    heads: Any, sums: Sums, lengths: tuple[int, ...], window: int | None, *args: Any, **kwargs: Any
) -> Any:
    """In place of the heads' own method: a look at some rows, then the method itself."""
    from headwise.nn.heads_headwise import HeadClass
    from headwise.profile.softmax_rows import row_statistics

    query, key = args[:2]
    found = row_statistics(heads, query, key, lengths, window)
    # Queries and keys carry their positions already, so the first token can just be left out.
    shorter = tuple(length - 1 for length in lengths)
    rest = row_statistics(heads, query[:, :, 1:], key[:, :, 1:], shorter, window)
    for name, rows in {**found, _REST: rest["jacobian_norm"]}.items():
        sums[name] = sums[name] + rows if name in sums else rows
    return HeadClass.attended(heads, *args, **kwargs)


def exponents(
    rows: Float[np.ndarray, "layers lengths heads"], lengths: Sequence[int]
) -> list[list[float]]:
    """The fitted power of L of every head of every layer."""
    x = np.log(np.asarray(lengths, dtype=np.float64))
    y = np.log(np.maximum(rows, TINY)).swapaxes(1, 2)
    slopes = ((y - y.mean(-1, keepdims=True)) * (x - x.mean())).sum(-1) / np.square(
        x - x.mean()
    ).sum()
    return [[float(s) for s in layer] for layer in slopes]


def row_values(rows: Rows, lengths: Sequence[int]) -> Values:
    """What a trial keeps of its rows: curves of every layer, exponents of every head."""
    return {
        "lengths": list(lengths),
        "jacobian_norm": rows.jacobian_norm.mean(-1).tolist(),
        "rest_norm": rows.rest_norm.mean(-1).tolist(),
        "score_spread": rows.score_spread.mean(-1).tolist(),
        "effective_share": (np.exp(rows.entropy) / np.asarray(lengths)[:, None]).mean(-1).tolist(),
        "jacobian_exponents": exponents(rows.jacobian_norm, lengths),
        "score_exponents": exponents(rows.score_spread, lengths),
    }


@dataclass(frozen=True, slots=True)
class Fall:
    """How ‖J‖, the mean over some layers' heads, goes with L: one value per seed each."""

    first: tuple[float, ...]  # at the shortest length
    last: tuple[float, ...]  # at the longest
    exponent: tuple[float, ...]

    @property
    def above_bounded(self) -> Difference:
        """How far the exponent lies above −0.9: positive means slower than 1/L."""
        return paired_difference(self.exponent, [BOUNDED + SLACK] * len(self.exponent))


def curve(values: Values, name: str, layers: slice = slice(None)) -> list[float]:
    """The mean over some layers of a measured curve, one number per length."""
    return [float(x) for x in np.mean(np.asarray(values[name])[layers], axis=0)]


def fall(results: Results, layers: slice = slice(None), name: str = "jacobian_norm") -> Fall:
    """The fall of ‖J‖ over some layers, in every result."""
    curves = [curve(r.values, name, layers) for r in results]
    slopes = [
        line(logs(r.values["lengths"]), logs(c)).slope for r, c in zip(results, curves, strict=True)
    ]
    return Fall(tuple(c[0] for c in curves), tuple(c[-1] for c in curves), tuple(slopes))


def fall_verdict(falls: Sequence[Fall]) -> Verdict:
    """Holds: ‖J‖ falls everywhere by more than the spread and a tenth, and about as 1/L.

    In part: slower, or not everywhere. Does not hold: where the spread allows an answer, it rises
    or stays within a tenth.
    """
    found = verdict([larger(f.first, f.last) for f in falls])
    slower = any(f.above_bounded.positive for f in falls)
    return "holds in part" if found == "holds" and slower else found
