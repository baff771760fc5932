"""The settings of a profile run; the command line's defaults are these."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headwise.errors import HeadwiseError


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """How much text is read, and in which chunks."""

    length: int = 512  # tokens per sequence
    tokens: int = 32768  # read at most
    chunk: int = 4  # sequences that run together and are saved together
    seed: int = 0  # of masked positions and random probes

    def __post_init__(self) -> None:
        if self.length < 4 or self.chunk < 1 or self.tokens < self.length:
            raise HeadwiseError(
                "a profile needs a length of at least 4, a chunk of at least 1 and tokens for at "
                f"least one length, got length {self.length}, chunk {self.chunk} and tokens "
                f"{self.tokens}."
            )

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-ready data."""
        return asdict(self)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The context lengths at which attention is looked at: 4, 8, 16, … and the last."""
        doubled = [2**i for i in range(2, self.length.bit_length()) if 2**i < self.length]
        return (*doubled, self.length)
