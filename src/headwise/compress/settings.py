"""How a model is cut; the one source of the defaults."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headwise.errors import HeadwiseError


@dataclass(frozen=True, slots=True)
class CutSettings:
    """What a cut does besides folding the kept directions."""

    refit: bool = True  # refit W_O of each layer on the already cut layers before it
    ridge: float = 1e-2  # pull of the refit towards the folded weights
    batch: int = 4  # sequences run together

    def __post_init__(self) -> None:
        if self.ridge < 0 or self.batch < 1:
            raise HeadwiseError(
                f"ridge must not be negative and batch must be at least 1, got {self.ridge} and "
                f"{self.batch}."
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, for records and for the key of finished layers."""
        return asdict(self)
