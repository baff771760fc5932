"""How a model is cut; the source of the defaults."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headwise.errors import HeadwiseError


@dataclass(frozen=True, slots=True)
class CutSettings:
    """What a cut does besides folding the kept directions."""

    refit: bool = True  # refit W_O of each layer on the already cut layers before it
    ridge: float | None = None  # pull of the refit towards the folded weights; None: chosen
    fit: int | None = None  # steps of layer-local fitting; None: one pass over the text
    fit_rate: float = 0.01  # the fit's peak rate, relative to each matrix's size
    batch_tokens: int = 2048  # of whole sequences run together: one step of the fit
    openings: bool = True  # a causal model: also on many short sequences (`sequential`)
    seed: int = 0  # of the order of batches in the fit

    def __post_init__(self) -> None:
        if self.batch_tokens < 1 or (self.ridge is not None and self.ridge < 0):
            raise HeadwiseError(
                f"ridge must not be negative and batch_tokens must be at least 1, got "
                f"{self.ridge} and {self.batch_tokens}."
            )
        if self.fit_rate <= 0 or (self.fit is not None and self.fit < 0):
            raise HeadwiseError(
                f"fit must be 0 or more steps at a rate above 0, got {self.fit} and "
                f"{self.fit_rate}."
            )

    @property
    def folds_only(self) -> bool:
        """Whether the kept directions are folded and nothing else is done."""
        return not self.refit and self.fit == 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, for records and for the key of finished layers."""
        return asdict(self)
